"""Scores of a generated answer against its reference, each from 0 to 1. Pure functions of two texts.

Try: `python -c "from engine.evaluate.text_scores import token_f1; print(token_f1('a b c', 'a b d'))"`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engine.evaluate.box_scores import box_iou, detection_rate
from engine.evaluate.rouge import rouge


def exact_match(answer: str, reference: str) -> float:
    """1 if the texts are the same, else 0."""
    return float(answer == reference)


def token_f1(answer: str, reference: str) -> float:
    """The harmonic mean of precision and recall of the answer's words, which are what white space separates.

    The words that both texts have are counted with repetition: a word counts as often as it occurs in the text where it
    is rarer. Case and punctuation are kept: they carry meaning in graphs and code. Two empty texts score 1.
    """
    answered, wanted = Counter(answer.split()), Counter(reference.split())
    if not answered and not wanted:
        return 1.0
    shared = (answered & wanted).total()
    return 2 * shared / (answered.total() + wanted.total())


TEXT_SCORES: dict[str, Callable[[str, str], dict[str, float]]] = {
    "exact_match": lambda answer, reference: {"exact_match": exact_match(answer, reference)},
    "token_f1": lambda answer, reference: {"token_f1": token_f1(answer, reference)},
    "rouge": rouge,
    "box_iou": box_iou,
    "detection_rate": detection_rate,
}
"""Functions from an answer and its reference to scores by name, by the name that `evaluate.metrics` uses."""
