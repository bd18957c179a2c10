"""The benchmark suites for a real card, run at a small size on the metered device: each measures what it claims to
measure, without a network, with the packages of the `cuda` extra or stand-ins for them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import gpu_kit
from benchmarks.gpu import _own_folder
from benchmarks.gpu_runs import DriverMemory, Measurement, SuiteDevice, engines_in
from benchmarks.gpu_suites import SUITES, measurements_of
from engine.architecture.lookup import find_config
from engine.device.base import GpuProcess, GpuReading
from engine.model.config import load_config
from engine.model.reference import StartingWeights
from tests.fork_server import other_server

ROOT = Path(__file__).resolve().parent.parent
LOOK_ALIKES = ROOT / "tests" / "look_alikes"
CARD = SuiteDevice("cuda", "a card", 139.8, 9.0, "GPU-1")


@pytest.fixture(scope="module")
def without_network() -> Iterator[None]:
    """Let the processes of a test reach no network, and find the packages of the `cuda` extra or stand-ins for them."""
    folders = [LOOK_ALIKES / "no_network", ROOT]
    if importlib.util.find_spec("bitsandbytes") is None:
        folders.append(LOOK_ALIKES / "cuda_extra")
    with pytest.MonkeyPatch.context() as changed, other_server():
        changed.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
        yield


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the suites on the metered device."""
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments, "--device", "metered"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


MEASURED = {
    "smoke": "said", "budget": "error_percent", "backoff": "samples_lost", "edge": "largest_sequences",
    "speed": "said",
}  # fmt: skip
"""For each suite a key of its results."""


def test_every_suite_is_run_here() -> None:
    assert set(MEASURED) == set(SUITES)


@pytest.mark.usefixtures("without_network")
@pytest.mark.parametrize(("suite", "key"), MEASURED.items())
def test_every_cell_of_a_suite_is_measured_kept_and_shown(suite: str, key: str, tmp_path: Path) -> None:
    done = gpu(suite, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    names = [measurement.name for measurement in measurements_of(suite, SuiteDevice.of("metered"))]
    for name in names:
        found = json.loads((tmp_path / suite / f"{name}.json").read_text())
        assert found["ok"] and key in found, found
    assert "simulated device" in done.stdout.splitlines()[0]
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [["ok", name] for name in names]
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert machine["simulated"] and machine["torch"]
    # What a suite leaves behind: no process, no weights.
    assert not list(engines_in(tmp_path)) and not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.usefixtures("without_network")
def test_a_suite_that_was_interrupted_shows_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "lora-bfloat16.json").write_text('{"ok": false, "error": "Traceback\\nRuntimeError: no"}')
    done = gpu("smoke", "--out", str(tmp_path), "--limit", "0")
    assert done.returncode == 1
    assert "WRONG  lora-bfloat16" in done.stdout and "RuntimeError: no" in done.stdout
    assert done.stdout.count("not run yet") == len(done.stdout.splitlines()) - 2


def test_an_engine_is_not_left_on_the_card_when_its_measurement_runs_out_of_time(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "smoke" / "cell"
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    other = subprocess.Popen([*sleeping, "_engine", str(tmp_path / "runs" / "smoke" / "cell-2" / "run")])
    editor = subprocess.Popen([*sleeping, str(folder / "run" / "engine.log")])
    with pytest.raises(subprocess.TimeoutExpired), _own_folder(folder):
        # In a session of its own, as the engine is: it is no child of the process that is killed with its group.
        engine = subprocess.Popen([*sleeping, "_engine", str(folder / "run")], start_new_session=True)
        raise subprocess.TimeoutExpired("a measurement", 1.0)
    assert not psutil.pid_exists(engine.pid)
    assert other.poll() is None and editor.poll() is None
    for process in (other, editor):
        process.kill()
        process.wait()


def case_of(cell: Measurement) -> Any:
    """The case that a measurement's function is called with."""
    assert isinstance(cell.run, partial)
    return cell.run.args[0]


def test_on_a_card_the_models_are_of_their_real_size_and_come_from_no_hub(tmp_path: Path) -> None:
    cells = [cell for suite in SUITES if suite != "speed" for cell in measurements_of(suite, CARD)]
    cases = [case_of(cell) for cell in cells]
    assert len(cases) > 40
    for model in sorted({case.model for case in cases}):
        folder = tmp_path / model.replace("/", "--")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(find_config(model)))
        config = load_config(StartingWeights(str(folder), None, None), trust_remote_code=False)
        assert config.get_text_config().hidden_size == find_config(model)["hidden_size"]


def test_a_case_starts_as_it_is_written_even_where_the_plan_says_that_it_does_not_fit(tmp_path: Path) -> None:
    cell = next(cell for cell in measurements_of("backoff", CARD) if cell.name == "lora-24gb")
    case = case_of(cell)
    spec = case.spec(CARD, tmp_path, 24.0, micro_batch=64)
    assert spec.limits.as_written and spec.recipe.train.micro_batch == 64
    assert Path(spec.recipe.model.id) == tmp_path / "model"


@pytest.mark.parametrize("visible", [True, False])
def test_the_driver_s_count_is_of_the_run_s_own_process(visible: bool) -> None:
    def reading(total_bytes: int, own_bytes: int) -> GpuReading:
        processes = (GpuProcess(7, 900, "another"), GpuProcess(42, own_bytes, "python")) if visible else ()
        return GpuReading(0, "a card", "GPU-1", 10_000, total_bytes, None, None, None, processes)

    # Another process holds 900 bytes of the card all the time, the run up to 500, and the driver 10.
    readings = iter([reading(910, 0), reading(1310, 400), reading(1410, 500), reading(1210, 300)])
    driver = DriverMemory("GPU-1", lambda _uuids: [next(readings)])
    for _ in range(3):
        driver.look(42)
    assert driver.used_bytes == 500


def test_the_kit_carries_one_cuda_library_and_a_script_that_bash_reads(tmp_path: Path) -> None:
    wheel, libraries = tmp_path / "bitsandbytes-1-py3-none-any.whl", ("cuda118", "cuda130", "cpu", "rocm70")
    names = ["bitsandbytes/__init__.py", *(f"bitsandbytes/libbitsandbytes_{each}.so" for each in libraries)]
    record = "bitsandbytes-1.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as whole:
        for name in names:
            whole.writestr(name, "content")
        whole.writestr(record, "".join(f"{name},sha256=x,7\n" for name in names))
    gpu_kit.without_other_libraries(wheel)
    kept = [names[0], names[2], names[3]]
    with zipfile.ZipFile(wheel) as smaller:
        assert smaller.namelist() == [*kept, record]
        assert [line.partition(",")[0] for line in smaller.read(record).decode().splitlines()] == kept
    subprocess.run(["bash", "-n"], input=gpu_kit.SCRIPT, text=True, check=True)


def test_the_kit_s_wheels_are_of_the_versions_that_are_tested_here() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text("utf-8").split()}
    assert {"transformers", "peft", "trl", "liger-kernel", "datasets"} <= pinned & set(gpu_kit.WHEELS)
