"""What a pass of an evaluation needs, how it is attempted, and what to do when memory runs out in it. Evaluation learns
a micro-batch budget of its own; the training loop and `tunedeck eval` share this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import Cost
from engine.budget.predict.inference import GENERATION_ROWS
from engine.config.schema.preference import Preference
from engine.config.schema.recipe import Generate
from engine.data.batch import Batch, collate
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.oom import ATTEMPTS, OutOfMemory, catch_oom
from engine.errors import MemoryExhaustedError
from engine.evaluate.generation import generate
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.model.positions import takes_starts
from engine.objectives.reference import Reference


class FailedPass(NamedTuple):
    """A pass for which memory ran out, and the rank on which it did."""

    failure: OutOfMemory
    rank: int = 0


class EvaluationStopped(Exception):
    """The evaluation ended early, on request, without a result."""


class Questions(Protocol):
    """Prompts to answer: `TokenData`, or the user's own."""

    def split_question(self, row: int) -> tuple[list[int], list[int]]:
        """(tokens of the prompt, tokens of the reference)."""
        ...

    def images_of(self, rows: Sequence[int], ids_BS: Tensor) -> Mapping[str, Tensor]:
        """The model's inputs for the images of these rows."""
        ...


@dataclass
class GenerationBatchSize:
    """The number of answers generated at once: halved after an OOM, doubled after an evaluation without an OOM."""

    rows: int = GENERATION_ROWS
    largest_success: int = 0
    smallest_failure: int | None = None
    """Smallest number of rows that ran out of memory, unless as many had succeeded before."""

    def halve(self, failed: int) -> None:
        if failed > self.largest_success:
            self.smallest_failure = min(failed, self.smallest_failure or failed)
        self.rows = max(1, failed // 2)

    def grow(self) -> None:
        """Double `rows`, unless so many rows ran out of memory before. Called after an evaluation without an OOM."""
        if self.smallest_failure is None or 2 * self.rows < self.smallest_failure:
            self.rows = min(GENERATION_ROWS, 2 * self.rows)


@dataclass(frozen=True)
class EvaluationContext:
    """What an evaluation needs. `budget` and `batch_size` learn during evaluations; training has its own."""

    device: Device
    loaded: LoadedModel
    loss: LossFunction
    cost: Cost
    budget: MicroBatchBudget
    generate: Generate
    report: Callable[[FailedPass, str, Any, Any], None]
    """Called for each OOM with the failed pass, the remedy's name, and the setting before and after it."""
    should_stop: Callable[[], bool] = lambda: False
    """Called before each micro-batch; True ends the evaluation early."""
    batch_size: GenerationBatchSize = field(default_factory=GenerationBatchSize)
    planned_rows: Callable[[int], int] = lambda prompt: GENERATION_ROWS
    """Maps a prompt's length in tokens to the number of answers predicted to fit at once
    (`engine.evaluate.answers`)."""
    shares: int = 1
    """Number of ranks that each take samples of their own in a pass."""
    run_on_all_ranks: Callable[[str, Questions, list[list[int]]], Any] | None = None
    """Runs a pass on every rank, given a key of `PASSES`, the data and the sample indices of each share; returns what
    `attempt` does. None: this process only."""
    preference: Preference | None = None
    """How pairs are scored; None unless preferences are learned."""
    references: Callable[[TokenData], Reference | None] = lambda data: None
    """Gives what computes the reference's log-probabilities for batches of `data`; None without a reference."""
    all_ended: Callable[[bool], bool] | None = None
    """For ranks that generate together: maps whether this rank's answers have ended to whether all ranks' have."""

    def attempt(self, kind: str, data: Questions, parts: Sequence[Sequence[int]]) -> list[Any] | FailedPass:
        """Run `PASSES[kind]` over each of `parts`, at most `shares` lists of sample indices; returns their results, or
        a FailedPass if memory ran out."""
        indices = [[int(member) for member in part] for part in parts]
        if self.run_on_all_ranks is not None:
            found: list[Any] | FailedPass = self.run_on_all_ranks(kind, data, indices)
            return found
        results: list[Any] = []
        failure = catch_oom(lambda: results.append(PASSES[kind](self, data, indices[0])), self.device, kind)
        return results if failure is None else FailedPass(failure)


def retries_unchanged(
    context: EvaluationContext, failed: FailedPass, failures: int, *, proven: bool, rows: int
) -> bool:
    """Whether to repeat the failed pass with the same number of samples, after `failures` in a row; a repetition is
    reported.

    A size that succeeded before (`proven`) is repeated once. A single sample, or exhausted host memory, gains nothing
    from a smaller batch: repeated, until MemoryExhaustedError after ATTEMPTS failures in a row.
    """
    stuck = rows == 1 or failed.failure.kind != "device"
    if stuck and failures >= ATTEMPTS:
        context.report(failed, "give_up", rows, rows)
        samples = "one sample" if rows == 1 else f"{rows} samples"
        raise MemoryExhaustedError(
            f"out of memory in {failed.failure.phase} with {samples} at a time",
            fix="lower data.max_length or generate.max_new_tokens, or use a profile with more memory",
        )
    if not stuck and not (proven and failures == 1):
        return False
    context.report(failed, "retry", rows, rows)
    return True


def loss_sum(context: EvaluationContext, data: TokenData, chosen: Sequence[int]) -> float:
    return float(context.loss(_batch(context, data, chosen)))


def log_probabilities(
    context: EvaluationContext, data: TokenData, chosen: Sequence[int]
) -> list[tuple[float, float | None]]:
    """Of each sequence's target tokens: by the policy, and by the reference where there is one."""
    batch = _batch(context, data, chosen)
    policy: list[float] = context.loss.log_probabilities(batch).tolist()
    reference = context.references(data)
    held: list[Any] = [None] * len(policy) if reference is None else reference(batch).tolist()
    return list(zip(policy, held, strict=True))


def _batch(context: EvaluationContext, data: TokenData, chosen: Sequence[int]) -> Batch:
    device = context.device
    with device.host_region():
        with_starts = takes_starts(context.loaded.attention)
        pad_id = int(context.loaded.tokenizer.pad_token_id)
        batch = collate(data, np.array(chosen), pad_id=pad_id, with_starts=with_starts).moved(device.pin)
    return batch.moved(device.upload)


def generate_answers(context: EvaluationContext, data: Questions, chosen: Sequence[int]) -> list[str]:
    """Generate answers as text, each from its sample's tokens before the last answer."""
    prompts = [data.split_question(index)[0] for index in chosen]
    images = partial(data.images_of, chosen)
    answers = generate(context.loaded, prompts, chosen, context.generate, images, context.all_ended)
    return [decode(context, ids) for ids in answers]


def decode(context: EvaluationContext, ids: list[int]) -> str:
    return str(context.loaded.tokenizer.decode(ids, skip_special_tokens=True))


PASSES: dict[str, Callable[[EvaluationContext, Any, Sequence[int]], Any]] = {
    "evaluate": loss_sum,
    "log_probabilities": log_probabilities,
    "generate": generate_answers,
}
"""The forward passes of an evaluation, by the name of the phase in which memory runs out."""
