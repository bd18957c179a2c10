"""Schedules agree with transformers' own, step for step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from engine.config.check.notes import warmup_note
from engine.config.schema.recipe import Train
from engine.train.step.optimizer import Schedule

TOTAL = 40


def theirs(name: str, warmup: int, extra: dict[str, Any] | None = None) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, warmup, TOTAL, scheduler_specific_kwargs=extra)
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ours(train: Train) -> list[float]:
    schedule = Schedule.of(train, TOTAL)
    return [schedule.factor(step) for step in range(1, TOTAL + 1)]


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("scheduler", "name", "extra"),
    [
        ("cosine", "cosine", None),
        ("linear", "linear", None),
        ("constant", "constant_with_warmup", None),
        ("cosine_with_restarts", "cosine_with_restarts", {"num_cycles": 3}),
    ],
)
def test_factors_equal_transformers(scheduler: Any, name: str, extra: dict[str, Any] | None, warmup: int) -> None:
    train = Train(scheduler=scheduler, warmup_steps=warmup, restarts=3, learning_rate=2e-4)
    assert ours(train) == pytest.approx(theirs(name, warmup, extra), abs=1e-12)


def test_a_minimum_equals_transformers_cosine_with_min_lr() -> None:
    train = Train(scheduler="cosine", warmup_steps=5, learning_rate=1e-3, min_learning_rate=1e-4)
    assert ours(train) == pytest.approx(theirs("cosine_with_min_lr", 5, {"min_lr_rate": 0.1}), abs=1e-12)


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_a_polynomial_equals_transformers(power: float) -> None:
    train = Train(scheduler="polynomial", warmup_steps=5, learning_rate=1.0, min_learning_rate=0.1, power=power)
    expected = theirs("polynomial", 5, {"lr_end": 0.1, "power": power})
    assert ours(train) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", ["cosine", "linear", "1-sqrt"])
def test_warm_up_stable_decay_equals_transformers(shape: Any) -> None:
    train = Train(
        scheduler="wsd", warmup_steps=5, learning_rate=1.0, min_learning_rate=0.1, decay_ratio=0.25, decay_shape=shape
    )
    extra = {"num_decay_steps": 10, "decay_type": shape, "min_lr_ratio": 0.1, "num_stable_steps": TOTAL - 5 - 10}
    assert ours(train) == pytest.approx(theirs("warmup_stable_decay", 5, extra), abs=1e-12)


@pytest.mark.parametrize(("wanted", "total", "taken"), [(20, 20, 20), (20, 5, 4), (20, 1, 0), (0, 1, 0)])
def test_a_warm_up_longer_than_the_run_ends_with_the_full_rate_at_the_last_step(
    wanted: int, total: int, taken: int
) -> None:
    train = Train(warmup_steps=wanted, learning_rate=2e-4)
    schedule = Schedule.of(train, total)
    assert schedule.warmup_steps == taken
    assert bool(warmup_note(train, total)) == (taken != wanted)
    assert taken == wanted or schedule.factor(total) == 1.0


def test_a_warm_up_ratio_is_rounded_up_as_transformers_does() -> None:
    assert Schedule.of(Train(warmup_ratio=0.03, learning_rate=2e-4), TOTAL).warmup_steps == 2
