"""Non-torch memory that runs measured on a card is used by later plans for such a card, and for no other."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.architecture.lookup import find_architecture
from engine.budget import calibration
from engine.budget.calibration import RUNS_KEPT, CalibrationKey, Residuals, calibration_file, record, residuals_for
from engine.budget.predict.non_torch_memory import FRAGMENTED_SHARE, non_torch_memory
from engine.budget.predict.prediction import Prediction, predict
from engine.cli import app
from engine.config.schema.run import Profile, RunSpec
from engine.train.run.measured import ProbeMemory
from tests.budget.metered_step import run_spec

H100 = CalibrationKey("NVIDIA H100", 9.0, 79.18, "570.1", version("torch"), 1, True)
SEEN = Residuals(context_bytes=640 * 2**20, workspace_bytes=32 * 2**20, fragmented_share=0.05)


def card(**changes: Any) -> dict[str, Any]:
    known = {"kind": "cuda", "memory_gib": 79.1, "compute_capability": 9.0, "allocator": "expandable_segments:True"}
    return known | changes


def profile(**changes: Any) -> Profile:
    return Profile.model_validate({"name": "here", "device": card(**changes)})


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the driver's version file and the state folder by those of this test; return the version file."""
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "state"))
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1  Release Build\n")
    monkeypatch.setattr(calibration, "DRIVER", path)
    calibration._driver_text.cache_clear()
    return path


def planned(spec: RunSpec) -> Prediction:
    return predict(find_architecture(spec), spec, rows=1, length=512)


def test_a_plan_takes_the_residuals_of_this_machine_and_leaves_the_tensors_alone() -> None:
    spec = run_spec("Qwen/Qwen2.5-7B", card())
    before = planned(spec)
    record(H100, SEEN)
    after = planned(spec)
    assert after.phases == before.phases
    beside = {name: after.components[name] for name in ("context", "workspace", "fragmentation")}
    assert beside == {
        "context": SEEN.context_bytes, "workspace": SEEN.workspace_bytes, "fragmentation": int(0.05 * after.peak_bytes)
    }  # fmt: skip
    assert after.device_bytes == after.peak_bytes + sum(beside.values())


@pytest.mark.parametrize(
    "changes",
    [{"compute_capability": 8.0}, {"memory_gib": 47.4}, {"count": 4}, {"allocator": None}, {"kind": "metered"}],
    ids=str,
)
def test_another_device_is_not_calibrated_by_it(changes: dict[str, Any]) -> None:
    record(H100, SEEN)
    assert residuals_for(profile()) == SEEN
    assert residuals_for(profile(**changes)) is None


@pytest.mark.parametrize("change", [{"driver": "580.2"}, {"torch": "2.10.0"}], ids=str)
def test_another_driver_or_torch_is_not_calibrated_by_it(change: dict[str, Any]) -> None:
    record(replace(H100, **change), SEEN)
    assert residuals_for(profile()) is None


def test_of_the_last_runs_the_worst_is_believed() -> None:
    for context in (900, *range(500, 508)):
        record(H100, replace(SEEN, context_bytes=context * 2**20))
    found = residuals_for(profile())
    assert found is not None
    assert found.context_bytes == 507 * 2**20


def test_small_runs_say_nothing_about_fragmentation_and_displace_no_run_that_does() -> None:
    """Regression: a run of 100 MiB that left a few segments of 20 MiB half empty made later plans for 24 GB reserve 4
    GiB for fragmentation."""
    small = ProbeMemory(100 * 2**20, 117 * 2**20).fragmented_share(24 * 2**30)
    assert small is None
    record(H100, replace(SEEN, fragmented_share=small))
    assert non_torch_memory(run_spec("Qwen/Qwen2.5-7B", card())).fragmented_share == FRAGMENTED_SHARE[True]
    record(H100, SEEN)
    for _ in range(2 * RUNS_KEPT):
        record(H100, replace(SEEN, fragmented_share=None))
    assert non_torch_memory(run_spec("Qwen/Qwen2.5-7B", card())).fragmented_share == SEEN.fragmented_share
    assert len(json.loads(calibration_file().read_text())["entries"][0]["runs"]) == RUNS_KEPT + 1


def test_the_share_is_what_was_reserved_at_the_peak() -> None:
    assert ProbeMemory(20 * 2**30, 21 * 2**30).fragmented_share(24 * 2**30) == 0.05
    assert ProbeMemory(20 * 2**30, 19 * 2**30).fragmented_share(24 * 2**30) == 0.0


@pytest.mark.parametrize("text", ["", "{", '{"version": 1, "entries": []}', '{"version": 2, "entries": [{"runs": 3}]}'])
def test_a_damaged_file_is_no_calibration_and_is_written_anew(text: str) -> None:
    calibration_file().parent.mkdir(parents=True, exist_ok=True)
    calibration_file().write_text(text)
    assert residuals_for(profile()) is None
    record(H100, SEEN)
    assert residuals_for(profile()) == SEEN


def test_plan_says_where_its_figures_come_from() -> None:
    def said(name: str) -> str:
        return " ".join(CliRunner().invoke(app, ["plan", "-p", name, "-r", "lora"]).stdout.split())

    assert "typical values" in said("80gb")
    record(H100, SEEN)
    assert "measured by runs on this machine" in said("80gb")
    assert "typical values" in said("24gb")
    assert "context" not in said("demo")
