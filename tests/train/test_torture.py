"""A seeded sample of `make torture`: an allocation fails somewhere in a unit of work, and the results do not change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.train.fault_rig import STEP, UNITS, Case, rigged
from tests.train.torture import (
    CASES,
    OPTIMIZER_CASES,
    PAIR_CASES,
    ROUNDING_CASES,
    SMALLER,
    Tally,
    sweep,
    sweep_pairs,
    sweep_set_up,
)

SEED = 20261121
FAULTS = {"step": 20, "probe": 6, "evaluation": 6, "checkpoint": 2, "whole run": 2}
"""Allocations of each unit that fail, on the device and again on the host."""


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Iterator[list[Tally]]:
    """Tallies of a test, added up at the end of the whole suite (tests/conftest.py)."""
    tallies: list[Tally] = []
    yield tallies
    record_property("faults", sum(tally.faults for tally in tallies))


def named(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=named)
def test_an_allocation_that_fails_anywhere_changes_nothing(
    tmp_path: Path, case: Case, draw: random.Random, tried: list[Tally]
) -> None:
    with rigged(case, tmp_path) as rig:
        tallies = [sweep(rig, unit, case.name, FAULTS[unit.name], draw) for unit in UNITS]
    tried += tallies
    assert [text for tally in tallies for text in tally.wrong] == []


@pytest.mark.parametrize("case", PAIR_CASES, ids=named)
def test_a_step_on_pairs_learns_the_same_whatever_fails(
    tmp_path: Path, case: Case, draw: random.Random, tried: list[Tally]
) -> None:
    with rigged(case, tmp_path) as rig:
        tally = sweep(rig, STEP, case.name, 10, draw)
    tried.append(tally)
    assert tally.wrong == []


@pytest.mark.parametrize("case", SMALLER, ids=named)
def test_a_second_failure_in_the_recovery_or_the_next_attempt_changes_nothing(
    tmp_path: Path, case: Case, draw: random.Random, tried: list[Tally]
) -> None:
    with rigged(case, tmp_path) as rig:
        tally = sweep_pairs(rig, STEP, case.name, 30, draw)
    tried.append(tally)
    assert tally.wrong == []


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=named)
def test_loading_and_making_optimizer_state_are_done_again(
    tmp_path: Path, case: Case, draw: random.Random, tried: list[Tally]
) -> None:
    tally = sweep_set_up(case, tmp_path, 3, draw)
    tried.append(tally)
    assert tally.wrong == []


@pytest.mark.parametrize("case", ROUNDING_CASES, ids=named)
def test_weights_in_bf16_are_those_of_an_undisturbed_step_to_the_bit(
    tmp_path: Path, case: Case, draw: random.Random, tried: list[Tally]
) -> None:
    with rigged(case, tmp_path) as rig:
        tally = sweep(rig, STEP, case.name, 20, draw)
    tried.append(tally)
    assert tally.wrong == []


@pytest.mark.parametrize("case", OPTIMIZER_CASES, ids=named)
def test_an_optimizer_that_fails_inside_its_step_leaves_no_half_step(
    tmp_path: Path, case: Case, draw: random.Random, tried: list[Tally]
) -> None:
    with rigged(case, tmp_path) as rig:
        undone = sweep(rig, STEP, case.name, 12, draw)
        rig.context.guard.takes_copy = False  # too large to copy: back to the checkpoint
        reloaded = sweep(rig, STEP, f"{case.name}, without a copy", 12, draw)
    tried += [undone, reloaded]
    assert undone.wrong + reloaded.wrong == []
