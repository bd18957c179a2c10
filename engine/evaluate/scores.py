"""Evaluation with a memory budget of its own: loss and perplexity, exact match of greedy answers, samples to read.

A sample is counted when its result is in, and only then: when memory runs out the micro-batch is redone smaller and
nothing is counted twice. Logits are never kept. Used by the training loop and by `tunedeck eval`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import Cost, plan_micro_batches
from engine.data.batch import collate
from engine.data.tokens import Example, TokenData
from engine.device.base import Device
from engine.device.catch_oom import ATTEMPTS, catch_oom
from engine.device.oom import OutOfMemory
from engine.errors import MemoryExhaustedError
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.spec.schema.recipe import Generate

GENERATION_ROWS = 64
"""Answers generated at once to begin with."""


@dataclass
class Rows:
    """How many answers are generated at once: halved when memory runs out, doubled again where that is not known to
    fail."""

    now: int = GENERATION_ROWS
    proven: int = 0
    """The most that succeeded."""
    ceiling: int | None = None
    """The fewest that failed, and more than had succeeded before."""

    def halve(self, failed: int) -> None:
        """`failed` rows at once did not fit."""
        if failed > self.proven:
            self.ceiling = min(failed, self.ceiling or failed)
        self.now = max(1, failed // 2)

    def grow(self) -> None:
        """All answers were generated without a failure."""
        if self.ceiling is None or 2 * self.now < self.ceiling:
            self.now = min(GENERATION_ROWS, 2 * self.now)


@dataclass
class Judge:
    """What evaluation works with. `budget` and `rows` are its own, learned separately from training's."""

    device: Device
    loaded: LoadedModel
    loss: LossFunction
    cost: Cost
    budget: MicroBatchBudget
    generate: Generate
    report: Callable[[OutOfMemory, str, Any, Any], None]
    """Called with each failure, the remedy's name, and the setting before and after."""
    interrupted: Callable[[], bool] = lambda: False
    """Asked between micro-batches: True ends the evaluation early."""
    rows: Rows = field(default_factory=Rows)
    perform: Callable[[str, Sequence[int], Callable[[], None]], OutOfMemory | None] | None = None
    """How a pass over samples is tried, given its kind, their indices, and the pass; None for this process alone. Where
    ranks hold parts of the weights, all of them take part (`engine.train.strategy.collective_evaluation`)."""
    failed_rank: int = 0
    """Where memory ran out last."""
    choosing: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    """What has the last word on the next token of an answer."""

    def attempt(self, kind: str, members: Sequence[int], action: Callable[[], None]) -> OutOfMemory | None:
        """None when `action`, a pass of the `kind` "evaluate" or "generate" over `members`, went through."""
        if self.perform is not None:
            return self.perform(kind, members, action)
        return catch_oom(action, self.device, kind)


@dataclass
class Scores:
    """Metrics by name, and generated samples (prompt, answer, reference) to read."""

    metrics: dict[str, float]
    samples: list[dict[str, str]] = field(default_factory=list)
    count: int = 0


class Interrupted(Exception):
    """The evaluation was ended early; there is no result."""


def evaluate(judge: Judge, data: TokenData, metrics: Sequence[str], *, limit: int | None, samples: int) -> Scores:
    """Score the first `limit` samples of `data`.

    loss is the mean over target tokens, perplexity its exponential. exact_match generates greedily from the tokens
    before the last answer and compares text with white space trimmed.

    Raises:
        MemoryExhaustedError: not even one sample at a time fits.
        Interrupted: `judge.interrupted` said so.
    """
    count = min(len(data), limit or len(data))
    result = Scores({}, count=count)
    with judging(judge.loaded.model):
        if "loss" in metrics:
            loss = _mean_loss(judge, data, np.arange(count))
            result.metrics |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if "exact_match" in metrics or samples:
            asked = count if "exact_match" in metrics else min(samples, count)
            answers = _answers(judge, data, asked)
            if "exact_match" in metrics:
                result.metrics["exact_match"] = sum(a["answer"] == a["reference"] for a in answers) / len(answers)
            result.samples = answers[:samples]
    return result


@contextmanager
def judging(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; training mode comes back however this ends."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _mean_loss(judge: Judge, data: TokenData, indices: NDArray[np.int64]) -> float:
    """Sum of token losses over their number, for `indices` of `data`."""
    device, budget = judge.device, judge.budget
    held_bytes = device.memory().allocated_bytes
    total, targets, failures, clean = 0.0, int(data.target_counts[indices].sum()), 0, True
    waiting = _planned(judge, data, indices)
    while waiting:
        if judge.interrupted():
            raise Interrupted
        chosen, cost_bytes = waiting[0]
        sums: list[float] = []
        device.reset_peak()
        failure = judge.attempt(
            "evaluate", chosen.tolist(), lambda chosen=chosen, sums=sums: sums.append(loss_sum(judge, data, chosen))  # type: ignore[misc]
        )
        if failure is None:
            total, failures = total + sums[0], 0
            budget.record_success(cost_bytes, _measured(device, held_bytes))
            del waiting[0]
            continue
        failures, clean = failures + 1, False
        device.release_cached()
        if _again(judge, failure, failures, proven=cost_bytes <= budget.proven_bytes, rows=len(chosen)):
            continue
        before = budget.budget_bytes
        budget.cut(cost_bytes, device.available_bytes - held_bytes)
        judge.report(failure, "cut", before, budget.budget_bytes)
        waiting = _planned(judge, data, np.concatenate([members for members, _ in waiting]))
    if clean:
        budget.record_clean_step(device.available_bytes - held_bytes, may_grow=True)
    return total / max(1, targets)


def _planned(judge: Judge, data: TokenData, indices: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], int]]:
    """(members, predicted cost) of the micro-batches of `indices`."""
    groups = plan_micro_batches(data.lengths[indices], judge.cost, judge.budget.budget_bytes)
    return [(indices[list(group.members)], group.cost_bytes) for group in groups]


