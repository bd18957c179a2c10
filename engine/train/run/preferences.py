"""Sets up preference learning: the objective, and what the policy is compared with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.architecture.model_folder import ADAPTER_CONFIG
from engine.batching.budget import MicroBatchBudget
from engine.config.check.preference_rules import CONTINUED, no_adapter_to_switch_off
from engine.config.files.caches import cache_folder, find_snapshot
from engine.data.preferences import MismatchedData
from engine.data.store import hash_file, hash_files, hash_text
from engine.data.tokens import TokenData
from engine.evaluate.context import EvaluationContext, FailedPass
from engine.evaluate.scores import sequence_log_probabilities
from engine.journal.directory import RunDirectory
from engine.journal.events import Journal
from engine.journal.files import read_table, write_atomically
from engine.model.decoder import eval_mode
from engine.model.load import has_new_weights
from engine.model.reference import StartingWeights, find_starting_weights
from engine.objectives.reference import Reference, stored_reference
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.failures import RankOom, RecoveredOom
from engine.train.step.objective import MeasuredReference, PairObjective, UnpairedObjective
from engine.train.strategy.evaluation import gather_results

FOLDER = "reference"
"""In the run's folder: log-probabilities of the weights at the start."""

SHARED_FOLDER = "references"
"""In the cache folder: the same for all runs that start from the same weights with the same tokens."""

MODEL_FILES = ("config.json", "*.py", "*.safetensors")
"""Files of a base model that decide what it computes."""
ADAPTER_FILES = (ADAPTER_CONFIG, "*.safetensors")
HUB_DIGEST = re.compile("[0-9a-f]{64}")
"""The name of a large file in the hub's cache: the SHA-256 of its contents."""

VERSION = 1
"""Part of the name of a shared reference. Increase it when the same weights and tokens would give other values."""

PIECE = 4096
"""Sequences whose log-probabilities are written at once: what a kill costs while they are computed."""


def learn_preferences(setup: TrainingSetup, place: RunDirectory, journal: Journal) -> None:
    """Give the steps of a run their preference objective, if its recipe has one. The weights are those of the start.

    UsageError: reference = "adapter_off", and more than the adapter is trained. Others as `evaluate`.
    """
    recipe, context = setup.spec.recipe, setup.context
    if not recipe.learns_preferences:
        return
    stored, data = _stores_reference(setup), context.data
    references = _references(setup, place, journal, stored=stored)
    context.references = references
    own = references(data)
    if own is not None and not stored and context.strategy.gathers_in_passes:
        own = MeasuredReference(own)
    if recipe.learns_pairs:
        context.objective = PairObjective(recipe.preference, context.loss, data, own)
        return
    mismatched = None if data.mismatched is None else references(data.mismatched)
    assert own is not None and mismatched is not None
    context.objective = UnpairedObjective(recipe.preference, context.loss, data, own, mismatched)


def _stores_reference(setup: TrainingSetup) -> bool:
    """Whether the reference's log-probabilities are computed before step 1; else it is the model without its adapter.
    Raises UsageError where that was asked for and is not the model at the start."""
    asked, whole = setup.spec.recipe.preference, setup.context.loaded.adapter_is_all
    # model.id may be an adapter, as the result of an earlier run or stage is.
    continued = find_starting_weights(setup.spec.recipe.model).adapter is not None
    if asked.needs_reference and asked.reference == "adapter_off" and (not whole or continued):
        stage = setup.spec.name.partition("/")[2]
        raise no_adapter_to_switch_off(CONTINUED if whole else "more parameters than the adapter are trained", stage)
    return asked.reference == "precomputed" or not whole or continued


def _references(
    setup: TrainingSetup, place: RunDirectory, journal: Journal, *, stored: bool
) -> Callable[[TokenData], Reference | None]:
    """Maps the training or validation data, or their mismatched sequences, to their reference."""
    context = setup.context
    if not setup.spec.recipe.preference.needs_reference:
        return lambda data: None
    if not stored:
        return lambda data: partial(context.loss.log_probabilities, adapter=False)
    shared = cache(lambda: _shared_folder(setup))
    values = {id(data): _stored(setup, place, shared, journal, name, data) for name, data in _parts(setup)}
    return lambda data: stored_reference(values[id(data)], context.device.upload)


def _parts(setup: TrainingSetup) -> list[tuple[str, TokenData]]:
    """By the name of its files: all data of which the reference's log-probabilities are needed."""
    held = setup.prepared.validation
    whole = [("train", setup.prepared.train), *([("validation", held)] if held is not None else [])]
    return [*whole, *((f"{name}-mismatched", data.mismatched) for name, data in whole if data.mismatched is not None)]


