"""Scores the checkpoints of a run, or any other model, on a recipe's validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from engine.architecture.positions import refuse_long_sequences, table_of_positions
from engine.batching.predicted_cost import micro_batch_cost, with_largest_image
from engine.budget.predict.parallel_layout import on_one_device
from engine.config.files.caches import SequenceBounds
from engine.config.load import load_run_spec, override
from engine.config.schema.run import RunSpec
from engine.data.images import ImageProcessor
from engine.data.prepare import prepare_data, prepare_sources
from engine.data.store import hash_text
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.open import open_device
from engine.errors import DataError, UsageError
from engine.evaluate.answers import (
    KeptAnswers,
    KeptLosses,
    answer_first,
    data_fingerprint,
    planned_rows,
    tokens_hash,
    weights_identity,
)
from engine.evaluate.context import EvaluationContext, FailedPass
from engine.evaluate.generation import within_positions
from engine.evaluate.scores import Kept, Scorer, Scores, evaluate, load_scorer, sequence_log_probabilities
from engine.evaluate.verdicts import BASE, REFERENCE, RUN, JudgedSet, PromptsToJudge, score_verdicts, write_answers
from engine.journal.checkpoints_on_disk import Checkpoint, best_step, damage, find_checkpoints, removed_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.evaluations import Evaluation, append_evaluation, now, scoring
from engine.journal.own_files import result_files
from engine.journal.stages import typed_name
from engine.model.config import check_packing, model_config_dict
from engine.model.decoder import eval_mode
from engine.model.load import LoadedModel, load_and_tell
from engine.model.loss import LossChoice, make_loss
from engine.model.reference import find_run_weights, find_starting_weights, refuse_removed
from engine.model.tokenizer import load_image_processor, load_tokenizer
from engine.model.verify import require_separation
from engine.objectives.reference import stored_reference

Notify = Callable[[str], None]


def checkpoints_to_score(place: RunDirectory, wanted: str | None) -> list[Checkpoint]:
    """`wanted`: a step, "best", "all", or None for the newest. Raises UsageError: missing or damaged."""
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
            expected=f"one of: {steps}, best, all" if found else "a run with a checkpoint",
            fix="" if found else f"continue training: tunedeck resume {typed_name(place).partition('/')[0]}",
        )
    for checkpoint in chosen:
        problem = damage(checkpoint)
        if problem:
            raise UsageError(f"checkpoint {checkpoint.path.name} is damaged: {problem}", fix="use another checkpoint")
    return chosen


def weights_to_score(place: RunDirectory, wanted: str | None) -> list[tuple[int, Path]]:
    """(step, folder with weights) of what `--checkpoint` selects; for a stage whose checkpoints were removed at the
    end, its result. Raises UsageError: missing, removed, damaged, or with a link that leaves the run's folder."""
    removed = removed_checkpoints(place.checkpoints)
    if removed is None:
        found = checkpoints_to_score(place, wanted)
        for checkpoint in found:
            result_files(checkpoint.weights, place.path)
        return [(checkpoint.step, checkpoint.weights) for checkpoint in found]
    takes_best = load_run_spec(place.run_toml).recipe.checkpoint.result == "best"
    step = removed.best if takes_best and removed.best is not None else removed.steps[0]
    if wanted in (None, "all", str(step)) or (wanted == "best" and step == removed.best):
        return [(step, find_run_weights(f"run:{place.path}"))]
    refuse_removed(place, wanted or "", f"{place.name}@{wanted}")
    raise UsageError(
        f"{place.name} has no checkpoint {wanted}",
        expected=f"the stage's result: {step}, or no --checkpoint",
        fix="leave --checkpoint out",
    )


