"""`tunedeck report` tells versions, the spec, the end and the traceback of a run, and nothing of its data."""

from __future__ import annotations

from pathlib import Path

from engine.config.load import dump_run_spec
from engine.journal.directory import create_run_directory
from engine.journal.events import EventWriter
from tests.cli.conftest import Tunedeck
from tests.train.run_helpers import make_spec

LOG = """Traceback (most recent call last):
  File "/home/ann/old.py", line 1
KeyError: 'earlier'
Traceback (most recent call last):
  File "/home/ann/lab/tunedeck/engine/train/run/setup.py", line 78, in set_up
RuntimeError: https://ann:pass123@proxy refuses hf_abcdefghijklmnopqrstuvwxyz
"""


def test_a_report_tells_the_run_and_not_its_data(tunedeck: Tunedeck, tmp_path: Path) -> None:
    secret = tmp_path / "patients" / "ward-7.jsonl"
    spec = make_spec(secret, eval={"prompts": ["who is ill"]}, data={"valid_fraction": 0.1})
    changes = [f"data.sources.main.path={secret}", "data.validation.main.path=beds/ward-7.csv"]
    spec = spec.model_copy(update={"provenance": spec.provenance.model_copy(update={"set_": changes})})
    run = create_run_directory(tmp_path / "runs", "one", dump_run_spec(spec), {})
    with EventWriter(run) as writer:
        writer.write("eval", step=1, metrics={"loss": 1.0}, samples=[{"prompt": "who is ill"}])
        writer.write("warning", code="disk", text=f"no room for {tmp_path}/runs/one", fix="")
    run.log.write_text(LOG)
    told = tunedeck("report", run.name)
    assert told.code == 0
    assert "- torch: " in told.out and "[recipe.train]" in told.out and "1 eval, 1 warning" in told.out
    assert 'set = ["data.sources.main.path=(left out)"' in told.out
    assert "path = (left out)" in told.out and "setup.py" in told.out and "line 78" in told.out
    for hidden in ("ward-7", "patients", "ann", "pass123", "hf_abc", "who is ill", "earlier", str(tmp_path)):
        assert hidden not in told.out, hidden


def test_a_report_is_written_once(tunedeck: Tunedeck, tmp_path: Path) -> None:
    assert tunedeck("report", "--out", "bug.md").code == 0
    assert "## This machine" in (tmp_path / "bug.md").read_text()
    again = tunedeck("report", "--out", "bug.md")
    assert again.code == 2 and "already exists" in again.err
