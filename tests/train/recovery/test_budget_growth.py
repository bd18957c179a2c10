"""Memory that becomes available is used again: after a co-tenant has gone, micro-batches are as large as before."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.device.co_tenant import CO_TENANT_VARIABLE, SharedByteCount
from engine.errors import EnvironmentProblem, MemoryExhaustedError
from engine.journal import control
from engine.journal.checkpoints_on_disk import learned_memory
from engine.journal.directory import RunDirectory
from engine.journal.events import Event, EventTail, EventWriter, Journal
from engine.launch.process import start_engine
from engine.train.step.budget_growth import BudgetGrowth
from engine.train.step.context import StepContext
from engine.train.step.transaction import StepTransaction
from tests.events import read_events
from tests.present import metered, present
from tests.train.fault_rig import write_model
from tests.train.run_helpers import Workshop, make_spec, new_run, of_kind, train

Squeezed = tuple[StepContext, Callable[..., None]]

STEPS = 400
CAPACITY_GIB = 1.0
TABLES: dict[str, Any] = {
    "train": {"max_steps": STEPS, "batch_size": 16},
    "checkpoint": {"every_steps": 50, "every_minutes": 0},
}


@contextmanager
def co_tenant(count: Path) -> Iterator[Callable[[float], None]]:
    """Start a second process that holds memory on the device. Yields a function that sets how much that process holds,
    in GiB."""
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.device.co_tenant", str(count)],
        stdin=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert process.stdin is not None

    def hold(gib: float) -> None:
        present(process.stdin).write(f"{gib}\n")
        present(process.stdin).flush()

    try:
        wait_for(lambda: count.exists() and count.stat().st_size == 8)
        yield hold
    finally:
        process.stdin.close()
        process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Watched:
    """The events of a running engine, read from its journal while they are written."""

    def __init__(self, place: RunDirectory) -> None:
        self.tail, self.events = EventTail(place.events), list[Event]()

    def until(self, condition: Callable[[Event], bool]) -> int:
        """Wait for a step that fulfils the condition, among those not seen yet; returns its number."""
        found: list[int] = []

        def look() -> bool:
            fresh = self.tail.poll()
            self.events += fresh
            found.extend(event["step"] for event in of_kind(fresh, "step") if condition(event))
            return bool(found)

        wait_for(look)
        return found[0]


def even_samples(path: Path, length: int) -> Path:
    """Write samples of one length, so that every step has the same shape and micro-batches depend on the memory
    alone."""
    drawn = random.Random(0)
    texts = ["".join(drawn.choices("abcdefgh ijkl", k=length)) for _ in range(64)]
    path.write_text("".join(json.dumps({"prompt": text[:20], "completion": text[20:]}) + "\n" for text in texts))
    return path


def test_squeezed_and_released_a_run_shrinks_comes_back_and_does_not_oscillate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = even_samples(tmp_path / "samples.jsonl", 40)
    tables = {**TABLES, "model": {"id": str(write_model(tmp_path / "model", 2, 64))}}
    shorter = {**tables, "train": {**TABLES["train"], "max_steps": 3}}
    calm = new_run(tmp_path / "calm", make_spec(samples, memory_gib=CAPACITY_GIB, **shorter))
    first = of_kind(train(calm)[1], "step")[0]
    static, peak = first["allocated_bytes"], first["peak_bytes"]
    assert first["micro_batches"] == 1
    left_bytes = static + (peak - static) / 2
    counted = tmp_path / "co-tenant"
    place = new_run(tmp_path / "runs", make_spec(samples, memory_gib=CAPACITY_GIB, **tables))
    with co_tenant(counted) as hold:
        monkeypatch.setenv(CO_TENANT_VARIABLE, str(counted))
        process = start_engine(place)
        run = Watched(place)
        run.until(lambda step: step["step"] >= 5)
        hold(CAPACITY_GIB - left_bytes / 2**30)
        squeezed = run.until(lambda step: step["micro_batches"] > 1)
        run.until(lambda step: step["step"] >= squeezed + 30)
        hold(0)
        recovered = run.until(lambda step: step["micro_batches"] == 1)
        run.until(lambda step: step["step"] >= recovered + 20)
        control.send_request(place, "stop")
        assert process.wait() == 130, place.log.read_text()
    events = list(read_events(place.events))
    steps = of_kind(events, "step")
    failures = of_kind(events, "backoff")
    assert {event["remedy"] for event in failures} <= {"retry", "cut"}
    assert [event["step"] for event in failures if event["step"] > squeezed] == []
    assert all(event["micro_batches"] > 1 for event in steps if squeezed <= event["step"] < recovered)
    assert all(event["micro_batches"] == 1 for event in steps if event["step"] >= recovered)
    assert [event["samples"] for event in steps] == [16] * len(steps)
    budgets = [event["budget"] for event in steps]
    assert all(after <= 1.05 * before for before, after in pairwise(budgets))


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedByteCount:
    """The bytes that a co-tenant holds on this process's device."""
    count = SharedByteCount.create(tmp_path / "co-tenant")
    monkeypatch.setenv(CO_TENANT_VARIABLE, str(tmp_path / "co-tenant"))
    return count


