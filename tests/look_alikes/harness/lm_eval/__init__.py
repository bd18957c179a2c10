"""A look-alike of lm-evaluation-harness with one task, whose five samples choose between two continuations each."""

from __future__ import annotations

from typing import Any

SAMPLES = [(f"{number} plus 1 is ", (str(number + 1), str(number))) for number in range(5)]


class Request:
    def __init__(self, *arguments: str) -> None:
        self.args = arguments


def simple_evaluate(*, model: Any, tasks: list[str], **_: Any) -> dict[str, Any]:
    """The scores of the task `sums`."""
    asked = [Request(text, answer) for text, answers in SAMPLES for answer in answers]
    found = iter(model.loglikelihood(asked))
    right = [float(next(found)[0] > next(found)[0]) for _ in SAMPLES]
    samples = [{"doc_id": number, "doc_hash": text, "filter": "none", "acc": value}
               for number, ((text, _), value) in enumerate(zip(SAMPLES, right, strict=True))]  # fmt: skip
    return {"results": {"sums": {"acc,none": sum(right) / len(right)}}, "samples": {"sums": samples},
            "versions": {"sums": 1}, "n-shot": {"sums": 0}}  # fmt: skip
