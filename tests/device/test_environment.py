"""The environment variables that CUDA and torch's allocator read only once are set before any module is imported that
starts CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.load import dump_run_spec, resolve
from engine.config.schema.run import RunSpec
from engine.device.cuda import allocator_notices
from engine.extras.jobs.cluster_scripts import Job, slurm_script
from engine.journal.directory import RunDirectory
from engine.launch.environment import device_environment, set_device_environment
from engine.launch.process import start_engine

WANTED = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
EXPANDABLE = "expandable_segments:True"


def cuda_spec(*overrides: str) -> RunSpec:
    return resolve("24gb", "demo", overrides).spec


def test_a_cuda_run_gets_its_variables_and_a_run_in_host_memory_none() -> None:
    assert device_environment(cuda_spec(), {}) == WANTED
    determined = device_environment(cuda_spec("train.deterministic=true"), {})
    assert determined == WANTED | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert device_environment(resolve("demo", "demo", ["train.deterministic=true"]).spec, {}) == {}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_own_values_win(name: str) -> None:
    mine = {name: "max_split_size_mb:64", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    environment = dict(mine)
    set_device_environment(cuda_spec(), environment)
    assert environment == mine


def bitsandbytes_that_reads(folder: Path) -> Path:
    """Write a stand-in for bitsandbytes which, like the real package, makes torch read its allocator's settings at
    import. Returns the file to which the stand-in writes these settings."""
    package, info = folder / "bitsandbytes", folder / "bitsandbytes-0.50.0.dist-info"
    package.mkdir()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.50.0\n")
    read = folder / "read.txt"
    (package / "__init__.py").write_text(
        f"import torch\nopen({str(read)!r}, 'w').write(torch._C._accelerator_getAllocatorSettings())\n"
    )
    return read


def test_the_engine_sets_the_allocator_before_peft_starts_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WANTED, "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    read = bitsandbytes_that_reads(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    place = RunDirectory(tmp_path / "run")
    place.path.mkdir()
    place.run_toml.write_text(dump_run_spec(cuda_spec()), encoding="utf-8")
    start_engine(place).wait()  # ends where it looks for a card
    assert read.read_text() == EXPANDABLE


def test_a_setting_that_came_too_late_is_said() -> None:
    late = (
        "import os, torch; torch._C._accelerator_getAllocatorSettings(); "
        f"os.environ['PYTORCH_CUDA_ALLOC_CONF'] = {EXPANDABLE!r}; "
        f"from engine.device.cuda import allocator_notices; print(allocator_notices({EXPANDABLE!r}))"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.environ["PATH"]}
    finished = subprocess.run(
        [sys.executable, "-P", "-c", late], env=environment, capture_output=True, text=True, check=True
    )
    assert f"uses its defaults, but the profile sets {EXPANDABLE}" in finished.stdout


def test_settings_that_are_in_force_are_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: f"max_split_size_mb:64, {EXPANDABLE}")
    assert allocator_notices(EXPANDABLE) == allocator_notices(None) == []


def test_a_script_exports_them_unless_the_machine_has_its_own() -> None:
    script = slurm_script(Job(cuda_spec(), Path("run.toml"), Path("runs"), "python3", "tunedeck.py"))
    lines = "\n".join(line for line in script.splitlines() if "] || export" in line)
    shown = f"{lines}\nenv"

    def exported(**present: str) -> list[str]:
        shell = subprocess.run(["bash", "-euc", shown], env=present, capture_output=True, text=True, check=True)
        return shell.stdout.splitlines()

    assert {f"{name}={value}" for name, value in WANTED.items()} <= set(exported())
    assert not any(line.startswith("PYTORCH_CUDA") for line in exported(PYTORCH_ALLOC_CONF="max_split_size_mb:64"))
