"""The largest micro-batch that fits: solved for, and the same as by trying every number of sequences."""

from __future__ import annotations

import random

import pytest

from engine.budget.growth import Growth, most_rows, packed, shape_of, value
from engine.budget.lookup import find_architecture
from engine.budget.overhead import Beside
from engine.budget.plan import _largest, make_plan
from engine.budget.predict import Budget
from engine.spec.load import resolve
from engine.spec.schema.run import RunSpec


@pytest.mark.parametrize("seed", range(20))
def test_as_many_rows_as_a_live_set_leaves_room_for(seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(50):
        parts = [choice.choice((0, choice.randrange(1, 10**6))) for _ in range(8)]
        size = packed(Growth(*parts)._replace(token=choice.randrange(1, 10**6)))
        length, chunk = choice.choice((1, 7, 64, 300)), choice.choice((1, 50, 1000, 10**5))
        edge = value(size, shape_of(choice.randrange(1, 40), length, chunk))
        for room in (edge - 1, edge, edge + 1):
            most = most_rows(size, room, length, chunk)
            within = [rows for rows in range(1, 60) if value(size, shape_of(rows, length, chunk)) <= room]
            assert within == list(range(1, min(most, 59) + 1))


@pytest.mark.parametrize("answer", range(12))
def test_the_largest_is_found_however_far_from_the_bound_it_lies(answer: int) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= answer

    assert _largest(11, holds) == answer
    assert len(asked) == len(set(asked))
    assert len(asked) == 1 or answer < 11


@pytest.mark.parametrize("share", [0.0, 0.02, 0.06, 1 / 3])
def test_room_for_tensors_is_all_that_a_device_has_beside_the_rest(share: float) -> None:
    beside = Beside(8 * 2**20, 500 * 2**20, share)
    for capacity in (10**9 + 7, 24 * 2**30 - 1, 141 * 10**9):
        room = beside.room(capacity)
        assert room + beside.total(room) <= capacity < room + 1 + beside.total(room + 1)


CASES: list[tuple[str, str, str]] = [
    ("24gb", "lora", "Qwen/Qwen2.5-7B"),
    ("24gb", "full", "Qwen/Qwen3-0.6B"),
    ("48gb", "full", "google/gemma-2-2b"),
    ("24gb", "qlora", "google/gemma-2-9b"),
    ("48gb", "lora", "openai/gpt-oss-20b"),
    ("4xh100", "full", "meta-llama/Llama-3.1-8B"),
    ("demo", "demo", "builtin:tiny"),
]


@pytest.mark.parametrize(("profile", "recipe", "model"), CASES)
def test_the_planned_micro_batch_is_the_largest_of_all(profile: str, recipe: str, model: str) -> None:
    spec = resolve(profile, recipe, [f"model.id={model}", "train.batch_size=24", "train.micro_batch=auto"]).spec
    length = spec.recipe.data.max_length
    budget = Budget(find_architecture(spec), spec)
    needs = [budget.table(rows, length).device_bytes for rows in range(1, budget.batch + 1)]
    middle = needs[budget.batch // 2]
    for capacity in (needs[0], needs[1] - 1, middle - 1, middle, max(needs) - 1, needs[-1]):
        tried = with_capacity(spec, capacity)
        asked = Budget(budget.arch, tried)  # text is generated with as many rows as there is room for
        fitting = [rows for rows in range(1, budget.batch + 1) if asked.table(rows, length).device_bytes <= capacity]
        assert make_plan(tried).micro_batch == max(fitting, default=1)


@pytest.mark.parametrize(("profile", "recipe", "model"), CASES)
def test_bounds_are_on_their_sides_and_meet_where_the_step_decides(profile: str, recipe: str, model: str) -> None:
    spec = resolve(profile, recipe, [f"model.id={model}", "train.batch_size=24", "train.micro_batch=auto"]).spec
    budget, length = Budget(find_architecture(spec), spec), spec.recipe.data.max_length
    whole = budget.above_bytes(budget.batch, length)
    assert 0.7 * whole < budget.at_least_bytes(length) <= whole
    for rows in range(1, budget.batch):
        prediction = budget.table(rows, length)
        exactly, less = (
            Budget(budget.arch, with_capacity(spec, capacity)).at_most_rows(length)
            for capacity in (prediction.device_bytes, prediction.device_bytes - 1)
        )
        assert exactly >= rows
        if prediction.deciding_phase in {"loss_backward", "layer_first"}:
            assert (exactly, less) == (rows, rows - 1)


def with_capacity(spec: RunSpec, capacity_bytes: int) -> RunSpec:
    """The same run on devices of so many bytes."""
    device = spec.profile.device.model_copy(update={"memory_gib": capacity_bytes / 2**30, "reserve_gib": 0.0})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"device": device})})
