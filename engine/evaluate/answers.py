"""Generates the answers of an evaluation: several at once, fewer after an out-of-memory error. No answer is generated
twice.

Answers are kept as soon as they are generated, in the KeptAnswers that the caller gives (`engine.evaluate.kept`).

Try: `pytest tests/evaluate/test_scoring.py`
"""

from __future__ import annotations

from engine.data.tokens import TokenData
from engine.evaluate.context import EvaluationContext, EvaluationStopped, FailedPass, decode, retries_unchanged
from engine.evaluate.kept import KeptAnswers

Answer = dict[str, str]
"""Prompt, answer and reference of one sample, as text; white space around answer and reference is trimmed."""


def answer_first(context: EvaluationContext, data: TokenData, count: int, kept: KeptAnswers) -> list[Answer]:
    """Return prompt, generated answer and reference of the first `count` samples, in data order. Answers in `kept` are
    not generated again; new ones are added to `kept`. Answers to the longest prompts are generated first.

    Raises:
        MemoryExhaustedError: memory does not suffice even for one answer at a time.
        EvaluationStopped: `context.should_stop` returned True.
    """
    questions = [data.split_question(index) for index in range(count)]
    waiting = sorted(
        (index for index in range(count) if index not in kept.texts), key=lambda index: -len(questions[index][0])
    )
    failures, clean, size = 0, True, context.batch_size
    while waiting:
        if context.should_stop():
            raise EvaluationStopped
        rows = max(1, min(size.rows, context.planned_rows(len(questions[waiting[0]][0]))))
        parts = _parts(waiting, rows, context.shares)
        found = context.attempt("generate", data, parts)
        if not isinstance(found, FailedPass):
            kept.add({index: text for part, texts in zip(parts, found, strict=True)
                      for index, text in zip(part, texts, strict=True)})  # fmt: skip
            del waiting[: sum(map(len, parts))]
            failures, size.largest_success = 0, max(size.largest_success, len(parts[0]))
            continue
        failures, clean = failures + 1, False
        context.device.release_cached()
        proven = len(parts[0]) <= size.largest_success
        if not retries_unchanged(context, found, failures, proven=proven, rows=len(parts[0])):
            size.halve(len(parts[0]))
            context.report(found, "cut", len(parts[0]), size.rows)
    if clean:
        size.grow()
    return [_answer(context, question, kept.texts[index]) for index, question in enumerate(questions)]


def _parts(waiting: list[int], rows: int, shares: int) -> list[list[int]]:
    """Divide the first of the samples `waiting` among `shares` ranks: a list of samples for each rank, at most `rows`
    each, of equal length if there are enough samples; the first list is the longest. Empty lists are left out."""
    rows = min(rows, -(-len(waiting) // shares))
    parts = (waiting[first : first + rows] for first in range(0, rows * shares, rows))
    return [part for part in parts if part]


def _answer(context: EvaluationContext, question: tuple[list[int], list[int]], text: str) -> Answer:
    prompt, reference = (decode(context, ids) for ids in question)
    return {"prompt": prompt, "answer": text.strip(), "reference": reference.strip()}
