"""What an attempt that memory ended leaves to the next one. Only DeepSpeed's leave any; every run takes it over."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.batching.micro_batches import MicroBatch
from engine.device.oom import OutOfMemory
from engine.distributed.deepspeed import EndedByMemoryError
from engine.journal.directory import RunDirectory
from engine.train.recovery.consensus import Struck
from engine.train.recovery.ladder import Remedy
from engine.train.recovery.lesson import learn, lesson_of, noting
from tests.train.harness import Workshop, make_spec, of_kind, write_samples

STEP = 5
STRUCK = Struck(1, OutOfMemory("device", 4096, "no room", "backward", 10, 10), MicroBatch((0, 1), 40, 1000), 2**20, 0)


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "samples.jsonl")


def fail_once(samples: Path, folder: Path) -> tuple[RunDirectory, int]:
    """An attempt that halves its budget, recomputes activations and ends; the run's folder and that budget."""
    with Workshop(make_spec(samples, train={"gradient_checkpointing": False}), folder) as bench:
        knowledge = bench.parts.knowledge
        knowledge.budget.budget_bytes //= 2
        knowledge.loaded.set_checkpointing(True)
        lesson = lesson_of(STEP, STRUCK, Remedy("checkpointing", False, True), knowledge)
        place = RunDirectory(folder)
        with pytest.raises(EndedByMemoryError), noting(place, bench):
            raise EndedByMemoryError("memory ran out", lesson)
        return place, knowledge.budget.budget_bytes


def test_the_next_attempt_starts_with_what_was_learned(samples: Path, tmp_path: Path) -> None:
    place, budget_bytes = fail_once(samples, tmp_path / "run")
    with Workshop(make_spec(samples, train={"gradient_checkpointing": False}), place.path) as bench:
        assert bench.parts.budget.budget_bytes != budget_bytes
        learn(place, bench, STEP - 1)
        assert bench.parts.budget.budget_bytes == budget_bytes
        assert bench.parts.loaded.checkpointing


def test_the_failure_is_written_into_the_journal_once(samples: Path, tmp_path: Path) -> None:
    place, _ = fail_once(samples, tmp_path / "run")
    for _ in range(2):
        shop = Workshop(make_spec(samples, train={"gradient_checkpointing": False}), place.path)
        with shop as bench:
            learn(place, bench, STEP - 1)
    (told,) = of_kind(shop.events(), "backoff")
    assert (told["step"], told["failed_rank"], told["phase"], told["remedy"]) == (STEP, 1, "backward", "checkpointing")
    assert told["requested_bytes"] == 4096


@pytest.mark.parametrize(
    ("step", "memory_gib"), [(STEP, 8.0), (STEP - 1, 4.0)], ids=["checkpoint knows", "other memory"]
)
def test_what_a_checkpoint_knows_or_another_device_showed_is_forgotten(
    step: int, memory_gib: float, samples: Path, tmp_path: Path
) -> None:
    place, _ = fail_once(samples, tmp_path / "run")
    spec = make_spec(samples, memory_gib=memory_gib, train={"gradient_checkpointing": False})
    with Workshop(spec, place.path) as bench:
        before = bench.parts.knowledge.as_json()
        learn(place, bench, step)
        assert bench.parts.knowledge.as_json() == before
    assert not place.lesson.exists()
