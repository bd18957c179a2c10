"""Scores the checkpoints of a run, or any other model, on a recipe's validation data.

Try: `tunedeck eval last --checkpoint best`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.batching.cost import micro_batch_cost, with_largest_image
from engine.budget.predict.parallel_layout import on_one_device
from engine.data.images import ImageProcessor
from engine.data.prepare import prepare_data, prepare_sources
from engine.data.tokens import TokenData
from engine.device import open_device
from engine.device.base import Device
from engine.errors import DataError, UsageError
from engine.evaluate.scores import EvaluationContext, FailedPass, Scores, evaluate
from engine.journal.checkpoints_on_disk import Checkpoint, best_step, damage, find_checkpoints, removed_checkpoints
from engine.journal.directory import RunDirectory
from engine.model.config import check_packing
from engine.model.image_processor import load_image_processor
from engine.model.load import LoadedModel, load_model
from engine.model.loss import make_loss
from engine.model.reference import find_run_weights, refuse_removed
from engine.model.tokenizer import load_tokenizer
from engine.spec.load import load_run_spec
from engine.spec.schema.run import RunSpec


def checkpoints_to_score(place: RunDirectory, wanted: str | None) -> list[Checkpoint]:
    """Return the checkpoints that `--checkpoint` selects: a step, "best", "all", or None for the newest.

    Raises:
        UsageError: no such checkpoint, or a selected checkpoint is damaged.
    """
    found = find_checkpoints(place.checkpoints)
    chosen: list[Checkpoint]
    if wanted == "all":
        chosen = found[::-1]
    elif wanted == "best":
        chosen = [checkpoint for checkpoint in found if checkpoint.step == best_step(place.checkpoints)]
    elif wanted is None:
        chosen = found[:1]
    else:
        number = wanted.removeprefix("step-").lstrip("0")
        chosen = [checkpoint for checkpoint in found if str(checkpoint.step) == number]
    if not chosen:
        steps = ", ".join(str(checkpoint.step) for checkpoint in found)
        raise UsageError(
            f"{place.name} has no checkpoint {wanted or ''}".rstrip(),
            expected=f"one of: {steps}, best, all" if found else "a run that has written one",
            fix="" if found else f"train it further: tunedeck resume {place.name}",
        )
    for checkpoint in chosen:
        problem = damage(checkpoint)
        if problem:
            raise UsageError(f"checkpoint {checkpoint.path.name} is damaged: {problem}", fix="use another checkpoint")
    return chosen


def weights_to_score(place: RunDirectory, wanted: str | None) -> list[tuple[int, Path]]:
    """Return (step, folder with weights) of each checkpoint that `--checkpoint` selects. For a stage whose checkpoints
    were removed at the end of its run, that is the stage's result alone.

    Raises:
        UsageError: no such checkpoint, it was removed, or it is damaged.
    """
    removed = removed_checkpoints(place.checkpoints)
    if removed is None:
        return [(checkpoint.step, checkpoint.weights) for checkpoint in checkpoints_to_score(place, wanted)]
    takes_best = load_run_spec(place.run_toml).recipe.checkpoint.result == "best"
    step = removed.best if takes_best and removed.best is not None else removed.steps[0]
    if wanted in (None, "all", str(step)) or (wanted == "best" and step == removed.best):
        return [(step, find_run_weights(f"run:{place.path}"))]
    refuse_removed(place, wanted or "", f"{place.name}@{wanted}")
    raise UsageError(
        f"{place.name} has no checkpoint {wanted}",
        expected=f"the stage's result: {step}, or no --checkpoint at all",
        fix="leave --checkpoint out",
    )


def score_run(place: RunDirectory, wanted: str | None, notify: Callable[[str], None]) -> list[tuple[int, Scores]]:
    """Score the selected checkpoints of a run on its validation data; returns (step, scores) for each checkpoint.

    Raises:
        TunedeckError: the run's spec, device, data or model cannot be opened, or memory ran out.
    """
    chosen = weights_to_score(place, wanted)
    spec = load_run_spec(place.run_toml, own=True)
    device = open_device(spec)
    with device.activate():
        context, data = _prepare(spec, device, notify)
        results = []
        for step, weights in chosen:
            notify(f"scoring step {step}")
            context.loaded.load_weights(weights)
            results.append((step, _score(context, data, spec)))
    return results


def score_model(spec: RunSpec, notify: Callable[[str], None]) -> Scores:
    """Score the model that `spec` names, without training it, on the recipe's validation data. `notify` is called with
    sentences on the progress.

    Raises:
        TunedeckError: the device, the data or the model cannot be opened, or memory ran out.
    """
    device = open_device(spec)
    with device.activate():
        context, data = _prepare(spec, device, notify)
        return _score(context, data, spec)


def _prepare(spec: RunSpec, device: Device, notify: Callable[[str], None]) -> tuple[EvaluationContext, TokenData]:
    check_packing(spec)
    tokenizer = load_tokenizer(spec.recipe.model, trust_remote_code=spec.limits.trust_remote_code)
    images = load_image_processor(spec, tokenizer)
    with device.host_region():
        data = _data_to_score_on(spec, tokenizer, images, notify)
    notify("loading model")
    loaded = load_model(spec, device, tokenizer)
    spec = with_largest_image(spec, data, images)
    return _make_context(spec, device, loaded, data, notify), data


def _data_to_score_on(
    spec: RunSpec,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageProcessor | None,
    notify: Callable[[str], None],
) -> TokenData:
    """The data of evaluate.sources, else the recipe's validation set. Raises DataError if there is neither."""
    if spec.recipe.evaluate.sources:
        return prepare_sources(spec, spec.recipe.evaluate.sources, tokenizer, images, notify=notify)
    prepared = prepare_data(spec, tokenizer, images, notify=notify)
    if prepared.validation is None:
        raise DataError(
            "there is no data to score on",
            fix="add [[evaluate.sources]] or [[data.validation]] to the recipe, or set data.valid_fraction",
        )
    return prepared.validation


def _make_context(
    spec: RunSpec, device: Device, loaded: LoadedModel, data: TokenData, notify: Callable[[str], None]
) -> EvaluationContext:
    planned = micro_batch_cost(on_one_device(spec), int(data.lengths.max()))
    loss = make_loss(
        loaded, implementation=spec.recipe.train.loss, label_smoothing=0.0, chunk_tokens=None, device=device
    )

    def report(failed: FailedPass, remedy: str, before: Any, after: Any) -> None:
        notify(f"out of memory in {failed.failure.phase}: {remedy} {before} -> {after}")

    return EvaluationContext(device, loaded, loss, planned.cost, planned.budget, spec.recipe.generate, report)


def _score(context: EvaluationContext, data: TokenData, spec: RunSpec) -> Scores:
    asked = spec.recipe.evaluate
    metrics = sorted({*asked.metrics, *spec.recipe.eval.metrics})
    return evaluate(context, data, metrics, limit=asked.limit, samples=asked.log_samples)