def test_a_remedy_that_a_co_tenant_forced_is_lifted_when_it_has_gone(tmp_path: Path, shared: SharedByteCount) -> None:
    spec = make_spec(
        even_samples(tmp_path / "samples.jsonl", 240), memory_gib=CAPACITY_GIB, data={"max_length": 256},
        train={"batch_size": 4, "max_steps": 100, "gradient_checkpointing": False},
    )  # fmt: skip
    with (workshop := Workshop(spec, tmp_path / "place")) as setup:
        context, lifted = setup.context, []
        transaction = StepTransaction(context)
        with EventWriter(RunDirectory(tmp_path)) as writer:
            growth = BudgetGrowth(context, Journal(writer))

            def step(number: int) -> int:
                outcome = transaction.run(number, setup.order.step(number))
                growth.after_step(number, clean=not transaction.failures)
                return outcome.micro_batches

            assert step(1) == 1
            roomy, context.budget.budget_bytes, transaction.work.peak_bytes = context.budget.budget_bytes, 1, 0
            assert step(2) == 4
            shared.hold(int(context.device.capacity_bytes - 0.95 * transaction.work.peak_bytes))
            context.budget.budget_bytes = roomy
            assert step(3) == 4
            assert context.loaded.checkpointing
            for number in range(4, 10):
                step(number)
            assert context.loaded.checkpointing
            shared.hold(0)
            taken = [step(number) for number in range(10, 60)]
            lifted = of_kind(list(read_events(tmp_path / "events.jsonl")), "remedy_lifted")
    assert not context.loaded.checkpointing
    assert [(e["before"] > 0, e["after"]) for e in lifted if e["remedy"] == "checkpointing"] == [(True, 0)]
    assert taken[-1] == 1
    assert len([e for e in of_kind(workshop.events(), "backoff") if e["step"] > 3]) == 0


@pytest.fixture
def squeezed(tmp_path: Path, shared: SharedByteCount) -> Iterator[Squeezed]:
    """A run whose optimizer state moved to the host because of a co-tenant, and a function that takes a step."""
    spec = make_spec(
        even_samples(tmp_path / "samples.jsonl", 240), memory_gib=CAPACITY_GIB, data={"max_length": 256},
        train={"batch_size": 4, "max_steps": 100}, backoff={"ladder": ["optimizer_offload"]},
    )  # fmt: skip
    with Workshop(spec, tmp_path / "place") as setup, EventWriter(RunDirectory(tmp_path)) as writer:
        transaction, growth = StepTransaction(setup.context), BudgetGrowth(setup.context, Journal(writer))
        numbers = count(1)

        def step(before_growth: Callable[[], None] = lambda: None) -> None:
            number = next(numbers)
            transaction.run(number, setup.order.step(number))
            before_growth()
            growth.after_step(number, clean=not transaction.failures)

        step()
        shared.hold(int(setup.context.device.capacity_bytes - 0.95 * transaction.work.peak_bytes))
        step()
        assert setup.context.guard.host_state.on
        yield setup.context, step


def test_optimizer_state_comes_back_when_the_co_tenant_has_gone(
    tmp_path: Path, shared: SharedByteCount, squeezed: Squeezed
) -> None:
    context, step = squeezed
    static_bytes = context.static_bytes
    step()
    assert context.guard.host_state.on
    shared.hold(0)
    step()
    assert not context.guard.host_state.on
    assert not context.active_remedies
    assert context.static_bytes == context.device.memory().allocated_bytes > static_bytes
    lifted = of_kind(list(read_events(tmp_path / "events.jsonl")), "remedy_lifted")
    assert [(e["remedy"], e["before"], e["after"]) for e in lifted] == [("optimizer_offload", True, False)]


def test_optimizer_state_that_finds_no_room_stays_on_the_host_and_is_left_there_longer(
    shared: SharedByteCount, squeezed: Squeezed
) -> None:
    context, step = squeezed
    patience_steps = context.budget.patience_steps
    static_bytes = context.static_bytes
    shared.hold(0)
    step(before_growth=lambda: metered(context.device).fail_at(3))
    assert context.guard.host_state.on
    assert context.static_bytes == context.device.memory().allocated_bytes == static_bytes
    assert context.budget.patience_steps == 2 * patience_steps
    step()
    assert not context.guard.host_state.on


def test_a_co_tenant_that_leaves_no_room_at_all_is_named(tmp_path: Path, shared: SharedByteCount) -> None:
    spec = make_spec(even_samples(tmp_path / "samples.jsonl", 40), memory_gib=CAPACITY_GIB)
    with Workshop(spec, tmp_path / "place") as setup:
        shared.hold(setup.context.device.capacity_bytes - setup.context.static_bytes - 2**16)
        with pytest.raises(MemoryExhaustedError, match=r"and 10\d\d\.\d MiB by other processes"):
            StepTransaction(setup.context).run(1, setup.order.step(1))


def test_what_was_learned_is_saved_shown_and_used_again(tmp_path: Path) -> None:
    spec = make_spec(even_samples(tmp_path / "samples.jsonl", 40), memory_gib=0.018, train={"batch_size": 32})
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    assert code == 0
    told = present(learned_memory(place))
    assert told["budget_bytes"] == of_kind(events, "step")[-1]["budget"]
    assert told["slope"] > 0
    shown = CliRunner().invoke(app, ["show", str(place.path), "--json"])
    assert json.loads(shown.stdout)["learned"] == told


def test_a_co_tenant_that_does_not_exist_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="NEIGHBOUR"):
        SharedByteCount.open(tmp_path / "nobody")
