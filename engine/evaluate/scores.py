"""Evaluates a model: loss and perplexity, exact match of generated answers, and sample answers to read.

Evaluation learns its own micro-batch budget, separate from training's. After an OOM the failed samples are repeated in
smaller micro-batches; only completed micro-batches count, so no sample counts twice. Logits are not collected. The
training loop and `tunedeck eval` use this file.

Try: `tunedeck eval last`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import LogitsProcessorList

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import Cost, plan_micro_batches
from engine.data.batch import collate
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.catch_oom import ATTEMPTS, catch_oom
from engine.device.oom import OutOfMemory
from engine.errors import MemoryExhaustedError
from engine.evaluate.generation import generate
from engine.evaluate.rouge import MOST_LOST, lost_letters
from engine.evaluate.text_scores import TEXT_SCORES
from engine.model.documents import takes_starts
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction, eval_mode
from engine.spec.schema.recipe import Generate

GENERATION_ROWS = 64
"""The initial and largest number of answers that are generated at once."""

class FailedPass(NamedTuple):
    """A pass for which memory ran out, and the rank on which it did."""

    failure: OutOfMemory
    rank: int = 0


@dataclass
class GenerationBatchSize:
    """The number of answers generated at once: halved after an OOM, doubled after an evaluation without an OOM."""

    rows: int = GENERATION_ROWS
    largest_success: int = 0
    smallest_failure: int | None = None
    """The smallest number of rows that ran out of memory. A failure is not recorded if as many rows had succeeded
    before."""

    def halve(self, failed: int) -> None:
        """Set `rows` to half of `failed`, the number of rows that ran out of memory."""
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
    run_on_all_ranks: Callable[[str, list[int]], Any] | None = None
    """Runs a pass on every rank, as sharded weights require, and returns rank 0's result or a FailedPass; called with
    a key of `PASSES` and the sample indices. If None, passes run in this process only."""
    logits_processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    """Processors that are applied to the logits of every generated token, after those of `generate`."""

    def attempt(self, kind: str, data: TokenData, members: Sequence[int]) -> Any:
        """Run the pass `PASSES[kind]` over the samples `members`; returns its result, or a FailedPass if memory ran
        out."""
        indices = [int(member) for member in members]
        if self.run_on_all_ranks is not None:
            return self.run_on_all_ranks(kind, indices)
        results: list[Any] = []
        failure = catch_oom(lambda: results.append(PASSES[kind](self, data, indices)), self.device, kind)
        return results[0] if failure is None else FailedPass(failure)


@dataclass
class Scores:
    """Metrics by name, sample answers (prompt, answer, reference), and the number of samples scored."""

    metrics: dict[str, float]
    samples: list[dict[str, str]] = field(default_factory=list)
    count: int = 0
    notes: list[str] = field(default_factory=list)
    """What to know about the metrics, as sentences."""


class EvaluationStopped(Exception):
    """The evaluation ended early, on request, without a result."""


def evaluate(
    context: EvaluationContext, data: TokenData, metrics: Sequence[str], *, limit: int | None, samples: int
) -> Scores:
    """Score the first `limit` samples of `data`.

    `loss` is the mean over target tokens, `perplexity` its exponential. For scores of text (`TEXT_SCORES`), answers are
    generated from the tokens before the last answer, as the recipe's [generate] says, and compared with it, with white
    space trimmed; the score is the mean over samples.

    Raises:
        MemoryExhaustedError: memory does not suffice even for one sample at a time.
        EvaluationStopped: `context.should_stop` returned True.
    """
    count = min(len(data), limit or len(data))
    result = Scores({}, count=count)
    with eval_mode(context.loaded.model):
        if "loss" in metrics:
            loss = _mean_loss(context, data, np.arange(count))
            result.metrics |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        chosen = [name for name in TEXT_SCORES if name in metrics]
        if chosen or samples:
            answers = _answer_first(context, data, count if chosen else min(samples, count))
            for name in chosen:
                scores = [TEXT_SCORES[name](answer["answer"], answer["reference"]) for answer in answers]
                means = {each: sum(score[each] for score in scores) / len(scores) for each in scores[0]}
                result.metrics |= means
            if "rouge" in chosen and lost_letters([each["reference"] for each in answers]) > MOST_LOST:
                result.notes.append("rouge sees the letters a to z alone, and the references have many others")
            result.samples = answers[:samples]
    return result


def _mean_loss(context: EvaluationContext, data: TokenData, indices: NDArray[np.int64]) -> float:
    """Compute the mean loss per target token of the samples `indices`."""
    device, budget = context.device, context.budget
    held_bytes = device.memory().allocated_bytes
    total, targets, failures, clean = 0.0, int(data.target_counts[indices].sum()), 0, True
    waiting = _planned(context, data, indices)
    while waiting:
        if context.should_stop():
            raise EvaluationStopped
        chosen, cost_bytes = waiting[0]
        device.reset_peak()
        result: float | FailedPass = context.attempt("evaluate", data, chosen.tolist())
        if not isinstance(result, FailedPass):
            total, failures = total + result, 0
            budget.record_success(cost_bytes, _measured(device, held_bytes))
            del waiting[0]
            continue
        failures, clean = failures + 1, False
        device.release_cached()
        if _retries_unchanged(context, result, failures, proven=cost_bytes <= budget.proven_bytes, rows=len(chosen)):
            continue
        before = budget.budget_bytes
        budget.cut(cost_bytes, device.available_bytes - held_bytes)
        context.report(result, "cut", before, budget.budget_bytes)
        waiting = _planned(context, data, np.concatenate([members for members, _ in waiting]))
    if clean:
        budget.record_clean_step(device.available_bytes - held_bytes, may_grow=True)
    return total / max(1, targets)


def _planned(
    context: EvaluationContext, data: TokenData, indices: NDArray[np.int64]
) -> list[tuple[NDArray[np.int64], int]]:
    """Divide the samples `indices` into micro-batches; returns (sample indices, predicted bytes) for each."""
    groups = plan_micro_batches(data.lengths[indices], context.cost, context.budget.budget_bytes)
    return [(indices[list(group.members)], group.cost_bytes) for group in groups]


def _measured(device: Device, held_bytes: int) -> int:
    """Return the peak bytes since the last reset minus `held_bytes`; 0 on the plain CPU, which cannot measure a
    peak."""
    return 0 if device.kind == "cpu" else max(0, device.memory().peak_bytes - held_bytes)


def _retries_unchanged(
    context: EvaluationContext, failed: FailedPass, failures: int, *, proven: bool, rows: int
) -> bool:
    """Whether to repeat the failed pass with the same number of samples.

    If this number succeeded before (`proven`), the pass is repeated once. With a single sample, or when host memory
    ran out, a smaller batch is impossible or does not help: the pass is repeated, and MemoryExhaustedError is raised
    when it has failed ATTEMPTS times in a row.
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
        batch = collate(data, np.array(chosen), pad_id=_pad_id(context), with_starts=with_starts).moved(device.pin)
    return float(context.loss(batch.moved(device.upload)))