def _measured(device: Device, held_bytes: int) -> int:
    return 0 if device.kind == "cpu" else max(0, device.memory().peak_bytes - held_bytes)


def _again(judge: Judge, failure: OutOfMemory, failures: int, *, proven: bool, rows: int) -> bool:
    """Whether to try the same once more: what has succeeded before, once; one sample, which cannot be made smaller, and
    host memory, which smaller batches do not give back, a few times.

    Raises MemoryExhaustedError when that was tried.
    """
    stuck = rows == 1 or failure.kind != "device"
    if stuck and failures >= ATTEMPTS:
        judge.report(failure, "give_up", rows, rows)
        raise MemoryExhaustedError(
            f"out of memory in {failure.phase} with {'one sample' if rows == 1 else f'{rows} samples'} at a time",
            fix="lower data.max_length or generate.max_new_tokens, or use a profile with more memory",
        )
    if not stuck and not (proven and failures == 1):
        return False
    judge.report(failure, "retry", rows, rows)
    return True


def loss_sum(judge: Judge, data: TokenData, chosen: NDArray[np.int64]) -> float:
    """Sum of the token losses of these samples."""
    with judge.device.host_region():
        batch = collate(data, chosen, pad_id=_pad_id(judge))
    return float(judge.loss(batch.moved(judge.device.upload)))


def answers_to(judge: Judge, data: TokenData, chosen: Sequence[int]) -> list[str]:
    """What is generated for these samples, as text."""
    return _generate(judge, [split_question(data[index])[0] for index in chosen])


def _answers(judge: Judge, data: TokenData, count: int) -> list[dict[str, str]]:
    """Generate for the first `count` samples; results in their order. Longest prompts first, like training."""
    questions = [split_question(data[index]) for index in range(count)]
    order = sorted(range(len(questions)), key=lambda index: -len(questions[index][0]))
    texts: list[str] = []
    failures, clean, rows = 0, True, judge.rows
    while len(texts) < len(order):
        if judge.interrupted():
            raise Interrupted
        chosen = order[len(texts) : len(texts) + rows.now]
        made: list[str] = []
        failure = judge.attempt(
            "generate", chosen, lambda chosen=chosen, made=made: made.extend(answers_to(judge, data, chosen))  # type: ignore[misc]
        )
        if failure is None:
            texts, failures, rows.proven = texts + made, 0, max(rows.proven, len(chosen))
            continue
        failures, clean = failures + 1, False
        judge.device.release_cached()
        if not _again(judge, failure, failures, proven=len(chosen) <= rows.proven, rows=len(chosen)):
            rows.halve(len(chosen))
            judge.report(failure, "cut", len(chosen), rows.now)
    if clean:
        rows.grow()
    by_index = dict(zip(order, texts, strict=True))
    return [_answer(judge, question, by_index[index]) for index, question in enumerate(questions)]


def _answer(judge: Judge, question: tuple[list[int], list[int]], text: str) -> dict[str, str]:
    prompt, reference = (_text(judge, ids) for ids in question)
    return {"prompt": prompt, "answer": text.strip(), "reference": reference.strip()}


def _text(judge: Judge, ids: list[int]) -> str:
    return str(judge.loaded.tokenizer.decode(ids, skip_special_tokens=True))


def split_question(example: Example) -> tuple[list[int], list[int]]:
    """(tokens before the last answer, the last answer's tokens). The last answer is the last run of target tokens."""
    is_target = example.labels != -100
    last = int(np.flatnonzero(is_target)[-1])
    before = np.flatnonzero(~is_target[: last + 1])
    first = int(before[-1]) + 1 if len(before) else 1
    ids = example.input_ids
    return ids[:first].tolist(), ids[first : last + 1].tolist()


def _generate(judge: Judge, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Answers to `prompts` as text, padded on the left so that all continue at the same column."""
    width, tokenizer = max(map(len, prompts)), judge.loaded.tokenizer
    with judge.device.host_region():
        ids_BS = torch.full((len(prompts), width), _pad_id(judge), dtype=torch.long)
        mask_BS = torch.zeros_like(ids_BS)
        for row, prompt in enumerate(prompts):
            ids_BS[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_BS[row, width - len(prompt) :] = 1
    config = generation_config(judge.generate, tokenizer.eos_token_id, _pad_id(judge))
    ids_BS, mask_BS = judge.device.upload(ids_BS), judge.device.upload(mask_BS)
    made_BS = continued(judge.loaded, ids_BS, mask_BS, config, logits_processor=judge.choosing)
    return [_text(judge, row) for row in made_BS[:, width:].tolist()]


def continued(
    loaded: LoadedModel,
    ids_BS: Tensor,
    mask_BS: Tensor,
    config: GenerationConfig,
    **how: LogitsProcessorList | Cache | None,
) -> Tensor:
    """Prompts and their answers, as token ids; `how` is for `generate` of transformers."""
    generate = cast(Callable[..., Tensor], loaded.model.generate)
    return generate(input_ids=ids_BS, attention_mask=mask_BS, generation_config=config, **how)


def generation_config(generate: Generate, eos_id: int | None, pad_id: int) -> GenerationConfig:
    """Greedy, whatever sampling the model ships with: a score must not depend on luck."""
    return GenerationConfig(
        max_new_tokens=generate.max_new_tokens,
        do_sample=False,
        repetition_penalty=generate.repetition_penalty,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        use_cache=True,
    )


def _pad_id(judge: Judge) -> int:
    return int(judge.loaded.tokenizer.pad_token_id)
