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
    """The boxes that a text names, in order. What has no area is no box."""
    found = []
    for match in BOX.finditer(text):
        x1, y1, x2, y2 = (float(number) for number in match.groups() if number is not None)
        if x1 < x2 and y1 < y2:
            found.append((x1, y1, x2, y2))
    return found


def iou(one: Box, other: Box) -> float:
    """Intersection over union of two boxes."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    if wide <= 0 or high <= 0:
        return 0.0
    shared = wide * high
    return shared / (_area(one) + _area(other) - shared)


def box_iou(answer: str, reference: str) -> dict[str, float]:
    """mean_iou, the mean over the reference's boxes of the IoU with the answer's box that is theirs, 0 without one; and
    whether it is over 0.5 and over 0.7. Each box of the answer belongs to one of the reference at most: the pair with
    the largest IoU is made first. Without boxes in either text, all are 1."""
    answered, wanted = boxes_in(answer), boxes_in(reference)
    mean = sum(_matched(answered, wanted)) / len(wanted) if wanted else float(not answered)
    return {"mean_iou": mean, "iou_over_0.5": float(mean > 0.5), "iou_over_0.7": float(mean > 0.7)}


def detection_rate(answer: str, reference: str) -> dict[str, float]:
    """detection_rate: whether the answer names a box."""
    return {"detection_rate": float(bool(boxes_in(answer)))}


def _matched(answered: list[Box], wanted: list[Box]) -> list[float]:
    """The IoU of each pair of an answered and a wanted box, best pair first, no box in two pairs."""
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
