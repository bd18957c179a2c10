"""Evaluation with a memory budget of its own: loss and perplexity, exact match of greedy answers, samples to read.

A sample is counted when its result is in, and only then: when memory runs out the micro-batch is redone smaller and
nothing is counted twice. Logits are never kept. Used by the training loop and by `tunedeck eval`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from engine.data.batch import collate
from engine.data.tokens import Example, TokenData
from engine.device.base import Device
from engine.errors import MemoryExhaustedError
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.spec.recipe import Generate
from engine.train.failure import Failure, attempt
from engine.train.microbatch import Cost, plan_micro_batches

GENERATION_ROWS = 64
"""Answers generated at once to begin with; halved when memory runs out."""


@dataclass
class Judge:
    """What evaluation works with. `budget_bytes` and `rows` are its own, learned separately from training's."""

    device: Device
    loaded: LoadedModel
    loss: LossFunction
    cost: Cost
    budget_bytes: int
    generate: Generate
    report: Callable[[Failure, str, Any, Any], None]
    """Called with each failure, the remedy's name, and the setting before and after."""
    interrupted: Callable[[], bool] = lambda: False
    """Asked between micro-batches: True ends the evaluation early."""
    rows: int = GENERATION_ROWS


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
    with _judging(judge.loaded.model):
        if "loss" in metrics:
            loss = _mean_loss(judge, data, np.arange(count))
            result.metrics |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if "exact_match" in metrics or samples:
            asked = count if "exact_match" in metrics else min(samples, count)
            answers = _answers(judge, [data[index] for index in range(asked)])
            if "exact_match" in metrics:
                result.metrics["exact_match"] = sum(a["answer"] == a["reference"] for a in answers) / len(answers)
            result.samples = answers[:samples]
    return result


@contextmanager
def _judging(model: torch.nn.Module) -> Iterator[None]:
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
    total, targets = 0.0, int(data.target_counts[indices].sum())
    groups = plan_micro_batches(data.lengths[indices], judge.cost, judge.budget_bytes)
    waiting = [(indices[list(group.members)], group.cost_bytes) for group in groups]
    while waiting:
        if judge.interrupted():
            raise Interrupted
        chosen, cost_bytes = waiting.pop(0)
        sums: list[float] = []
        failure = attempt(lambda chosen=chosen, sums=sums: sums.append(_loss_sum(judge, data, chosen)), judge.device,
                          lambda: "evaluate")  # type: ignore[misc]
        if failure is None:
            total += sums[0]
            continue
        judge.device.release_cached()
        _give_up_on_one(judge, failure, len(chosen))
        before, judge.budget_bytes = judge.budget_bytes, cost_bytes // 2
        judge.report(failure, "cut", before, judge.budget_bytes)
        rest = np.concatenate([chosen, *(members for members, _ in waiting)])
        groups = plan_micro_batches(data.lengths[rest], judge.cost, judge.budget_bytes)
        waiting = [(rest[list(group.members)], group.cost_bytes) for group in groups]
    return total / max(1, targets)


def _loss_sum(judge: Judge, data: TokenData, chosen: NDArray[np.int64]) -> float:
    with judge.device.host_region():
        batch = collate(data, chosen, pad_id=_pad_id(judge))
    return float(judge.loss(batch.moved(judge.device.upload)))


def _answers(judge: Judge, examples: Sequence[Example]) -> list[dict[str, str]]:
    """Generate for every example; results in the order of `examples`. Longest prompts first, like training."""
    questions = [split_question(example) for example in examples]
    order = sorted(range(len(questions)), key=lambda index: -len(questions[index][0]))
    answers: list[dict[str, str]] = [{} for _ in questions]
    done = 0
    while done < len(order):
        if judge.interrupted():
            raise Interrupted
        chosen = order[done : done + judge.rows]
        texts: list[str] = []
        failure = attempt(
            lambda chosen=chosen, texts=texts: texts.extend(_generate(judge, [questions[i][0] for i in chosen])),  # type: ignore[misc]
            judge.device,
            lambda: "generate",
        )
        if failure is not None:
            judge.device.release_cached()
            _give_up_on_one(judge, failure, len(chosen))
            before, judge.rows = judge.rows, max(1, len(chosen) // 2)
            judge.report(failure, "cut", before, judge.rows)
            continue
        done += len(chosen)
        for index, text in zip(chosen, texts, strict=True):
            prompt, reference = questions[index]
            answers[index] = {
                "prompt": judge.loaded.tokenizer.decode(prompt, skip_special_tokens=True),
                "answer": text.strip(),
                "reference": judge.loaded.tokenizer.decode(reference, skip_special_tokens=True).strip(),
            }
    return answers


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
    made_BS = judge.loaded.model.generate(
        input_ids=judge.device.upload(ids_BS),
        attention_mask=judge.device.upload(mask_BS),
        generation_config=_generation_config(judge),
    )
    return [tokenizer.decode(row, skip_special_tokens=True) for row in made_BS[:, width:].tolist()]


def _generation_config(judge: Judge) -> GenerationConfig:
    """Greedy, whatever sampling the model ships with: a score must not depend on luck."""
    return GenerationConfig(
        max_new_tokens=judge.generate.max_new_tokens,
        do_sample=False,
        repetition_penalty=judge.generate.repetition_penalty,
        eos_token_id=judge.loaded.tokenizer.eos_token_id,
        pad_token_id=_pad_id(judge),
        use_cache=True,
    )


def _pad_id(judge: Judge) -> int:
    return int(judge.loaded.tokenizer.pad_token_id)


def _give_up_on_one(judge: Judge, failure: Failure, rows: int) -> None:
    if rows > 1:
        return
    judge.report(failure, "give_up", rows, rows)
    raise MemoryExhaustedError(
        f"out of memory in {failure.phase} with one sample at a time",
        fix="lower data.max_length or generate.max_new_tokens, or use a profile with more memory",
    )
