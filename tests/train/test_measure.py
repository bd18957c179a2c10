"""At its end a run compares measured memory with the prediction, and names the component that differs most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.journal.directory import RunDirectory
from engine.train.run.measured import prediction_error
from tests.budget.metered_step import QWEN2, folder_of
from tests.present import present
from tests.train.run_helpers import Event, make_spec, new_run, of_kind, train, write_samples


def finished(tmp_path: Path, **tables: Any) -> tuple[RunDirectory, list[Event], dict[str, Any]]:
    place = new_run(tmp_path / "runs", make_spec(write_samples(tmp_path / "samples.jsonl"), **tables))
    code, events = train(place)
    assert code == 0
    return place, events, of_kind(events, "run_finished")[0]["measured"]


LORA, OFFLOADED = {"method": {"kind": "lora", "rank": 8}}, {"train": {"optimizer_offload": True}}


@pytest.mark.parametrize("tables", [{}, LORA, OFFLOADED], ids=["full", "lora", "offloaded"])
def test_the_prediction_for_what_ran_is_within_two_per_cent(tmp_path: Path, tables: dict[str, Any]) -> None:
    place, events, measured = finished(tmp_path, **tables)
    assert measured["predicted"]["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.02)
    (running,) = of_kind(events, "micro_batch")
    assert (running["sequences"], running["reason"]) == (of_kind(events, "plan")[0]["micro_batch"], "as planned")
    assert running["predicted"]["peak_bytes"] >= 0.98 * measured["predicted"]["peak_bytes"]
    for side in (measured, measured["predicted"]):
        assert sum(side["components"].values()) == side["peak_bytes"]
    assert measured["predicted"]["components"].keys() == measured["components"].keys()
    assert not any(event["code"] == "prediction_missed" for event in of_kind(events, "warning"))
    shown = CliRunner().invoke(app, ["show", str(place.path)]).stdout
    assert f"for {measured['sequences']} × {measured['length']} tokens" in shown


def test_a_loss_over_few_targets_is_compared_with_a_prediction_for_as_many(tmp_path: Path) -> None:
    """A plan counts every token as a target; the loss of this run has the peak, and few of its tokens are targets."""
    samples = tmp_path / "samples.jsonl"
    samples.write_text(32 * ('{"prompt": "%s", "completion": "b"}\n' % ("a" * 60)))
    wide = folder_of({**QWEN2, "vocab_size": 8000}, tmp_path / "model")
    how = {"loss": "plain", "batch_size": 16, "gradient_checkpointing": True}
    code, events = train(new_run(tmp_path / "runs", make_spec(samples, model={"id": str(wide)}, train=how)))
    assert code == 0
    measured = of_kind(events, "run_finished")[0]["measured"]
    assert measured["predicted"]["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.02)
    (planned,) = of_kind(events, "plan")
    assert planned["predicted"]["peak_bytes"] > 1.2 * measured["peak_bytes"]


def test_a_miss_names_the_component_that_is_off_most() -> None:
    components = {"weights": 100 * 2**20, "optimizer": 50 * 2**20, "activations": 50 * 2**20}
    found: dict[str, Any] = {
        "peak_bytes": 200 * 2**20, "components": components, "sequences": 4, "length": 128,
        "predicted": {"peak_bytes": 160 * 2**20, "components": {**components, "optimizer": 10 * 2**20}},
    }  # fmt: skip
    text, _fix = present(prediction_error(found))
    assert "20 % too low" in text
    assert "in optimizer (+40.0 MiB)" in text
    found["predicted"]["peak_bytes"] = 195 * 2**20
    assert prediction_error(found) is None
