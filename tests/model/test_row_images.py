"""Simulated rows: images of a row have bounds that models can see."""

from __future__ import annotations

import pytest

from engine.extras.simulate.batch import _apart


@pytest.mark.parametrize(
    ("images", "tokens"),
    [
        ([[7, 7], [7]], [7, 7, 0, 7]),
        ([[7, 7]], [7, 7]),
        ([[1, 7, 2], [1, 7, 2]], [1, 7, 2, 1, 7, 2]),
        ([[7], [7], [7]], [7, 0, 7, 0, 7]),
    ],
)
def test_images_that_nothing_separates_get_a_text_token_between(images: list[list[int]], tokens: list[int]) -> None:
    assert _apart(images, 7) == tokens
