"""Runs what the author of a task file can write as a program within limits: templates, and regular expressions of
filters and metrics. Each of them may take years on one answer, so they run in processes that can be ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.data.killable import KillableProcess, ProcessEnded, bounded
from engine.data.template_limits import MOST_CHARACTERS, RENDER_BYTES, RENDER_CPU_SECONDS, TEMPLATE_ERRORS
from engine.errors import DataError

ANSWER_CPU_SECONDS = 0.01
"""What a filter may take for each answer, besides RENDER_CPU_SECONDS. The filters of public tasks take a tenth."""


class TaskTemplates:
    """Renders templates of tasks in Jinja's sandbox, and within the limits of chat templates."""

    def __init__(self, undefined: type[jinja2.Undefined], filters: Mapping[str, Callable[..., Any]]) -> None:
        """Take what lm-evaluation-harness puts for missing fields, and its filters."""
        self._sandbox = ImmutableSandboxedEnvironment(undefined=undefined, keep_trailing_newline=True)
        self._sandbox.filters.update(filters)
        self._process = KillableProcess(self._render)  # a pattern of regex_replace may take for ever

    def render(self, template: str, sample: dict[str, Any]) -> str:
        """Return the template's text for a sample. Raises DataError for one that does not end, or does more than put
        fields together."""
        text, reason = _answer(self._process, (template, sample), RENDER_CPU_SECONDS)
        if text is None:
            raise _stopped("template", reason, "a template that only combines the fields of a sample")
        return str(text)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _render(self, request: tuple[str, dict[str, Any]]) -> tuple[str | None, str]:
        """Return the text, or None and what failed."""
        template, sample = request
        try:
            with bounded(RENDER_CPU_SECONDS, RENDER_BYTES):
                text = self._sandbox.from_string(template).render(**sample)
        except TEMPLATE_ERRORS as error:
            return None, f"{type(error).__name__}: {error}"
        return (
            (text, "") if len(text) <= MOST_CHARACTERS else (None, f"more than {MOST_CHARACTERS >> 20} Mi characters")
        )


@contextmanager
def tasks_in_sandbox(needed: bool) -> Iterator[None]:
    """Inside the block, templates of tasks run in Jinja's sandbox, and they, filters and metrics with regular
    expressions take bounded time, if `needed`: lm-evaluation-harness lets templates call any Python function. Raises
    DataError for a template that tries, or for what does not end."""
    if not needed:
        yield
        return
    from lm_eval import utils
    from lm_eval.api import metrics
    from lm_eval.api.filter import FilterEnsemble

    templates = TaskTemplates(utils.env.undefined, utils.env.filters)
    compare = metrics.exact_match_hf_evaluate

    def compare_apart(request: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Any, str]:
        """Return the scores, or None and what failed."""
        arguments, options = request
        try:
            with bounded(RENDER_CPU_SECONDS, RENDER_BYTES):
                return compare(*arguments, **options), ""
        except (*TEMPLATE_ERRORS, re.error) as error:
            return None, f"{type(error).__name__}: {error}"

    comparing = KillableProcess(compare_apart)

    def exact_match(*arguments: Any, **options: Any) -> Any:
        if not options.get("regexes_to_ignore"):
            return compare(*arguments, **options)
        scores, reason = _answer(comparing, (arguments, options), RENDER_CPU_SECONDS)
        if scores is None:
            raise _stopped("metric exact_match", reason, "regexes_to_ignore that match quickly")
        return scores

    before = utils.apply_template, metrics.exact_match_hf_evaluate, FilterEnsemble.apply
    try:
        utils.apply_template = templates.render
        metrics.exact_match_hf_evaluate, FilterEnsemble.apply = exact_match, _apply_filters
        yield
    finally:
        utils.apply_template, metrics.exact_match_hf_evaluate, FilterEnsemble.apply = before
        templates.close()
        comparing.close()


def _apply_filters(ensemble: Any, instances: list[Any]) -> None:
    """Do what lm-evaluation-harness's `FilterEnsemble.apply` does, in a process that can be ended."""
    seconds = RENDER_CPU_SECONDS + ANSWER_CPU_SECONDS * sum(len(instance.resps) for instance in instances)

    def filtered(_: None) -> tuple[list[Any] | None, str]:
        answers: Any = [instance.resps for instance in instances]
        documents = [instance.doc for instance in instances]
        try:
            with bounded(seconds, RENDER_BYTES):
                for make_filter in ensemble.filters:
                    answers = make_filter().apply(answers, documents)
                return list(answers), ""
        except (*TEMPLATE_ERRORS, re.error) as error:
            return None, f"{type(error).__name__}: {error}"

    process = KillableProcess(filtered)  # a fork for each: it has the answers, and only the results are sent
    try:
        results, reason = _answer(process, None, seconds)
    finally:
        process.close()
    if results is None:
        raise _stopped(f"filter {ensemble.name!r}", reason, "patterns that match quickly")
    for instance, result in zip(instances, results, strict=True):
        instance.filtered_resps[ensemble.name] = result


def _answer(process: KillableProcess, request: Any, seconds: float) -> tuple[Any, str]:
    """Return what the process answers; None and a reason where it ended."""
    try:
        answer: tuple[Any, str] = process.ask(request)
    except ProcessEnded as error:
        return None, f"its process {error}, after at most {seconds:g} s of processor time"
    return answer


def _stopped(what: str, reason: str, expected: str) -> DataError:
    return DataError(
        f"evaluate.harness_include: a task's {what} was stopped: {reason}",
        expected=expected,
        fix="if you trust the author of the tasks, add --trust-remote-code",
    )
