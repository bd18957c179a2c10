"""A part of the perturbation of every key: no key of a recipe or a profile is accepted and then does nothing.

All cells: `python -P -m tests.keys.matrix`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile
from tests.keys import observe
from tests.keys.matrix import Cell, Matrix, in_share, summary
from tests.keys.values import Key, candidates, keys_of

SHARE = 64
"""One cell in so many is decided here."""

IN_PROCESS = (
    "lora",
    "full",
    "continued",
    "staged",
    "preference",
    "vision",
    "mixture",
    "resumed",
    "evaluated",
    "chatted",
)
"""Branches whose runs are in this process; the others start a process for each device."""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("keys"))


@pytest.mark.parametrize("branch", IN_PROCESS)
def test_no_key_is_accepted_without_an_effect(branch: str, matrix: Matrix) -> None:
    cells = [matrix.decide(found, key) for found, key in matrix.cells([branch]) if in_share(found, key, SHARE)]
    assert cells
    assert not [cell for cell in cells if cell.outcomes and cell.verdict == "fault"], summary(cells)


def test_a_key_that_nobody_reads_is_found(matrix: Matrix) -> None:
    blind = replace(matrix.branches["lora"], observations=(lambda spec, folder: observe.Seen("always the same"),))
    key = next(key for key in keys_of(Recipe) if key.name == "train.weight_decay")
    cell = matrix.decide(blind, key)
    assert set(cell.outcomes.values()) == {"silent"} and cell.verdict == "fault"


@pytest.mark.parametrize(
    ("outcomes", "is_open", "verdict"),
    [
        (["acted", "silent"], False, "acted"),
        (["acted", "silent"], True, "fault"),
        (["rejected", "silent"], False, "rejected"),
        (["silent", "silent"], False, "fault"),
        (["rejected", "silent"], True, "fault"),
        (["crashed", "acted"], False, "fault"),
        (["noted", "rejected"], True, "noted"),
    ],
)
def test_the_verdict_of_a_cell(outcomes: list[str], is_open: bool, verdict: str) -> None:
    named = {str(number): outcome for number, outcome in enumerate(outcomes)}
    cell = Cell("lora", "some.key", named, is_open=is_open)
    assert cell.verdict == verdict


def test_every_key_has_values_to_try() -> None:
    def lacks(key: Key) -> bool:
        return not key.is_stated and not candidates(key, ("nonsense",), key.default)

    keys = [*keys_of(Recipe), *keys_of(Profile)]
    assert len(keys) > 200
    assert {key.name for key in keys if lacks(key)} == {"schema", "kind"}
