"""The learned budget: cut by what failed and by what was measured, grown with care, forgetful of neighbours."""

from __future__ import annotations

from engine.train.costbudget import CLEAN_STEPS_TO_FORGET, CLEAN_STEPS_TO_GROW, CostBudget


def clean_steps(budget: CostBudget, count: int, room: int) -> None:
    for _ in range(count):
        budget.record_clean_step(room, may_grow=True)


def test_a_first_failure_cuts_to_four_fifths_of_what_failed():
    budget = CostBudget(1000, top_bytes=1000)
    budget.cut(900, room_bytes=500)
    assert budget.budget_bytes == 720
    assert budget.ceiling_bytes == 900


def test_before_anything_was_measured_a_prediction_in_bytes_is_believed():
    budget = CostBudget(1000, top_bytes=1000, expected_slope=1.0)
    budget.cut(1000, room_bytes=400)
    assert budget.budget_bytes == int(0.97 * 400)


def test_a_measured_slope_cuts_further_when_it_says_so():
    budget = CostBudget(1000, top_bytes=1000)
    budget.record_success(100, measured_bytes=200)
    budget.cut(900, room_bytes=800)
    assert budget.budget_bytes == int(0.97 * 800 / 2)


def test_cuts_reach_one_sequence_in_few_steps():
    budget, cuts = CostBudget(2**40, top_bytes=2**40), 0
    while budget.budget_bytes > 2**30:
        budget.cut(budget.budget_bytes, room_bytes=2**30)
        cuts += 1
    assert cuts <= 32


def test_growth_stays_below_the_ceiling_and_the_room():
    budget = CostBudget(500, top_bytes=2000)
    budget.cut(1000, room_bytes=2000)
    budget.record_success(500, measured_bytes=500)
    clean_steps(budget, 40 * CLEAN_STEPS_TO_GROW, room=1_000_000)
    assert budget.budget_bytes == 950


def test_growth_needs_measured_headroom():
    budget = CostBudget(500, top_bytes=2000)
    budget.record_success(500, measured_bytes=500)
    clean_steps(budget, 20 * CLEAN_STEPS_TO_GROW, room=510)
    assert budget.budget_bytes <= 510


def test_a_neighbours_ceiling_is_forgotten_in_time():
    budget = CostBudget(1000, top_bytes=1000)
    budget.record_success(1000, measured_bytes=1000)
    budget.cut(1000, room_bytes=5000)
    assert budget.ceiling_is_passing
    clean_steps(budget, CLEAN_STEPS_TO_FORGET + 10 * CLEAN_STEPS_TO_GROW, room=5000)
    assert budget.ceiling_bytes is None
    assert budget.budget_bytes == 1000


def test_it_never_grows_when_told_not_to():
    budget = CostBudget(500, top_bytes=2000)
    budget.record_success(500, measured_bytes=500)
    for _ in range(100):
        budget.record_clean_step(1_000_000, may_grow=False)
    assert budget.budget_bytes == 500


def test_it_survives_a_checkpoint():
    budget = CostBudget(500, top_bytes=2000)
    budget.record_success(500, measured_bytes=700)
    budget.cut(600, 400)
    assert CostBudget.from_json(budget.as_json()) == budget