def score_run(
    place: RunDirectory,
    wanted: str | None,
    notify: Notify,
    *,
    base: bool = False,
    overrides: Sequence[str] = (),
    scorer: str | None = None,
    trusted: bool = False,
) -> list[tuple[int, Scores]]:
    """Score the checkpoints that `wanted` (`--checkpoint`) selects; returns (step, scores) for each.

    Scores go to the run's `evaluations.jsonl`. Answers and losses are kept as they are computed, so an interrupted
    scoring of the same weights and samples continues. `base` also scores the base model, as step 0. `overrides` are
    `--set` for keys of SCORING_KEYS; `scorer` is FILE.py:FUNCTION. `trusted`: this command line allows code of
    the model.

    Raises TunedeckError: spec, device, data or model cannot be opened, or memory ran out.
    """
    chosen: list[tuple[int, Path | None]] = [*([(0, None)] if base else []), *weights_to_score(place, wanted)]
    spec = with_trust(with_overrides(load_run_spec(place.run_toml, own=True), overrides), trusted)
    own = _own_scorer(scorer)
    device = open_device(spec)
    with scoring(place, notify), device.activate():
        context, data = _prepare(spec, device, notify)
        context = _with_reference_of_start(context, data, spec, notify)
        fingerprint, tokens = data_fingerprint(data), tokens_hash(data)
        results = []
        for step, weights in chosen:
            notify(f"scoring step {step}" if weights else "scoring the base model of the run")
            if weights is not None:
                context.loaded.load_weights(weights)
            identity = weights_identity(spec, weights)
            scores = _score(context, data, spec, _kept_in(place, spec, identity, tokens), own)
            _record(place, step, scores, spec, data, Recorded(fingerprint, identity, scorer))
            results.append((step, scores))
    return results


def write_answers_to_judge(
    place: RunDirectory,
    file: Path,
    wanted: str | None,
    notify: Notify,
    *,
    base: bool = False,
    overrides: Sequence[str] = (),
    trusted: bool = False,
) -> JudgedSet:
    """Write pairs of answers to `file`: those of one checkpoint, each beside the data's own answer, or with `base` the
    answer of the model that the run started from. `evaluate.limit` counts pairs. Raises as `score_run` does."""
    ((step, weights),) = weights_to_score(place, wanted)
    spec = with_trust(with_overrides(load_run_spec(place.run_toml, own=True), overrides), trusted)
    device = open_device(spec)
    with scoring(place, notify), device.activate():
        context, data = _prepare(spec, device, notify)
        prompts, tokens = PromptsToJudge(data), tokens_hash(data)
        count = min(len(prompts), spec.recipe.evaluate.limit or len(prompts))
        answers = {}
        for name, folder in ((BASE, None), (RUN, weights)) if base else ((RUN, weights),):
            notify(f"answering {count:,} prompts with {'the base model' if folder is None else f'step {step}'}")
            if folder is not None:
                context.loaded.load_weights(folder)
            kept = _kept_in(place, spec, weights_identity(spec, folder), hash_text(tokens, "to judge"))
            with eval_mode(context.loaded.model):
                answers[name] = answer_first(context, prompts, count, kept.answers)
        own = answers[RUN]
        others = [each["answer"] for each in answers[BASE]] if base else [each["reference"] for each in own]
        judged = JudgedSet(
            step, BASE if base else REFERENCE, data_fingerprint(data), spec.recipe.generate.model_dump(mode="json"),
            weights_identity(spec, weights), data.source_names,
        )  # fmt: skip
        questions, texts = ([each[key] for each in own] for key in ("prompt", "answer"))
        return write_answers(file, place, judged, questions, texts, others)


def score_verdicts_of(place: RunDirectory, file: Path, notify: Notify) -> tuple[int, Scores]:
    """(step, scores) by a judge's verdicts. Raises DataError for verdicts that are not on the answers written for
    it."""
    with scoring(place, notify):
        return score_verdicts(place, file)


class Recorded(NamedTuple):
    """What an evaluation scored; `scorer` is FILE.py:FUNCTION."""

    data: str
    weights: str
    scorer: str | None


