"""A run that resumes with less or more memory, or on another kind of device, learns the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.journal.checkpoints_on_disk import find_checkpoints
from engine.launch.resume_run import change_spec
from tests.train.crash_server import CrashServer, Death
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, train, write_samples

ROOMY, TIGHT = 1.0, 0.0155
TABLES: dict[str, Any] = {
    "train": {"max_steps": 8, "batch_size": 16, "learning_rate": 2e-3, "warmup_steps": 2},
    "checkpoint": {"every_steps": 2, "every_minutes": 0},
}
PROFILE = """\
schema = 1
kind = "profile"
name = "other"
[device]
kind = "{kind}"
memory_gib = {gib}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[CrashServer]:
    with CrashServer() as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """(samples, losses) of a run with enough memory that was not disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    samples = write_samples(folder / "samples.jsonl")
    code, events = train(new_run(folder / "runs", make_spec(samples, memory_gib=ROOMY, **TABLES)))
    assert code == 0
    return samples, losses(events)


@pytest.mark.parametrize(
    "before, after",
    [
        (("metered", ROOMY), ("metered", TIGHT)),
        (("metered", TIGHT), ("metered", ROOMY)),
        (("metered", TIGHT), ("cpu", ROOMY)),
        (("cpu", ROOMY), ("metered", TIGHT)),
    ],
    ids=["less", "more", "metered-to-cpu", "cpu-to-metered"],
)
def test_a_killed_run_goes_on_in_other_memory_and_learns_the_same(
    server: CrashServer,
    undisturbed: tuple[Path, dict[int, float]],
    tmp_path: Path,
    before: tuple[str, float],
    after: tuple[str, float],
) -> None:
    samples, expected = undisturbed
    kind, gib = before
    place = new_run(tmp_path / "runs", make_spec(samples, device=kind, memory_gib=gib, **TABLES))
    assert server.run(place.path, Death(seen="checkpoints/step-00000004"), resume=False).code == -9
    profile = tmp_path / "other.toml"
    profile.write_text(PROFILE.format(kind=after[0], gib=after[1]))
    change_spec(place, [], {}, profile=str(profile))
    code, events = train(place, resume=True)
    assert code == 0, place.log.read_text()
    assert of_kind(events, "resumed")[0]["step"] == 4
    assert losses(events) == pytest.approx(expected, rel=1e-5)
    assert find_checkpoints(place.checkpoints)[0].step == 8
    earlier, later = (
        max(event["micro_batches"] for event in of_kind(events, "step") if (event["step"] <= 4) == first)
        for first in (True, False)
    )
    assert earlier < later if after[1] == TIGHT else earlier > later


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    server: CrashServer, undisturbed: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    samples, expected = undisturbed
    place = new_run(tmp_path / "runs", make_spec(samples, memory_gib=ROOMY, **TABLES))
    assert server.run(place.path, Death(seen="checkpoints/step-00000006"), resume=False).code == -9
    manifest = place.checkpoint(6) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    code, events = train(place, resume=True)
    assert code == 0
    assert ["step-00000006" in event["text"] for event in of_kind(events, "warning")] == [True]
    assert of_kind(events, "resumed")[0]["step"] == 4
    assert losses(events) == expected
