"""A run whose disk is full for a moment waits, whatever it was writing, and goes on."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fork_server
from tests.events import read_events
from tests.faults.failing_disk import FailingDisk, preload
from tests.faults.scenarios import SCENARIOS, Ended

SINGLE = SCENARIOS[0]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingDisk]:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    with pytest.MonkeyPatch.context() as restored:
        for name in ("LD_PRELOAD", "FAILING_DISK"):
            restored.setenv(name, "")
        made = preload(tmp_path_factory.mktemp("disk"))
        with fork_server.other_server():
            yield made


@pytest.fixture(scope="module")
def numbers(disk: FailingDisk, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The last change of each file of an undisturbed run."""
    place = SINGLE.place(tmp_path_factory.mktemp("whole"))
    with disk.failing(place.runs, 0, 0):
        SINGLE.disturbed(place)
    return {f"{site.call} {site.file}": number for number, site in disk.call_sites().items()}


def with_full_disk(disk: FailingDisk, number: int, folder: Path) -> tuple[Ended, list[str]]:
    """A run whose `number`-th change finds no room; how it ended, and the codes of its warnings."""
    place = SINGLE.place(folder)
    with disk.failing(place.runs, number, errno.ENOSPC):
        SINGLE.disturbed(place)
    (run,) = place.found()
    codes = (
        [event["code"] for event in read_events(run.events) if event["kind"] == "warning"]
        if run.events.exists()
        else []
    )
    return place.ended[-1], codes


@pytest.mark.parametrize(
    "what",
    ["write RUN/checkpoints/.best.#.tmp", "rename RUN/model", "mkdir RUN/.model.#",
     "write RUN/checkpoints/.step-#.#/weights/model.safetensors", "write RUN/.host_memory.json.#.tmp"],
)  # fmt: skip
def test_a_run_waits_for_room(what: str, disk: FailingDisk, numbers: dict[str, int], tmp_path: Path) -> None:
    ended, codes = with_full_disk(disk, numbers[what], tmp_path)
    assert disk.what.startswith(what.split()[0]), disk.what
    assert (ended.code, codes.count("disk_full")) == (0, 1), ended


def test_a_record_of_the_engine_that_finds_no_room_is_named(
    disk: FailingDisk, numbers: dict[str, int], tmp_path: Path
) -> None:
    ended, _ = with_full_disk(disk, numbers["write RUN/.engine.json.#.tmp"], tmp_path)
    assert ended.code == 6 and "engine.json cannot be written: No space left" in ended.err and "fix:" in ended.err