def _record(place: RunDirectory, step: int, scores: Scores, spec: RunSpec, data: TokenData, what: Recorded) -> None:
    generated = bool(scores.values or scores.samples or what.scorer)
    evaluation = Evaluation(
        time=now(), step=step, metrics=scores.metrics, count=scores.count, data=what.data,
        generate=spec.recipe.generate.model_dump(mode="json") if generated else None,
        samples=scores.samples, weights=what.weights, sources=data.source_names, classes=scores.classes,
        notes=scores.notes, scorer=what.scorer,
    )  # fmt: skip
    append_evaluation(place, evaluation, scores.values)


def _kept_in(place: RunDirectory, spec: RunSpec, identity: str, tokens: str) -> Kept:
    """What an interrupted scoring of the same weights, tokens and settings left; made when the first is added."""
    folder, generate = place.kept_scores, spec.recipe.generate.model_dump_json()
    answers = folder / f"answers-{hash_text(identity, tokens, generate)[:16]}.jsonl"
    losses = folder / f"losses-{hash_text(identity, tokens)[:16]}.jsonl"
    return Kept(KeptAnswers(answers), KeptLosses(losses))


SCORING_KEYS = ("evaluate.", "generate.", "data.validation.", "data.validation=")
"""Beginnings of the settings that `--set` may change when a run is scored: none of them changes what was trained."""


def with_overrides(spec: RunSpec, overrides: Sequence[str]) -> RunSpec:
    """The spec with `--set`. Raises UsageError for a key that scoring cannot change."""
    refused = [text.partition("=")[0].strip() for text in overrides if not text.strip().startswith(SCORING_KEYS)]
    if refused:
        raise UsageError(
            f"--set {', '.join(refused)}: a run can only be scored with its own settings",
            expected="keys of [evaluate], [generate] and [[data.validation]]",
            fix="leave it out; to score a model with other settings: tunedeck eval MODEL -p PROFILE -r RECIPE",
        )
    if not overrides:
        return spec
    if any(text.strip().startswith("data.validation=") for text in overrides):
        overrides = ["data.valid_fraction=0", *overrides]  # these data instead of what was held out
    # A stage's run spec is called RUN/STAGE, which is no name that a run may be given.
    changed = override(spec, overrides, name=spec.name.replace("/", "-")).spec
    unread = [text.partition("=")[0].strip() for text in overrides if text.strip().startswith("data.validation")]
    if unread and changed.recipe.evaluate.sources:
        raise UsageError(
            f"--set {', '.join(unread)}: this run is scored on its evaluate.sources, not on validation data",
            expected="keys of [[evaluate.sources]], or a run without them",
            fix="add --set evaluate.sources=",
        )
    return changed.model_copy(update={"limits": spec.limits, "name": spec.name})


def with_trust(spec: RunSpec, trusted: bool) -> RunSpec:
    """Return the spec with code of its model and its tasks allowed, if this command line does so (`trusted`)."""
    return (
        spec.model_copy(update={"limits": spec.limits.model_copy(update={"trust_remote_code": True})})
        if trusted
        else spec
    )


def _own_scorer(text: str | None) -> Scorer | None:
    return load_scorer(text) if text is not None else None


def score_model(spec: RunSpec, notify: Notify, *, scorer: str | None = None) -> Scores:
    """Score a model untrained on the recipe's validation data; nothing is kept or recorded, for there is no run
    directory.

    Raises TunedeckError: the device, the data or the model cannot be opened, or memory ran out.
    """
    own = _own_scorer(scorer)
    device = open_device(spec)
    with device.activate():
        context, data = _prepare(spec, device, notify)
        return _score(context, data, spec, None, own)


