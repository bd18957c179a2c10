"""The model card of a result: metadata that the hub reads, and what a reader asks, from what the run recorded."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from engine.config.load import load_run_spec
from engine.config.schema.recipe import Model, Recipe
from engine.config.schema.run import RunSpec
from engine.extras.handover.result import Result
from engine.journal.directory import RUN_TOML, RunDirectory
from engine.journal.evaluations import read_evaluations, values_of
from engine.journal.events import Event, EventTail
from engine.journal.score_groups import bootstrap
from engine.model.reference import find_starting_weights
from engine.model.result_files import is_hub_id
from engine.model.tensor_file import saved_shapes

MARK = re.compile(r"<!-- card of tunedeck ([0-9a-f]{64}) -->\n?$")
"""Ends a card that was written here, with the SHA-256 of the text before."""


@dataclass(frozen=True)
class Origin:
    """The model that a run started from, as others can have it."""

    hub_id: str | None
    """None: it is a folder of this machine, or nothing that was trained."""
    revision: str | None = None
    random: bool = False
    """Training began with random weights."""


@dataclass(frozen=True)
class Score:
    metric: str
    value: float
    interval: tuple[float, float] | None
    """95 %; None for a metric that is not a mean over samples."""
    before: float | None
    """Of the model that the run started from."""
    on: str
    count: int | None


def origin_of(model: Model) -> Origin:
    """Follows runs that started from other runs."""
    if model.init == "random":
        return Origin(None, random=True)
    start = find_starting_weights(model)
    folder = start.folder
    if folder is None:
        named = ":" not in start.base and is_hub_id(start.base)
        return Origin(start.base if named else None, start.revision, random=not named)
    run = next((place for place in folder.resolve().parents[:4] if (place / RUN_TOML).is_file()), None)
    return Origin(None) if run is None else origin_of(load_run_spec(run / RUN_TOML, own=True).recipe.model)


def is_untouched(card: str) -> bool:
    """Whether `card` is as it was written here: one that somebody edited is not replaced."""
    found = MARK.search(card)
    return found is not None and _digest(card[: found.start()]) == found[1]


@dataclass(frozen=True)
class Facts:
    """What a card says, besides what `result` and `spec` know."""

    repo: str
    form: str
    """adapter, merged, or model (trained in full)."""
    step: int
    origin: Origin
    task: str
    """text-generation or image-text-to-text."""
    license: dict[str, str]
    """`license`, and for one that the hub has no name for `license_name` and `license_link`; empty if not known."""


def write_card(result: Result, spec: RunSpec, directory: RunDirectory, facts: Facts) -> str:
    """The whole README.md. The same for the same run, so that sending it again has no effect."""
    events = list(_events(directory))
    scores = read_scores(directory, events, facts.step)
    parts = [
        f"# {facts.repo.rpartition('/')[2]}",
        _introduction(spec, facts),
        f"## Use\n\n```python\n{_use(result, spec, facts)}\n```\n\n{_table(_answers(result))}",
        f"## Training\n\n{_table(_training(spec.recipe, events, facts))}",
        f"## Scores\n\n{_scores_table(scores)}" if scores else "",
        f"## Versions\n\n{_table(_versions(events))}",
    ]
    if facts.form == "adapter" and result.merged_only:
        parts.insert(3, "Servers such as vLLM need it merged: " + "; ".join(result.merged_only) + ".")
    metadata = _metadata(spec, facts, scores).to_yaml()
    text = f"---\n{metadata}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n\n"
    return f"{text}<!-- card of tunedeck {_digest(text)} -->\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _events(directory: RunDirectory) -> Iterator[Event]:
    """Without the steps, of which a long run has a million."""
    kinds = ("run_started", "stage_started", "eval", "weights")
    return (event for event in EventTail(directory.events).poll() if event["kind"] in kinds)


def _metadata(spec: RunSpec, facts: Facts, scores: list[Score]) -> ModelCardData:
    method = spec.recipe.method
    sources = spec.recipe.data.sources
    lora = ["lora"] if method.kind == "lora" else []
    more: dict[str, Any] = dict(facts.license)
    if facts.origin.hub_id:
        more["base_model_relation"] = "adapter" if facts.form == "adapter" else "finetune"
    results = [
        EvalResult(
            task_type=facts.task,
            dataset_type=_slug(score.on),
            dataset_name=score.on,
            metric_type=_slug(_short(score.metric)),
            metric_name=score.metric,
            metric_value=round(score.value, 6),
        )
        for score in scores
    ]
    return ModelCardData(
        model_name=facts.repo.rpartition("/")[2] if results else None,
        base_model=facts.origin.hub_id,
        datasets=list(dict.fromkeys(source.hub for source in sources if source.enabled and source.hub)) or None,
        library_name="peft" if facts.form == "adapter" else "transformers",
        pipeline_tag=facts.task,
        tags=["tunedeck", method.objective, *lora],
        eval_results=results or None,
        **more,
    )


def _slug(text: str) -> str:
    return re.sub(r"[^\w./-]+", "-", text).strip("-")


def _short(metric: str) -> str:
    """Of a public task's metric, "TASK/METRIC", the metric."""
    return metric.rpartition("/")[2]