def generate_answers(context: EvaluationContext, data: TokenData, chosen: Sequence[int]) -> list[str]:
    """Generate an answer for each of the samples `chosen`, from its tokens before the last answer; returns the answers
    as text."""
    prompts = [data.split_question(index)[0] for index in chosen]
    images = partial(data.images_of, chosen)
    answers = generate(context.loaded, prompts, chosen, context.generate, context.logits_processors, images)
    return [_text(context, ids) for ids in answers]


PASSES: dict[str, Callable[[EvaluationContext, TokenData, Sequence[int]], Any]] = {
    "evaluate": loss_sum,
    "generate": generate_answers,
}
"""The forward passes of an evaluation, by the name of the phase in which memory runs out."""


def _answer_first(context: EvaluationContext, data: TokenData, count: int) -> list[dict[str, str]]:
    """Return prompt, generated answer and reference of the first `count` samples, in data order. Answers to the longest
    prompts are generated first."""
    questions = [data.split_question(index) for index in range(count)]
    order = sorted(range(len(questions)), key=lambda index: -len(questions[index][0]))
    texts: list[str] = []
    failures, clean, size = 0, True, context.batch_size
    while len(texts) < len(order):
        if context.should_stop():
            raise EvaluationStopped
        chosen = order[len(texts) : len(texts) + size.rows]
        result: list[str] | FailedPass = context.attempt("generate", data, chosen)
        if not isinstance(result, FailedPass):
            texts, failures = texts + result, 0
            size.largest_success = max(size.largest_success, len(chosen))
            continue
        failures, clean = failures + 1, False
        context.device.release_cached()
        proven = len(chosen) <= size.largest_success
        if not _retries_unchanged(context, result, failures, proven=proven, rows=len(chosen)):
            size.halve(len(chosen))
            context.report(result, "cut", len(chosen), size.rows)
    if clean:
        size.grow()
    by_index = dict(zip(order, texts, strict=True))
    return [_answer(context, question, by_index[index]) for index, question in enumerate(questions)]


def _answer(context: EvaluationContext, question: tuple[list[int], list[int]], text: str) -> dict[str, str]:
    prompt, reference = (_text(context, ids) for ids in question)
    return {"prompt": prompt, "answer": text.strip(), "reference": reference.strip()}


def _text(context: EvaluationContext, ids: list[int]) -> str:
    return str(context.loaded.tokenizer.decode(ids, skip_special_tokens=True))


def _pad_id(context: EvaluationContext) -> int:
    return int(context.loaded.tokenizer.pad_token_id)