def _prepare(spec: RunSpec, device: Device, notify: Notify) -> tuple[EvaluationContext, TokenData]:
    check_packing(spec)
    tokenizer = load_tokenizer(spec.recipe.model, trust_remote_code=spec.limits.trust_remote_code)
    images = load_image_processor(spec, tokenizer)
    with device.host_region():
        data = _data_to_score_on(spec, tokenizer, images, notify)
    facts = model_config_dict(spec)
    if int(data.lengths.max()) > (table_of_positions(facts) or math.inf):
        refuse_long_sequences(facts, spec.recipe)
    loaded = load_and_tell(spec, device, tokenizer, notify)
    if spec.recipe.data.packing:
        require_separation(loaded)
    spec = with_largest_image(spec, data, images)
    return _make_context(spec, device, loaded, data, notify), data


def _data_to_score_on(
    spec: RunSpec,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageProcessor | None,
    notify: Notify,
) -> TokenData:
    """evaluate.sources, else the recipe's validation set. Raises DataError if there is neither."""
    if spec.recipe.evaluate.sources:
        return prepare_sources(spec, spec.recipe.evaluate.sources, tokenizer, images, notify=notify)
    prepared = prepare_data(spec, tokenizer, images, notify=notify)
    if prepared.validation is None:
        raise DataError(
            "the recipe has no data to score on",
            fix="add [[evaluate.sources]] or [[data.validation]] to the recipe, or set data.valid_fraction",
        )
    return prepared.validation


def _make_context(
    spec: RunSpec, device: Device, loaded: LoadedModel, data: TokenData, notify: Notify
) -> EvaluationContext:
    planned = micro_batch_cost(on_one_device(spec), SequenceBounds(int(data.lengths.max())))
    # Fused kernels are proved where a run trains; here they would save nothing.
    implementation: LossChoice = "plain" if spec.recipe.train.loss == "plain" else "chunked"
    loss = make_loss(loaded, implementation=implementation, label_smoothing=0.0, chunk_tokens=None, device=device)

    def report(failed: FailedPass, remedy: str, before: Any, after: Any) -> None:
        notify(f"out of memory in {failed.failure.phase}: {remedy} {before} -> {after}")

    settings, note = within_positions(spec.recipe.generate, model_config_dict(spec), data)
    if note:
        notify(note)
    # model.id may be an adapter, as the result of an earlier run or stage is.
    new_adapter = loaded.adapter_is_all and find_starting_weights(spec.recipe.model).adapter is None
    asked = spec.recipe.preference
    base = partial(loss.log_probabilities, adapter=False) if asked.needs_reference and new_adapter else None
    return EvaluationContext(
        device,
        loaded,
        loss,
        planned.cost,
        planned.budget,
        settings,
        report,
        planned_rows=planned_rows(spec, device),
        preference=asked if spec.recipe.learns_preferences else None,
        references=lambda _: base,
    )


def _with_reference_of_start(
    context: EvaluationContext, data: TokenData, spec: RunSpec, notify: Notify
) -> EvaluationContext:
    """Where the reference of a run on preferences is not its model without the adapter, its log-probabilities are
    computed before other weights are loaded: it is the model that the run started from."""
    recipe, limit = spec.recipe, spec.recipe.evaluate.limit
    if not (recipe.learns_preferences and recipe.preference.needs_reference) or context.references(data) is not None:
        return context
    notify("computing reference log-probabilities with the base model")
    rows = (2 if data.in_pairs else 1) * limit if limit else len(data)
    known = {}
    with eval_mode(context.loaded.model):
        for each in (data, data.mismatched):
            if each is not None:
                values, _ = sequence_log_probabilities(context, each, np.arange(min(rows, len(each))))
                known[id(each)] = stored_reference(values, context.device.upload)
    return replace(context, references=lambda each: known.get(id(each)))


def _score(
    context: EvaluationContext, data: TokenData, spec: RunSpec, kept: Kept | None, scorer: Scorer | None
) -> Scores:
    asked = spec.recipe.evaluate
    metrics = sorted({*asked.metrics, *spec.recipe.eval.metrics})
    limit, samples = asked.limit, asked.log_samples
    by_source = bool(asked.sources or spec.recipe.data.validation)
    return evaluate(context, data, metrics, limit=limit, samples=samples, kept=kept, scorer=scorer, by_source=by_source)