def _introduction(spec: RunSpec, facts: Facts) -> str:
    what = {"adapter": "A LoRA adapter", "merged": "A model with a LoRA adapter merged into it", "model": "A model"}
    base = facts.origin.hub_id
    if facts.origin.random:
        start = "trained from random weights"
    elif base is None:
        start = "trained from a model that is not on the hub"
    else:
        start = f"fine-tuned from [{base}](https://huggingface.co/{base})"
        start += f" at revision `{facts.origin.revision}`" if facts.origin.revision else ""
    license = f" Its base is licensed {facts.license['license']}." if facts.license else ""
    return f"{what[facts.form]}, {start} with Tunedeck.{license}"


def _rows(result: Result) -> str:
    """The rows that the base's embedding needs for the adapter: those of the tables that it holds in full, else of the
    tokenizer."""
    least = len(result.tokenizer)
    held = [
        shape[0]
        for name, shape in saved_shapes(result.folder).items()
        if ".lora_" not in name and len(shape) == 2 and shape[0] >= least
    ]
    return str(max(held)) if held else "len(tokenizer)"


def _use(result: Result, spec: RunSpec, facts: Facts) -> str:
    images = facts.task != "text-generation"
    model_class = "AutoModelForImageTextToText" if images else "AutoModelForCausalLM"
    repo = json.dumps(facts.repo)
    lines = [f"from transformers import {model_class}, AutoTokenizer, GenerationConfig", ""]
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({repo})")
    if facts.form == "adapter":
        lines.insert(0, "from peft import PeftModel")
        base = json.dumps(facts.origin.hub_id or "PATH OF THE BASE MODEL")
        revision = f", revision={json.dumps(facts.origin.revision)}" if facts.origin.revision else ""
        lines.append(f"model = {model_class}.from_pretrained({base}{revision})")
        if spec.recipe.model.add_tokens:
            lines.append(f"model.resize_token_embeddings({_rows(result)})")
        lines.append(f"model = PeftModel.from_pretrained(model, {repo})")
    else:
        lines.append(f"model = {model_class}.from_pretrained({repo})")
    if result.tokenizer.chat_template:
        told = "".join(f", {name}={value!r}" for name, value in result.variables.items())
        lines.append('messages = [{"role": "user", "content": "..."}]')
        lines.append(
            "given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
            f'return_dict=True, return_tensors="pt"{told})'
        )
    else:
        lines.append('given = tokenizer("...", return_tensors="pt")')
    lines.append(f"answer = model.generate(**given, generation_config=GenerationConfig.from_pretrained({repo}))")
    lines.append('print(tokenizer.decode(answer[0][given["input_ids"].shape[1]:]))')
    return "\n".join(lines)


def _answers(result: Result) -> list[tuple[str, str]]:
    ends = result.tokenizer.convert_ids_to_tokens(list(result.ends))
    told = ", ".join(f"`{name} = {json.dumps(value)}`" for name, value in result.variables.items())
    return [
        ("An answer ends with", ", ".join(f"`{token}`" for token in ends) or "no known token"),
        ("Variables of the chat template", told or ("none" if result.tokenizer.chat_template else "")),
        ("System prompt", "part of every training sample; not published here" if result.system else ""),
        ("Training length", f"{result.context:,} tokens"),
    ]


