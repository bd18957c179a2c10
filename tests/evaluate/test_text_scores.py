"""Scores of answers against references."""

from __future__ import annotations

import pytest

from engine.evaluate.text_scores import exact_match, token_f1


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
