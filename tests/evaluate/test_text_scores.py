"""Scores of answers against references."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from rouge_score.rouge_scorer import RougeScorer

from engine.evaluate.metrics import (
    box_iou,
    boxes_in,
    detection_rate,
    exact_match,
    iou,
    lost_letters,
    rouge,
    score_labels,
    token_f1,
)
from tests.evaluate.scikit_learn_f1 import RECORDED, drawn_labels, drawn_texts


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("", "", 1.0),
        ("", "a", 0.0),
        ("a b c", "a b c", 1.0),
        ("c b a", "a b c", 1.0),
        ("a a", "a", 2 / 3),
        ("( w / want )", "( w / wants )", 4 / 5),
        ("A", "a", 0.0),
    ],
)
def test_token_f1_is_the_harmonic_mean_of_precision_and_recall(answer: str, reference: str, score: float) -> None:
    assert token_f1(answer, reference) == pytest.approx(score)
    assert token_f1(reference, answer) == pytest.approx(score)
    assert exact_match(answer, reference) == (answer == reference)


def test_f1_of_words_and_of_labels_is_that_of_scikit_learn() -> None:
    recorded = json.loads(RECORDED.read_text())
    words = [token_f1(answer, reference) for answer, reference in drawn_texts()]
    assert words == pytest.approx(recorded["token_f1"], abs=1e-6)
    for (answers, references), expected in zip(drawn_labels(), recorded["labels"], strict=True):
        _, means = score_labels(answers, references)
        assert list(means.values()) == pytest.approx(expected, abs=1e-6)


def test_rouge_equals_the_package_of_its_name() -> None:
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    drawn = random.Random(11)
    words = ["the", "a", "Cat", "sat,", "on", "mat", "née", "x2", "--", "3.5"]
    for _ in range(2000):
        answer, reference = (" ".join(drawn.choices(words, k=drawn.randint(0, 12))) for _ in range(2))
        theirs = {name: score.fmeasure for name, score in scorer.score(reference, answer).items()}
        assert rouge(answer, reference) == pytest.approx(theirs, abs=1e-12)
    assert lost_letters(["Tòa án", "abc"]) == pytest.approx(2 / 8)


def brute_iou(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes with whole-number corners, computed by counting unit cells."""
    cells = [
        {(x, y) for x in range(int(box[0]), int(box[2])) for y in range(int(box[1]), int(box[3]))}
        for box in (one, other)
    ]
    return len(cells[0] & cells[1]) / len(cells[0] | cells[1])


def drawn_boxes(drawn: random.Random, count: int) -> list[list[int]]:
    corners = [(drawn.randint(0, 12), drawn.randint(0, 12)) for _ in range(count)]
    return [[x, y, x + drawn.randint(1, 8), y + drawn.randint(1, 8)] for x, y in corners]


@pytest.mark.parametrize("other", [(1, 1, 3, 4), (5, 0, 7, 2), (0, 5, 2, 7), (5, 5, 6, 6), (2, 0, 4, 2)])
def test_boxes_that_are_apart_on_either_axis_share_nothing(other: tuple[int, int, int, int]) -> None:
    assert iou((0, 0, 2, 2), other) == brute_iou((0, 0, 2, 2), other)


def test_boxes_are_matched_one_to_one_best_pair_first() -> None:
    drawn = random.Random(7)
    for _ in range(1000):
        answered, wanted = drawn_boxes(drawn, drawn.randint(0, 4)), drawn_boxes(drawn, drawn.randint(1, 4))
        left, right, expected = list(answered), list(wanted), 0.0
        while left and right:
            value, mine, theirs = max(((brute_iou(a, w), a, w) for a in left for w in right), key=lambda pair: pair[0])
            expected += value
            left.remove(mine)
            right.remove(theirs)
        # A reversed box, with its corners exchanged, has no area, and is no box.
        reversed_boxes = [[x2, y2, x1, y1] for x1, y1, x2, y2 in drawn_boxes(drawn, drawn.randint(0, 1))]
        answer = "I see " + " and ".join(str(box) for box in reversed_boxes + answered)
        reference = "".join(f"({x1},{y1}),({x2},{y2})" for x1, y1, x2, y2 in wanted)
        found = box_iou(answer, reference)
        assert found["mean_iou"] == pytest.approx(expected / len(wanted))
        assert found["iou_over_0.5"] == (found["mean_iou"] > 0.5)
        assert detection_rate(answer, reference)["detection_rate"] == bool(answered)


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("", []),
        ("(1,2),(3,4)", [(1, 2, 3, 4)]),
        ("table( 1 , 2 ) , ( 3 , 4 )", [(1, 2, 3, 4)]),
        ('[{"bbox_2d": [10, 20, 30, 40], "label": "cup"}]', [(10, 20, 30, 40)]),
        ("(3,4),(1,2)", []),
        ("(1,2),(1,4)", []),
        ("(1,2), (3", []),
        ("[0.5, 1.5, 2.5, 3.5] (1,2),(3,4)", [(0.5, 1.5, 2.5, 3.5), (1, 2, 3, 4)]),
    ],
)
def test_boxes_are_found_in_any_text(text: str, boxes: list[tuple[float, ...]]) -> None:
    assert boxes_in(text) == boxes