def _training(recipe: Recipe, events: list[Event], facts: Facts) -> list[tuple[str, str]]:
    method, train, data = recipe.method, recipe.train, recipe.data
    started: Event = next((event for event in reversed(events) if event["kind"] == "stage_started"), {})
    names = [f"{each.hub} (hub)" if each.hub else each.name for each in data.sources if each.enabled]
    counts = f": {started['samples']:,} samples, {started['tokens']:,} tokens" if started else ""
    targets = method.targets if isinstance(method.targets, str) else ", ".join(method.targets)
    lora = f"{'DoRA' if method.dora else 'LoRA'}, rank {method.rank}, alpha {method.effective_alpha:g}, on {targets}"
    also = f"; trained in full: {', '.join(method.also_train)}" if method.also_train else ""
    base = f"; base in {recipe.model.quantize}" if recipe.model.quantize != "none" else ""
    warm_up = f", {train.warmup_steps} warm-up steps" if train.warmup_steps else ""
    objective = f"{method.objective} ({recipe.preference.loss})" if method.objective == "dpo" else method.objective
    return [
        ("Data", ", ".join(names) + counts),
        ("Objective", objective),
        ("Method", f"{lora}{also}{base}" if method.kind == "lora" else "full fine-tuning"),
        ("Steps", f"{facts.step:,} with {started['batch_size']} sequences each" if started else f"{facts.step:,}"),
        ("Epochs", f"{started['epochs']:g}" if started.get("epochs") else ""),
        ("Learning rate", f"{train.peak_learning_rate:g}, {train.scheduler}{warm_up}"),
        ("Optimizer", f"{train.optimizer}, weight decay {train.weight_decay:g}"),
        ("Copied from the base", _copied(events, facts.form)),
        ("Dtype", recipe.model.dtype if recipe.model.dtype != "auto" else ""),
        ("Seed", str(train.seed)),
    ]  # fmt: skip


MOST_COPIED = 5
"""Names of tensors in a cell."""


def _copied(events: list[Event], form: str) -> str:
    """The tensors of a full or merged model that were not trained, by name with the reason."""
    source = {"model": "result", "merged": "merged", "adapter": ""}[form]
    accounts = [each for each in events if each["kind"] == "weights" and each["source"] == source]
    unread: dict[str, str] = accounts[-1]["unread"] if accounts else {}
    names = list(unread)
    more = f" and {len(names) - MOST_COPIED:,} more" if len(names) > MOST_COPIED else ""
    reasons = ", ".join(dict.fromkeys(unread.values()))
    return f"{', '.join(f'`{name}`' for name in names[:MOST_COPIED])}{more}, not trained: {reasons}" if names else ""


def _versions(events: list[Event]) -> list[tuple[str, str]]:
    started: Event = next((event for event in reversed(events) if event["kind"] == "run_started"), {})
    return [
        ("tunedeck", version("tunedeck")),
        *((name, str(told)) for name, told in started.get("versions", {}).items()),
    ]


def read_scores(directory: RunDirectory, events: list[Event], step: int) -> list[Score]:
    """What `tunedeck eval` scored of the weights of `step`, with 95 % bootstrap intervals; for other metrics, what
    training measured on its validation data at this step."""
    known = read_evaluations(directory)
    found = []
    for one in (each for each in known if each.step == step):
        started: dict[str, float] = next(
            (base.metrics for base in known if base.step == 0 and (base.data, base.count) == (one.data, one.count)), {}
        )
        for metric, value in _numbers(one.metrics):
            values = values_of(directory, one, metric)
            interval = bootstrap(values) if values else None
            on = ", ".join(one.sources) or "held-out samples"
            found.append(Score(metric, value, interval, started.get(metric), on, one.count))
    named = {score.metric for score in found}
    at = {event["step"]: event for event in events if event["kind"] == "eval"}
    if step in at:
        first = dict(_numbers(at[0]["metrics"])) if 0 in at else {}
        found += [
            Score(metric, value, None, first.get(metric), "validation data", at[step].get("count"))
            for metric, value in _numbers(at[step]["metrics"])
            if metric not in named
        ]
    return found


def _numbers(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def _scores_table(scores: list[Score]) -> str:
    head = ("metric", "value", "95 % interval", "before training", "scored on", "samples")
    rows = [
        (
            score.metric,
            f"{score.value:.4g}",
            "-" if score.interval is None else "{:.4g} to {:.4g}".format(*score.interval),
            "-" if score.before is None else f"{score.before:.4g}",
            score.on,
            "-" if score.count is None else f"{score.count:,}",
        )
        for score in scores
    ]
    return "\n".join([_row(head), _row(["---"] * len(head)), *map(_row, rows)])


def _table(rows: list[tuple[str, str]]) -> str:
    """Rows without a value are left out."""
    return "\n".join(["| | |", "|---|---|", *(_row(row) for row in rows if row[1])])


def _row(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
