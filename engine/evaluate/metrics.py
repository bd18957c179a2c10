"""Scores of an answer against its reference: exact match, token F1, ROUGE, labels, boxes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

WORD = re.compile(r"[a-z0-9]+")

MOST_LOST = 0.2
"""Share of a reference's letters from which on ROUGE says little about it."""


def rouge(answer: str, reference: str) -> dict[str, float]:
    """F1 of an answer against its reference, from 0 to 1. Source: Lin 2004, "ROUGE: a package for automatic evaluation
    of summaries"; equal to the package rouge_score 0.1.2 without its stemmer."""
    answered, wanted = WORD.findall(answer.lower()), WORD.findall(reference.lower())
    return {
        "rouge1": _of_runs(answered, wanted, 1),
        "rouge2": _of_runs(answered, wanted, 2),
        "rougeL": _f1(_longest_common(answered, wanted), len(answered), len(wanted)),
    }


def lost_letters(texts: Sequence[str]) -> float:
    """Share (0 to 1) of the letters and digits of `texts` that ROUGE ignores, as it knows only a to z and 0 to 9."""
    letters = sum(character.isalnum() for text in texts for character in text)
    seen = sum(len(word) for text in texts for word in WORD.findall(text.lower()))
    return 1.0 - min(seen, letters) / letters if letters else 0.0


def _of_runs(answered: list[str], wanted: list[str], length: int) -> float:
    """F1 of the n-grams of `length` words that both have in common."""
    mine, theirs = (
        Counter(tuple(words[place : place + length]) for place in range(len(words) - length + 1))
        for words in (answered, wanted)
    )
    return _f1((mine & theirs).total(), mine.total(), theirs.total())


def _f1(shared: int, answered: int, wanted: int) -> float:
    if not shared:
        return 0.0
    precision, recall = shared / answered, shared / wanted
    return 2 * precision * recall / (precision + recall)


def _longest_common(one: list[str], other: list[str]) -> int:
    above = [0] * (len(other) + 1)
    for word in one:
        row = [0]
        for place, theirs in enumerate(other):
            row.append(above[place] + 1 if word == theirs else max(row[place], above[place + 1]))
        above = row
    return above[-1]


NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
PAIRS = rf"\({NUMBER},{NUMBER}\)\s*,\s*\({NUMBER},{NUMBER}\)"
LIST = rf"\[{NUMBER},{NUMBER},{NUMBER},{NUMBER}\]"
BOX = re.compile(f"{PAIRS}|{LIST}")

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def boxes_in(text: str) -> list[Box]:
    """The boxes that a text names, in order; boxes without area are left out."""
    found = []
    for match in BOX.finditer(text):
        x1, y1, x2, y2 = (float(number) for number in match.groups() if number is not None)
        if x1 < x2 and y1 < y2:
            found.append((x1, y1, x2, y2))
    return found


def iou(one: Box, other: Box) -> float:
    """Intersection over union, from 0 to 1."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    if wide <= 0 or high <= 0:
        return 0.0
    shared = wide * high
    return shared / (_area(one) + _area(other) - shared)


def box_iou(answer: str, reference: str) -> dict[str, float]:
    """ "mean_iou", and "iou_over_0.5" and "iou_over_0.7", which are 1 if mean_iou is above that limit, else 0.

    Boxes are paired, largest IoU first, none twice; mean_iou is the mean over the reference's boxes, 0 for those
    without a partner. Without boxes in the reference all values are 1 if the answer has none either, else 0.
    """
    answered, wanted = boxes_in(answer), boxes_in(reference)
    mean = sum(_matched(answered, wanted)) / len(wanted) if wanted else float(not answered)
    return {"mean_iou": mean, "iou_over_0.5": float(mean > 0.5), "iou_over_0.7": float(mean > 0.7)}


def detection_rate(answer: str, reference: str) -> dict[str, float]:
    """1 if `boxes_in` finds a box in the answer, else 0. The reference does not matter."""
    return {"detection_rate": float(bool(boxes_in(answer)))}


def _matched(answered: list[Box], wanted: list[Box]) -> list[float]:
    """IoU of each pair of overlapping boxes, best pair first; no box is in two pairs."""
    places = ((mine, theirs) for mine in range(len(answered)) for theirs in range(len(wanted)))
    pairs = sorted(((iou(answered[mine], wanted[theirs]), -mine, -theirs) for mine, theirs in places), reverse=True)
    taken: set[tuple[str, int]] = set()
    found = []
    for value, mine, theirs in pairs:
        if value > 0 and not {("answer", mine), ("reference", theirs)} & taken:
            taken |= {("answer", mine), ("reference", theirs)}
            found.append(value)
    return found


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def exact_match(answer: str, reference: str) -> float:
    return float(answer == reference)


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of the words between white space, counted with repetition.

    Case and punctuation are kept: they carry meaning in graphs and code. Two empty texts score 1.
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


ACCURACY = "accuracy"


def score_labels(
    answers: Sequence[str], references: Sequence[str]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Precision, recall, f1 and count (references with the label) of each class, and macro_precision, macro_recall,
    macro_f1. A ratio without a single case is 0, as in scikit-learn with `zero_division=0`. An answer that is no label
    of the references is wrong, and no class of its own."""
    given, wanted = Counter(answers), Counter(references)
    right = Counter(one for one, other in zip(answers, references, strict=True) if one == other)
    classes = {}
    for label in sorted(wanted):
        precision = right[label] / given[label] if given[label] else 0.0
        recall = right[label] / wanted[label]
        f1 = 2 * right[label] / (given[label] + wanted[label])
        classes[label] = {"precision": precision, "recall": recall, "f1": f1, "count": float(wanted[label])}
    means = {f"macro_{name}": sum(row[name] for row in classes.values()) / max(1, len(classes))
             for name in ("precision", "recall", "f1")}  # fmt: skip
    return classes, means
