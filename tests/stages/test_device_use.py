"""Before a stage: processes of this run must have released the devices, those of others are told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from engine.config.load import resolve
from engine.device.base import GpuProcess, GpuReading
from engine.errors import EnvironmentProblem
from engine.extras.stages import create_stage
from engine.extras.stages.create_stage import read_device_use, wait_until_released
from engine.journal.directory import RunDirectory

SPEC = resolve("24gb", "lora").spec
Start = Callable[..., "subprocess.Popen[bytes]"]
Holds = Callable[..., None]


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> Holds:
    """Lets the driver report that a process, while it lives, holds 3 GiB of the second GPU, which CUDA sees first. It
    may be told to end at the driver's third reading."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    monkeypatch.setattr(create_stage, "LONGEST_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(create_stage, "POLL_SECONDS", 0.05)

    def report(process: subprocess.Popen[bytes], ends: bool = False) -> None:
        asked = count(1)

        def readings() -> list[GpuReading]:
            if ends and next(asked) == 3:
                process.kill()
                process.wait()
            held = (GpuProcess(process.pid, 3 << 30, "python"),) if process.poll() is None else ()
            used = 3 << 30 if held else 0
            return [GpuReading(0, "a card", "GPU-a", 24 << 30, 5 << 30, None, None, None, ()),
                    GpuReading(1, "a card", "GPU-b", 24 << 30, used, None, None, None, held)]  # fmt: skip

        monkeypatch.setattr(create_stage, "read_gpus", readings)

    return report


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that sleep, with further words on their command line. Each has said a line when it is returned:
    before, while the kernel still loads the program, its command line may be read as empty."""
    started: list[subprocess.Popen[bytes]] = []

    def sleeping(*words: str) -> subprocess.Popen[bytes]:
        code = "import time; print(flush=True); time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline()
        return process

    yield sleeping
    for process in started:
        process.kill()
        process.communicate()


def test_memory_of_the_stage_before_is_waited_for(tmp_path: Path, holds: Holds, start: Start) -> None:
    run = RunDirectory(tmp_path / "run")
    holds(start("_engine", f"{run.path}/stages/01-a"), ends=True)
    assert read_device_use(SPEC).used_bytes == 3 << 30
    assert wait_until_released(SPEC, run).used_bytes == 0


def test_a_process_of_this_run_that_stays_is_named_with_what_ends_it(
    tmp_path: Path, holds: Holds, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create_stage, "LONGEST_WAIT_SECONDS", 0.3)
    run = RunDirectory(tmp_path / "run")
    engine = start("_engine", f"{run.path}/stages/01-a")
    holds(engine)
    with pytest.raises(EnvironmentProblem, match=f"still hold memory on the device: {engine.pid}") as caught:
        wait_until_released(SPEC, run)
    assert caught.value.exit_code == 6
    assert caught.value.fix == f"end them with: kill -9 {engine.pid}, then: tunedeck resume run"
    subprocess.run(["kill", "-9", str(engine.pid)], check=True)
    engine.wait()
    assert wait_until_released(SPEC, run).used_bytes == 0


def test_a_process_of_somebody_else_is_told_and_not_waited_for(tmp_path: Path, holds: Holds, start: Start) -> None:
    other = start("_engine", f"{tmp_path}/run-2/stages/01-a")
    holds(other)
    use = wait_until_released(SPEC, RunDirectory(tmp_path / "run"))
    assert use.used_bytes == 3 << 30 and [process.pid for process in use.processes] == [other.pid]