def _shared_folder(setup: TrainingSetup) -> Path | None:
    """Where other runs find the reference, by a digest of weights, tokens and whatever decides what they give. None for
    random weights, which depend on the device."""
    recipe, identity = setup.spec.recipe, setup.identity
    start = find_starting_weights(recipe.model)
    if has_new_weights(setup.spec, start):
        return None
    settings = recipe.model.model_dump(mode="json", exclude={"id", "adapter", "revision", "tokenizer"})
    parts = [VERSION, settings, recipe.method.model_dump(mode="json"), str(setup.context.loaded.precision.compute)]
    digests = [identity.tokenizer_hash, _weights_digest(start)]
    return cache_folder() / SHARED_FOLDER / hash_text(*digests, json.dumps(parts, sort_keys=True))


def _weights_digest(start: StartingWeights) -> str:
    """Hash of the contents of the files that the weights come from. Reads all of them, except large files of the hub's
    cache, whose names are hashes."""
    base = _digest_of(start.base, start.revision, MODEL_FILES)
    return hash_text(base, _digest_of(start.adapter, None, ADAPTER_FILES) if start.adapter else "")


def _digest_of(model: str, revision: str | None, patterns: tuple[str, ...]) -> str:
    """Of a hub id that is not in the hub's cache, as it cannot be when its weights were loaded, that id."""
    folder = Path(model) if Path(model).is_dir() else find_snapshot(model, revision)
    if folder is None:
        return hash_text(model, revision or "")
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    digests = [file.resolve().name if HUB_DIGEST.fullmatch(file.resolve().name) else hash_file(file) for file in files]
    return hash_files(files, digests, folder)


def _stored(
    setup: TrainingSetup,
    place: RunDirectory,
    shared: Callable[[], Path | None],
    journal: Journal,
    name: str,
    data: TokenData,
) -> NDArray[np.float64]:
    """Log-probabilities of all sequences of `data` under the weights of the start, computed by all ranks. Rank 0 writes
    them in pieces, so that a run that is killed meanwhile computes only what is missing. The run's folder has them
    for its resumes, whatever becomes of the base; the cache has them for other runs."""
    ranks, strategy = setup.context.ranks, setup.context.strategy
    context = strategy.join_evaluation(evaluation_context(setup), data, f"reference of {name}: ")
    partners = [hashlib.sha256(data.partners.tobytes()).hexdigest()] if isinstance(data, MismatchedData) else []
    key = hash_text(setup.identity.data_fingerprint, setup.identity.tokenizer_hash, name, *partners)

    def computed(start: int, size: int) -> list[float]:
        journal.phase("computing the reference", f"{name}: {start:,} of {len(data):,} sequences")
        with eval_mode(context.loaded.model):
            values: list[float] = sequence_log_probabilities(context, data, np.arange(start, start + size))[0].tolist()
        return values

    def values() -> list[float]:
        found: list[float] = []
        for start in range(0, len(data), PIECE):
            size, file = min(PIECE, len(data) - start), place.path / FOLDER / f"{name}-{start:09d}.json"
            piece = _read(file, key, size)
            if piece is None:
                folder = shared()
                copies = [file] if folder is None else [file, folder / f"{key}-{start:09d}.json"]
                piece = _read(copies[-1], key, size) or computed(start, size)
                for copy in copies:
                    _write(copy, key, piece)
            found += piece
        return found

    here: list[float] = []
    ranks.run_on_rank0(lambda: here.extend(values()))
    return np.array(gather_results(ranks, here)[0])


def _read(file: Path, key: str, size: int) -> list[float] | None:
    """A piece that was written for the same data and tokenizer; None if there is none, or it is damaged."""
    try:
        table = read_table(file)
    except (OSError, ValueError):
        return None
    values = table.get("values")
    if table.get("key") != key or not isinstance(values, list) or len(values) != size:
        return None
    return values if all(isinstance(value, float) for value in values) else None


def _write(file: Path, key: str, values: list[float]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({"key": key, "values": values}) + "\n")


def evaluation_context(setup: TrainingSetup) -> EvaluationContext:
    """For passes before the first step, on every rank."""
    context = setup.context

    def failed(found: FailedPass, remedy: str, before: object, after: object) -> None:
        oom = RankOom(found.failure, found.rank)
        context.report(RecoveredOom(0, oom, remedy, 1, before=before, after=after))

    return EvaluationContext(
        device=context.device,
        loaded=context.loaded,
        loss=context.loss,
        cost=context.strategy.evaluation_cost(context.cost),
        budget=MicroBatchBudget(context.budget.budget_bytes, context.budget.top_bytes),
        generate=setup.spec.recipe.generate,
        report=failed,
    )
