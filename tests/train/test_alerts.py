"""Alerts of a run: what counts as a spike, a plateau, slow data, and how often it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.journal.directory import create_run_directory
from engine.journal.events import EventTail, EventWriter, Journal
from engine.train.run.alerts import QUIET_STEPS, AlertMonitor


def alerts(tmp_path: Path, steps: list[dict[str, float]], total: int = 1000) -> list[tuple[str, int]]:
    """(code, step) of the warnings of a run with these steps; what a step does not say is as usual."""
    run = create_run_directory(tmp_path, "run", "", {})
    usual: dict[str, Any] = {"grad_norm": 1.0, "waited": 0.0, "seconds": 1.0}
    with EventWriter(run) as writer:
        monitor = AlertMonitor(Journal(writer), total)
        for number, step in enumerate(steps, 1):
            monitor.after_step(number, **{"loss": 5.0 / number, **usual, **step})
        monitor.not_finite(len(steps) + 1, "the run ends here")
    found = EventTail(run.events).poll()
    assert all(event["fix"] and str(event["text"]) for event in found)
    return [(event["code"], event["step"]) for event in found]


def test_a_quiet_run_says_nothing_until_it_diverges(tmp_path: Path) -> None:
    assert alerts(tmp_path, [{}] * 300) == [("not_finite", 301)]


def test_a_spike_is_told_once_in_a_while_and_not_in_the_first_steps(tmp_path: Path) -> None:
    steps: list[dict[str, float]] = [{} for _ in range(200)]
    for number in (3, 60, 61, 62 + QUIET_STEPS):
        steps[number - 1] = {"grad_norm": 40.0}
    found = alerts(tmp_path, steps)
    assert found[:-1] == [("gradient_spike", 60), ("gradient_spike", 62 + QUIET_STEPS)]


def test_a_loss_that_stays_is_a_plateau_but_not_at_the_end_of_a_run(tmp_path: Path) -> None:
    flat = [{"loss": 2.0 + 0.01 * (number % 3)} for number in range(300)]
    codes = [code for code, _ in alerts(tmp_path / "long", flat, total=1000)]
    assert codes == ["plateau", "not_finite"]
    falling = [{"loss": 2.0 - 0.005 * number} for number in range(200)]
    assert alerts(tmp_path / "done", [*falling, *([{"loss": 1.0}] * 100)], total=300)[:-1] == []


def test_a_run_without_any_gradient_says_so_once(tmp_path: Path) -> None:
    zero = [{"grad_norm": 0.0}] * 60
    assert alerts(tmp_path / "long", zero)[:-1] == [("no_gradient", 3)]
    assert alerts(tmp_path / "short", zero[:2], total=2)[:-1] == [("no_gradient", 2)]
    assert alerts(tmp_path / "some", [{"grad_norm": 0.0}, {}, *zero])[:-1] == []


def test_slow_data_are_told_where_the_wait_is_felt(tmp_path: Path) -> None:
    slow = [{"waited": 0.4, "seconds": 1.0}] * 40
    assert [code for code, _ in alerts(tmp_path / "slow", slow)] == ["slow_data", "not_finite"]
    short = [{"waited": 0.004, "seconds": 0.01}] * 40
    assert [code for code, _ in alerts(tmp_path / "short", short)] == ["not_finite"]
