"""Scores of boxes that a model names in its answer: how well they cover the reference's, and whether there are any.

Boxes are read as `(x1,y1),(x2,y2)` and as `[x1, y1, x2, y2]`, in the scale of the text: answer and reference are
written alike (`engine.data.image_formats.boxes_as_text`).

Try: `tunedeck eval last`, with box_iou in evaluate.metrics
"""

from __future__ import annotations

import re

NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
PAIRS = rf"\({NUMBER},{NUMBER}\)\s*,\s*\({NUMBER},{NUMBER}\)"
LIST = rf"\[{NUMBER},{NUMBER},{NUMBER},{NUMBER}\]"
BOX = re.compile(f"{PAIRS}|{LIST}")

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def boxes_in(text: str) -> list[Box]:
    """The boxes that a text names, in order, as (left, top, right, bottom). Boxes without area are left out."""
    found = []
    for match in BOX.finditer(text):
        x1, y1, x2, y2 = (float(number) for number in match.groups() if number is not None)
        if x1 < x2 and y1 < y2:
            found.append((x1, y1, x2, y2))
    return found


def iou(one: Box, other: Box) -> float:
    """Intersection over union of two boxes, from 0 to 1."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    if wide <= 0 or high <= 0:
        return 0.0
    shared = wide * high
    return shared / (_area(one) + _area(other) - shared)


def box_iou(answer: str, reference: str) -> dict[str, float]:
    """Return "mean_iou", and "iou_over_0.5" and "iou_over_0.7", which are 1 if mean_iou is above that limit, else 0.

    Boxes of the answer and of the reference are paired, the pair with the largest IoU first; no box is in two pairs.
    mean_iou is the mean over the reference's boxes, in which a box without a partner counts 0. If the reference has no
    boxes, all values are 1 if the answer has none either, else 0.
    """
    answered, wanted = boxes_in(answer), boxes_in(reference)
    mean = sum(_matched(answered, wanted)) / len(wanted) if wanted else float(not answered)
    return {"mean_iou": mean, "iou_over_0.5": float(mean > 0.5), "iou_over_0.7": float(mean > 0.7)}


def detection_rate(answer: str, reference: str) -> dict[str, float]:
    """Return "detection_rate": 1 if `boxes_in` finds a box in the answer, else 0. The reference does not matter."""
    return {"detection_rate": float(bool(boxes_in(answer)))}


def _matched(answered: list[Box], wanted: list[Box]) -> list[float]:
    """The IoU of each pair of an answered and a wanted box that overlap, best pair first; no box is in two pairs."""
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
