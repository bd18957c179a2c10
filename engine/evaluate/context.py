"""What a pass of an evaluation needs, how it is attempted, and what to do when memory runs out in it.

A pass runs some samples through the model: `evaluate` for their loss, `generate` for their answers. Evaluation learns
its own micro-batch budget, separate from training's. The training loop and `tunedeck eval` use this file.

Try: `pytest tests/evaluate/test_scoring.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import Cost
from engine.data.batch import collate
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.catch_oom import ATTEMPTS, catch_oom
from engine.device.oom import OutOfMemory
from engine.errors import MemoryExhaustedError
from engine.evaluate.generation import generate
from engine.model.documents import takes_starts
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.spec.schema.recipe import Generate

GENERATION_ROWS = 64
"""The largest number of answers that one device generates at once."""


class FailedPass(NamedTuple):
    """A pass for which memory ran out, and the rank on which it did."""

    failure: OutOfMemory
    rank: int = 0


class EvaluationStopped(Exception):
    """The evaluation ended early, on request, without a result."""


@dataclass
class GenerationBatchSize:
    """The number of answers generated at once: halved after an OOM, doubled after an evaluation without an OOM."""

    rows: int = GENERATION_ROWS
    largest_success: int = 0
    smallest_failure: int | None = None
    """The smallest number of rows that ran out of memory. A failure is not recorded if as many rows had succeeded
    before."""

    def halve(self, failed: int) -> None:
        """Set `rows` to half of `failed`, the number of rows that ran out of memory, but at least 1."""
        if failed > self.largest_success:
            self.smallest_failure = min(failed, self.smallest_failure or failed)
        self.rows = max(1, failed // 2)

    def grow(self) -> None:
        """Double `rows`, unless so many rows ran out of memory before. Called after an evaluation without an OOM."""
        if self.smallest_failure is None or 2 * self.rows < self.smallest_failure:
            self.rows = min(GENERATION_ROWS, 2 * self.rows)


@dataclass(frozen=True)
class EvaluationContext:
    """Everything that an evaluation needs. `budget` and `batch_size` learn during evaluations; training has its own."""

    device: Device
    loaded: LoadedModel
    loss: LossFunction
    cost: Cost
    budget: MicroBatchBudget
    generate: Generate
    report: Callable[[FailedPass, str, Any, Any], None]
    """Called for each OOM with the failed pass, the remedy's name, and the setting before and after the remedy."""
    should_stop: Callable[[], bool] = lambda: False
    """Called before each micro-batch; if it returns True, the evaluation ends early."""
    batch_size: GenerationBatchSize = field(default_factory=GenerationBatchSize)
    planned_rows: Callable[[int], int] = lambda prompt: GENERATION_ROWS
    """Given the length of a prompt in tokens, returns how many answers to such prompts are predicted to fit into memory
    at once (`engine.evaluate.rows`)."""
    shares: int = 1
    """Number of ranks that each take samples of their own in a pass."""
    run_on_all_ranks: Callable[[str, list[list[int]]], Any] | None = None
    """Runs a pass on every rank; called with a key of `PASSES` and the sample indices of each share. Returns what
    `attempt` returns. If None, passes run in this process only."""
    all_ended: Callable[[bool], bool] | None = None
    """For ranks that generate together: called after each token with whether this rank's answers have ended; returns
    whether those of all ranks have. None if this process generates alone."""

    def attempt(self, kind: str, data: TokenData, parts: Sequence[Sequence[int]]) -> list[Any] | FailedPass:
        """Run the pass `PASSES[kind]` over the samples of each of `parts`, at most `shares` lists of indices; returns
        the result of each part, or a FailedPass if memory ran out in any of them."""
        indices = [[int(member) for member in part] for part in parts]
        if self.run_on_all_ranks is not None:
            found: list[Any] | FailedPass = self.run_on_all_ranks(kind, indices)
            return found
        results: list[Any] = []
        failure = catch_oom(lambda: results.append(PASSES[kind](self, data, indices[0])), self.device, kind)
        return results if failure is None else FailedPass(failure)


def retries_unchanged(
    context: EvaluationContext, failed: FailedPass, failures: int, *, proven: bool, rows: int
) -> bool:
    """Whether to repeat the failed pass with the same number of samples, `rows`. `failures` is how often it has failed
    in a row. A repetition is reported through `context.report`.

    If this number succeeded before (`proven`), the pass is repeated once. With a single sample, or when host memory ran
    out, a smaller batch is impossible or does not help: the pass is repeated, and MemoryExhaustedError is raised when
    it has failed ATTEMPTS times in a row.
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
    """Compute the sum of the token losses of the samples `chosen`."""
    device = context.device
    with device.host_region():
        with_starts = takes_starts(context.loaded.attention)
        pad_id = int(context.loaded.tokenizer.pad_token_id)
        batch = collate(data, np.array(chosen), pad_id=pad_id, with_starts=with_starts).moved(device.pin)
    return float(context.loss(batch.moved(device.upload)))


def generate_answers(context: EvaluationContext, data: TokenData, chosen: Sequence[int]) -> list[str]:
    """Generate an answer for each of the samples `chosen`, from its tokens before the last answer; returns the answers
    as text."""
    prompts = [data.split_question(index)[0] for index in chosen]
    images = partial(data.images_of, chosen)
    answers = generate(context.loaded, prompts, chosen, context.generate, images, context.all_ended)
    return [decode(context, ids) for ids in answers]


def decode(context: EvaluationContext, ids: list[int]) -> str:
    """The text of the token ids, without special tokens."""
    return str(context.loaded.tokenizer.decode(ids, skip_special_tokens=True))


PASSES: dict[str, Callable[[EvaluationContext, TokenData, Sequence[int]], Any]] = {
    "evaluate": loss_sum,
    "generate": generate_answers,
}
"""The forward passes of an evaluation, by the name of the phase in which memory runs out."""
