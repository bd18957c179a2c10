"""Sets up preference learning: the objective, and what the policy is compared with."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.batching.budget import MicroBatchBudget
from engine.config.check.preference_rules import CONTINUED, no_adapter_to_switch_off
from engine.data.store import hash_text
from engine.data.tokens import TokenData
from engine.evaluate.context import EvaluationContext, FailedPass, Reference, stored_reference
from engine.evaluate.scores import sequence_log_probabilities
from engine.journal.directory import RunDirectory
from engine.journal.files import read_table, write_atomically
from engine.journal.writer import Journal
from engine.model.decoder import eval_mode
from engine.model.reference import find_starting_weights
from engine.train.step.context import TrainingSetup
from engine.train.step.failures import RankOom, RecoveredOom
from engine.train.step.objective import PairObjective, UnpairedObjective

FOLDER = "reference"
"""In the run's folder: log-probabilities of the weights at the start."""

PIECE = 4096
"""Sequences whose log-probabilities are written at once: what a kill costs while they are computed."""


def learn_preferences(setup: TrainingSetup, place: RunDirectory, journal: Journal) -> None:
    """Give the steps of a run their preference objective, if its recipe has one. The weights are those of the start.

    UsageError: reference = "adapter_off", and more than the adapter is trained. Others as `evaluate`.
    """
    recipe, context = setup.spec.recipe, setup.context
    if not recipe.learns_preferences:
        return
    references, data = _references(setup, place, journal), context.data
    context.references = references
    own = references(data)
    if recipe.learns_pairs:
        context.objective = PairObjective(recipe.preference, context.loss, data, own)
        return
    mismatched = None if data.mismatched is None else references(data.mismatched)
    assert own is not None and mismatched is not None
    context.objective = UnpairedObjective(recipe.preference, context.loss, data, own, mismatched)


def _references(setup: TrainingSetup, place: RunDirectory, journal: Journal) -> Callable[[TokenData], Reference | None]:
    """Maps the training or validation data to its reference."""
    asked, context = setup.spec.recipe.preference, setup.context
    if not asked.needs_reference:
        return lambda data: None
    whole = context.loaded.adapter_is_all
    # model.id may be an adapter, as the result of an earlier run or stage is.
    continued = find_starting_weights(setup.spec.recipe.model).adapter is not None
    if asked.reference == "adapter_off" and (not whole or continued):
        raise no_adapter_to_switch_off(CONTINUED if whole else "more than the adapter trained")
    if asked.reference != "precomputed" and whole and not continued:
        return lambda data: partial(context.loss.log_probabilities, adapter=False)
    stored = {id(data): _stored(setup, place, journal, name, data) for name, data in _parts(setup)}
    return lambda data: stored_reference(stored[id(data)], context.device.upload)


def _parts(setup: TrainingSetup) -> list[tuple[str, TokenData]]:
    """By the name of its files: all data of which the reference's log-probabilities are needed."""
    held = setup.prepared.validation
    whole = [("train", setup.prepared.train), *([("validation", held)] if held is not None else [])]
    return [*whole, *((f"{name}-mismatched", data.mismatched) for name, data in whole if data.mismatched is not None)]


def _stored(
    setup: TrainingSetup, place: RunDirectory, journal: Journal, name: str, data: TokenData
) -> NDArray[np.float64]:
    """Log-probabilities of all sequences of `data` under the weights of the start. They are written in pieces, so that
    a run that is killed meanwhile computes only what is missing. Ranks compute different pieces."""
    ranks, context = setup.context.ranks, evaluation_context(setup)
    key = hash_text(setup.identity.data_fingerprint, setup.identity.tokenizer_hash, name)
    starts = range(0, len(data), PIECE)
    sizes = {start: min(PIECE, len(data) - start) for start in starts}
    files = {start: place.path / FOLDER / f"{name}-{start:09d}.json" for start in starts}
    found = {start: _read(files[start], key, sizes[start]) for start in starts} if ranks.is_rank0 else {}
    known: dict[int, list[float]] = ranks.broadcast_object({start: piece for start, piece in found.items() if piece})
    missing = [start for start in starts if start not in known]
    for first in range(0, len(missing), ranks.size):
        journal.phase("computing the reference", f"{name}: {len(known) * PIECE:,} of {len(data):,} sequences")
        own = missing[first + ranks.rank : first + ranks.rank + 1]
        gathered = ranks.all_gather_object([_compute(context, data, start, sizes[start]) for start in own])
        for start, piece in (each for part in gathered for each in part):
            known[start] = piece
            if ranks.is_rank0:
                _write(files[start], key, piece)
    return np.concatenate([known[start] for start in starts])


def _compute(context: EvaluationContext, data: TokenData, start: int, size: int) -> tuple[int, list[float]]:
    with eval_mode(context.loaded.model):
        values, _ = sequence_log_probabilities(context, data, np.arange(start, start + size))
    return start, values.tolist()


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
    file.parent.mkdir(exist_ok=True)
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
