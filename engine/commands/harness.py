"""`tunedeck eval --harness`: public tasks, the base and what was trained from it in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.commands.shared import importing, make_console, prepare_libraries, print_progress
from engine.config.files.text import visible

if TYPE_CHECKING:
    from engine.config.schema.run import RunSpec
    from engine.extras.harness.harness import HarnessResult
    from engine.journal.directory import RunDirectory

TaskResults = list[tuple[str, Any]]
"""(run or model, its HarnessResult); the base of a run comes first."""


def score_on_tasks(
    targets: Sequence[RunDirectory | tuple[str, RunSpec]], checkpoint: str | None = None,
    overrides: Sequence[str] = (), *, trusted: bool = False,
) -> TaskResults:  # fmt: skip
    """Score runs, or models by name and spec. `trusted`: this command line allows code that comes with runs' models and
    tasks. Raises TunedeckError."""
    from engine.config.load import load_run_spec
    from engine.journal.directory import RunDirectory

    first = targets[0]
    prepare_libraries(load_run_spec(first.run_toml, own=True) if isinstance(first, RunDirectory) else first[1])
    with importing():
        from engine.extras.harness.harness import require_harness, score_model_on_tasks, score_run_on_tasks
    require_harness()
    found: TaskResults = []
    for target in targets:
        if isinstance(target, RunDirectory):
            results = score_run_on_tasks(target, checkpoint, print_progress, overrides=overrides, trusted=trusted)
            found += [(target.name, result) for result in results]
        else:
            found.append((target[0], score_model_on_tasks(target[1], print_progress)))
    return found


def refuse_code_of_tasks(
    targets: Sequence[RunDirectory | tuple[str, RunSpec]], overrides: Sequence[str] = (), *, trusted: bool = False
) -> None:
    """Raise UsageError, before anything is scored, for code in task files that the command line does not allow."""
    from engine.config.load import load_run_spec
    from engine.extras.harness.task_files import refuse_untrusted_tasks
    from engine.journal.directory import RunDirectory

    with importing():
        from engine.evaluate.run import with_overrides
    for target in targets:
        spec = (
            with_overrides(load_run_spec(target.run_toml, own=True), overrides)
            if isinstance(target, RunDirectory) else target[1]
        )  # fmt: skip
        include = spec.recipe.evaluate.harness_include
        if include is not None and Path(include).is_dir():
            refuse_untrusted_tasks(Path(include), trusted=trusted or spec.limits.trust_remote_code)


def tasks_as_json(found: TaskResults) -> list[dict[str, Any]]:
    return [_as_json(name, result, found) for name, result in found]


def print_tasks(found: TaskResults) -> None:
    """A row for each metric, a column for each model, and for runs what they forgot."""
    from rich.table import Table

    console = make_console()
    table = Table("task/metric", *(visible(_label(name, result, found)) for name, result in found), "change", box=None)
    metrics = dict.fromkeys(metric for _, result in found for task in result.tasks for metric in task.metrics)
    scores = [{metric: value for task in result.tasks for metric, value in task.metrics.items()} for _, result in found]
    told = {change.metric: change for change in _last_changes(found)}
    for metric in metrics:
        cells = [f"{each[metric]:.4f}" if metric in each else "-" for each in scores]
        table.add_row(metric, *cells, _change_text(told.get(metric)))
    console.print(table)
    for note in dict.fromkeys(note for _, result in found for task in result.tasks for note in task.notes):
        console.print(visible(note), soft_wrap=True)
    forgotten = [change.metric for change in told.values() if change.forgot]
    if forgotten:
        console.print(f"forgot more than its interval: {', '.join(forgotten)}", soft_wrap=True)


def _label(name: str, result: HarnessResult, found: TaskResults) -> str:
    several = len({each for each, _ in found}) > 1
    step = {None: "", 0: "base"}.get(result.step, f"step {result.step}")
    return " ".join(part for part in (name if several or result.step is None else "", step) if part)


def _last_changes(found: TaskResults) -> list[Any]:
    """Of the last result over the base of the same run; empty for models."""
    from engine.extras.harness.harness import changes

    name, last = found[-1]
    base = next((result for each, result in found if each == name and result.step == 0), None)
    return changes(base, last) if base is not None and base is not last else []


def _change_text(change: Any) -> str:
    if change is None:
        return ""
    if change.low is None or change.high is None:
        return f"{change.gain:+.4f}"
    return f"{change.gain:+.4f} ({change.low:+.4f} to {change.high:+.4f}){' forgot' if change.forgot else ''}"


def _as_json(name: str, result: HarnessResult, found: TaskResults) -> dict[str, Any]:
    tasks = [{key: value for key, value in asdict(task).items() if key != "values"} for task in result.tasks]
    more = {}
    if result is found[-1][1]:
        more = {"changes": [{**asdict(change), "forgot": change.forgot} for change in _last_changes(found)]}
    return {"target": name, "step": result.step, "tasks": tasks, **more}
