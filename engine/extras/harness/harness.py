"""Public tasks: scores the checkpoints of a run, and the model that it started from, by lm-evaluation-harness.

The tasks, their prompts, filters and metrics are lm-evaluation-harness's; the model, batches, backoff, resume and
intervals are ours (`engine.extras.harness.harness_model`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from engine.config.files.machine import install_command
from engine.config.load import load_run_spec
from engine.config.schema.data import Evaluate
from engine.config.schema.run import RunSpec
from engine.data.hub_connection import offline_if_unreachable
from engine.data.prompts import was_trained_plain
from engine.data.store import hash_text
from engine.device.base import Device
from engine.device.open import open_device
from engine.errors import EnvironmentProblem, UsageError
from engine.evaluate.answers import weights_identity
from engine.evaluate.run import Notify, weights_to_score, with_overrides, with_trust
from engine.extras.harness.task_files import TaskFiles, refuse_untrusted_tasks
from engine.extras.harness.task_sandbox import tasks_in_sandbox
from engine.journal.directory import RunDirectory
from engine.journal.evaluations import Evaluation, append_evaluation, now, scoring
from engine.journal.score_groups import bootstrap, lower_is_better
from engine.model.config import model_config_dict
from engine.model.load import load_and_tell
from engine.model.loaded import LoadedModel
from engine.model.tokenizer import load_tokenizer

LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, ImportError)
"""What loading a task raises: no network, no such data set, a file that is not there, a package that its data need."""


@dataclass(frozen=True)
class TaskScores:
    """One task's scores of one model."""

    task: str
    metrics: dict[str, float]
    """By "TASK/METRIC", and "TASK/METRIC/FILTER" for a filter other than the task's only one."""
    values: dict[str, list[float]]
    """Of each sample, for metrics that are a mean over samples."""
    count: int
    data: str
    """Fingerprint of the samples, the task's version, its shots and whether the chat template was used."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class HarnessResult:
    """The scores of one checkpoint; step 0 is the model that the run started from, None a model that is no run."""

    step: int | None
    tasks: list[TaskScores]


def require_harness() -> None:
    """Raises EnvironmentProblem if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise EnvironmentProblem(
            "--harness: lm-evaluation-harness is not installed", fix=install_command("lm-eval", ["lm-eval"])
        )


def load_tasks(names: Sequence[str], include: str | None, *, trusted: bool = False) -> Any:
    """lm-evaluation-harness's task manager, with these tasks tried: their data are read here, before any model is
    loaded. `trusted`: the command line allows code that comes with the files in `include`. Raises UsageError for an
    unknown task or for code that is not allowed, EnvironmentProblem if a task's data cannot be had."""
    if include is not None and not Path(include).is_dir():
        raise UsageError(f"--include-path {include}: no such folder", fix="name a folder with task files (.yaml)")
    files = refuse_untrusted_tasks(Path(include), trusted=trusted) if include is not None else None
    require_harness()
    if files is not None:
        _refuse_unknown_metrics(files)
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include, include_defaults=False) if include is not None else None
    if manager is None or any(name not in manager.all_tasks for name in names):
        manager = TaskManager(include_path=include)  # reads thousands of files: seconds
    for name in names:
        if name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, 3)
            raise UsageError(
                f"--harness {name}: not a task of lm-evaluation-harness",
                expected=f"such as {', '.join(near)}" if near else "one of its tasks, groups or tags",
                fix="for your own tasks: --include-path DIR",
            )
    with offline_if_unreachable(), tasks_in_sandbox(include is not None and not trusted):
        for name in names:
            try:
                manager.load([name])
            except LOADING_ERRORS as error:
                first = (str(error).splitlines() or [""])[0]
                raise EnvironmentProblem(
                    f"--harness {name}: its data cannot be loaded: {type(error).__name__}: {first}",
                    expected="a reachable hub, or the data in the cache",
                    fix="connect to the network once, or leave the task out",
                ) from error
    return manager


def _refuse_unknown_metrics(files: TaskFiles) -> None:
    """Raise UsageError for a metric that lm-evaluation-harness would load as code from the hub."""
    import lm_eval.api.metrics  # noqa: F401  # registers its own
    from lm_eval.api.registry import metric_registry

    unknown = sorted(name for name in files.metrics if name not in metric_registry)
    if unknown:
        raise UsageError(
            f"evaluate.harness_include: not metrics of lm-evaluation-harness: {', '.join(map(repr, unknown[:3]))}",
            expected="one of its built-in metrics; others run code from the hub",
            fix="if you trust the author of the tasks, add --trust-remote-code",
        )


def score_run_on_tasks(
    place: RunDirectory, wanted: str | None, notify: Notify, *, overrides: Sequence[str] = (), trusted: bool = False
) -> list[HarnessResult]:
    """Score the model that the run started from and the checkpoints that `wanted` (`--checkpoint`) selects on
    evaluate.harness; recorded in the run's `evaluations.jsonl`. What an interrupted scoring computed is kept.
    `trusted`: this command line allows code of the model and of task files, beside what the user allowed the run.

    Raises TunedeckError: a task, device or model cannot be had, or memory ran out.
    """
    chosen: list[tuple[int, Path | None]] = [(0, None), *weights_to_score(place, wanted)]
    spec = with_trust(with_overrides(load_run_spec(place.run_toml, own=True), overrides), trusted)
    manager, device, found = _tasks_of(spec), open_device(spec), []
    with scoring(place, notify), device.activate():
        loaded = _load(spec, device, notify)
        for step, weights in chosen:
            notify(f"tasks: step {step}" if weights else "tasks: the base model of the run")
            if weights is not None:
                loaded.load_weights(weights)
            identity = weights_identity(spec, weights)
            kept = place.kept_scores / f"harness-{identity[:16]}.jsonl"
            tasks = evaluate_tasks(spec, loaded, manager, kept, identity, notify)
            for scores in tasks:
                _record(place, step, scores, identity)
            found.append(HarnessResult(step, tasks))
    return found


