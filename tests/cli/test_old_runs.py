"""Runs of the first version that was shared (November 2026) open, resume, compare and merge.

`old_runs` holds two of them, made there with `tunedeck train`: LoRA and full fine-tuning of a model of one layer, four
steps. @HERE@ stands for the folder. Losses of two steps more are those of that version's own `resume`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from engine.journal.checkpoints_on_disk import damage, find_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.summary import summarise
from tests.cli.conftest import Tunedeck
from tests.events import read_events

FIXTURE = Path(__file__).parent / "old_runs"
LORA, FULL = "20261123T160452Z-lora", "20261123T160453Z-full"
NEXT_LOSSES = {LORA: [5.721035003662109, 5.561775207519531], FULL: [5.672245025634766, 5.494277000427246]}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The runs folder of a copy; sizes and hashes in its manifests follow the change of the paths."""
    place = tmp_path.resolve()
    shutil.copytree(FIXTURE, place, dirs_exist_ok=True)
    for path in place.rglob("*"):
        if path.suffix in (".toml", ".json", ".jsonl") and "@HERE@" in path.read_text():
            path.write_text(path.read_text().replace("@HERE@", str(place)))
    for manifest in place.rglob("manifest.json"):
        listed = json.loads(manifest.read_text())
        for name in list(listed["files"]):
            file = manifest.parent / name
            if file.exists():
                content = file.read_bytes()
                listed["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            else:  # a model card, which the fixture leaves out
                del listed["files"][name]
        manifest.write_text(json.dumps(listed))
    return place / "runs"


def test_old_runs_are_listed_shown_and_compared(old: Path, tunedeck: Tunedeck) -> None:
    listed = {row["run"]: row for row in json.loads(tunedeck("runs", "--json").out)}
    assert {name: row["status"] for name, row in listed.items()} == {LORA: "done", FULL: "done"}
    assert all(not row["problems"] and not row["damaged_lines"] for row in listed.values())
    assert tunedeck("show", LORA).code == 0
    compared = json.loads(tunedeck("compare", LORA, FULL, "--json").out)
    assert LORA in json.dumps(compared) and FULL in json.dumps(compared)


@pytest.mark.parametrize("name", [LORA, FULL])
def test_an_old_run_resumes_where_its_own_version_would_have_gone_on(name: str, old: Path, tunedeck: Tunedeck) -> None:
    run = RunDirectory(old / name)
    assert [damage(each) for each in find_checkpoints(run.checkpoints)] == [None]
    ended = tunedeck("resume", name, "--set", "train.max_steps=6")
    assert ended.code == 0, ended.err
    losses = {event["step"]: event["loss"] for event in read_events(run.events) if event["kind"] == "step"}
    assert [losses[5], losses[6]] == pytest.approx(NEXT_LOSSES[name], abs=1e-5)
    assert summarise(run).step == 6


def test_an_old_adapter_merges(old: Path, tunedeck: Tunedeck, tmp_path: Path) -> None:
    ended = tunedeck("merge", LORA, "--out", tmp_path / "merged")
    assert ended.code == 0, ended.err
    assert (tmp_path / "merged" / "model.safetensors").is_file()