def score_model_on_tasks(spec: RunSpec, notify: Notify) -> HarnessResult:
    """Score a model that is no run; nothing is kept. Raises TunedeckError as `score_run_on_tasks` does."""
    manager, device = _tasks_of(spec), open_device(spec)
    with device.activate():
        return HarnessResult(None, evaluate_tasks(spec, _load(spec, device, notify), manager, None, "", notify))


def _tasks_of(spec: RunSpec) -> Any:
    asked = spec.recipe.evaluate
    return load_tasks(asked.harness, asked.harness_include, trusted=spec.limits.trust_remote_code)


def _load(spec: RunSpec, device: Device, notify: Notify) -> LoadedModel:
    tokenizer = load_tokenizer(spec.recipe.model, trust_remote_code=spec.limits.trust_remote_code)
    return load_and_tell(spec, device, tokenizer, notify)


def evaluate_tasks(
    spec: RunSpec, loaded: LoadedModel, manager: Any, kept: Path | None, identity: str, notify: Notify
) -> list[TaskScores]:
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's bars; `notify` tells how far it is
    from lm_eval import simple_evaluate

    from engine.extras.harness.harness_model import HarnessModel, KeptResults

    recipe, has_template = spec.recipe, bool(loaded.tokenizer.chat_template)
    asked = task_options(recipe.evaluate, has_template=has_template, plain=was_trained_plain(spec))
    positions = HarnessModel.positions_of(model_config_dict(spec))
    model = HarnessModel(loaded, recipe.generate, positions, KeptResults(kept, identity), notify,
                         recipe.data.template_args)  # fmt: skip
    template = asked["apply_chat_template"]
    system = recipe.data.system_prompt if template else None
    untrusted = recipe.evaluate.harness_include is not None and not spec.limits.trust_remote_code
    with tasks_in_sandbox(untrusted):
        results = simple_evaluate(
            model=model, task_manager=manager, bootstrap_iters=0, system_instruction=system, **asked
        )
    return [_task_scores(name, results, template) for name in results["samples"]]


def task_options(asked: Evaluate, *, has_template: bool, plain: bool = False) -> dict[str, Any]:
    """Options of lm-evaluation-harness's `simple_evaluate`. `plain`: the run was trained outside the chat template,
    which "auto" then leaves out. Raises UsageError if evaluate.harness_template is "on" and the tokenizer has none."""
    if asked.harness_template == "on" and not has_template:
        raise UsageError(
            'evaluate.harness_template = "on", but the tokenizer has no chat template',
            fix="--set evaluate.harness_template=off",
        )
    template = has_template and (asked.harness_template == "on" or (asked.harness_template == "auto" and not plain))
    return {
        "tasks": list(asked.harness), "num_fewshot": asked.harness_fewshot, "limit": asked.limit,
        "apply_chat_template": template,
    }  # fmt: skip


def _task_scores(task: str, results: dict[str, Any], template: bool) -> TaskScores:
    samples = results["samples"][task]
    metrics, values = {}, {}
    for key, value in results["results"][task].items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        name = f"{task}/{metric}" if filtered == "none" else f"{task}/{metric}/{filtered}"
        metrics[name] = float(value)
        own = [sample.get(metric) for sample in samples if sample.get("filter", "none") == filtered]
        if own and all(isinstance(each, int | float) for each in own):
            numbers = [float(each) for each in own if each is not None]
            if abs(sum(numbers) / len(numbers) - float(value)) < 1e-9:  # a mean, and no other figure of the values
                values[name] = numbers
    version, shots = results["versions"].get(task), results["n-shot"].get(task)
    documents = [str(sample.get("doc_hash")) for sample in samples]
    count = len({sample["doc_id"] for sample in samples})
    how = f"{task} version {version}, {shots} shots, {'with' if template else 'without'} the chat template"
    return TaskScores(task, metrics, values, count, hash_text(how, *documents), [how])


def _record(place: RunDirectory, step: int, scores: TaskScores, identity: str) -> None:
    evaluation = Evaluation(
        time=now(), step=step, metrics=scores.metrics, count=scores.count, data=scores.data, weights=identity,
        sources=[scores.task], notes=scores.notes,
    )  # fmt: skip
    append_evaluation(place, evaluation, scores.values)


@dataclass(frozen=True)
class TaskChange:
    """What training changed of one metric, as gain: negative is worse."""

    metric: str
    base: float
    tuned: float
    gain: float
    low: float | None
    """Lower end of the 95 % interval, as `high` is the upper; None for a metric that is not a mean over samples."""
    high: float | None

    @property
    def forgot(self) -> bool:
        """Worse, and the interval does not include 0."""
        return self.high is not None and self.high < 0


def changes(base: HarnessResult, tuned: HarnessResult) -> list[TaskChange]:
    """By metric, for tasks that both were scored on with the same samples."""
    found = []
    for one, other in zip(base.tasks, tuned.tasks, strict=True):
        for metric in one.metrics.keys() & other.metrics.keys() if one.data == other.data else ():
            sign = -1.0 if lower_is_better(metric) else 1.0
            before, after = one.metrics[metric], other.metrics[metric]
            low = high = None
            if metric in one.values and metric in other.values:
                pairs = zip(one.values[metric], other.values[metric], strict=True)
                low, high = bootstrap([sign * (after_it - before_it) for before_it, after_it in pairs])
            found.append(TaskChange(metric, before, after, sign * (after - before), low, high))
    return sorted(found, key=lambda change: change.metric)
