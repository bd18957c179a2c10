"""MLflow, SwanLab, wandb, trackio and TensorBoard themselves, where they are installed: each event of a resumed run
once, one run in the tracker, and the result's folder by reference."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine.extras.trackers.follow import forward_all, open_tracker, tracked_run
from engine.extras.trackers.tracker import Point
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.forwarding import read_record
from tests.trackers.look_alikes import new_run, write_eval, write_step

Losses = list[tuple[int, float]]


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that was done once to step 3, resumed from step 1, and ended with a result."""
    for variable, value in {
        "WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path), "WANDB_SILENT": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    directory = new_run(tmp_path / "runs", "trackers.result=true", 'trackers.tags=["one"]')
    directory.adapter.mkdir()
    (directory.adapter / "adapter_config.json").write_text("{}")
    with EventWriter(directory) as writer:
        for step in (1, 2, 3):
            write_step(writer, step)
        writer.write("resumed", **{"step": 1, "from": "step-00000001"})
        for step in (2, 3):
            write_step(writer, step)
        write_eval(writer, 3)
        writer.write("run_finished", status="done", exit_code=0, result="adapter", reason="", error=None)
    return directory


@needs("mlflow")
def test_mlflow_has_one_run_with_each_step_once(resumed: RunDirectory) -> None:
    from mlflow.tracking import MlflowClient

    assert forward_all(resumed, "mlflow") == 4
    client = MlflowClient()
    (experiment,) = [each for each in client.search_experiments() if each.name == "tunedeck"]

    def losses() -> Losses:
        (run,) = client.search_runs([experiment.experiment_id])
        return sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/loss"))

    assert losses() == [(1, 1.0), (2, 2.0), (3, 3.0)]
    with EventWriter(resumed) as writer:
        write_step(writer, 4)
    # A process that is killed before it remembers: the store knows the event, and another does not send it again.
    killed = open_tracker(tracked_run(resumed, "mlflow"), "mlflow", read_record(resumed, "mlflow").position)
    killed.forward(Point(9, 1.0, 4, {"train/loss": 4.0}))
    assert forward_all(resumed, "mlflow") == 0
    assert losses() == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["name"] == "demo" and run.data.tags["tags"] == "one"
    assert run.data.tags["result"] == resumed.adapter.as_uri()
    assert all(len(text) <= 500 for text in run.data.params.values())


@needs("mlflow")
def test_mlflow_continues_a_run_that_was_begun_and_not_remembered(resumed: RunDirectory) -> None:
    from mlflow.tracking import MlflowClient

    open_tracker(tracked_run(resumed, "mlflow"), "mlflow", None)
    assert forward_all(resumed, "mlflow") == 4
    client = MlflowClient()
    assert len(client.search_runs([each.experiment_id for each in client.search_experiments()])) == 1


FOLDERS = {"wandb": "wandb/offline-run-*", "swanlab": "run-*"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in FOLDERS])
def test_offline_folders_of_one_id_hold_each_event_once(resumed: RunDirectory, name: str) -> None:
    """In processes of their own, as in a run: both packages hold state between runs."""

    def sync() -> str:
        script = (
            "import sys; from pathlib import Path; from engine.extras.trackers.follow import forward_all;"
            "from engine.journal.directory import RunDirectory;"
            "print('sent', forward_all(RunDirectory(Path(sys.argv[1])), sys.argv[2]))"
        )
        command = [sys.executable, "-c", script, str(resumed.path), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "sent 4" in sync()
    with EventWriter(resumed) as writer:
        write_step(writer, 4)
    assert "sent 1" in sync() and "sent 0" in sync()
    found = sorted(each.name for each in (resumed.trackers / name).glob(FOLDERS[name]))
    own = read_record(resumed, name).position
    assert own is not None and sorted(own["finished"]) == found and len(found) == 3
    assert all(each.endswith(own["id"]) for each in found)


@needs("wandb")
def test_wandb_gets_one_line_of_a_resumed_run_and_a_reference(resumed: RunDirectory) -> None:
    assert forward_all(resumed, "wandb") == 4
    (file,) = (resumed.trackers / "wandb").glob("wandb/offline-run-*/run-*.wandb")
    records = _records_of_wandb(file)
    rows = [{item.nested_key[0]: item.value_json for item in record.history.item} for record in records]
    assert [row["train/global_step"] for row in rows if "train/loss" in row] == ["1", "2", "3"]
    assert any(resumed.adapter.as_uri() in str(record) for record in records)


def _records_of_wandb(file: Path) -> list[Any]:
    """The records of a short file: after a header of 7 bytes, each has its checksum (4 bytes), length (2) and kind (1)
    before it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, found = file.read_bytes(), 7, []
    assert len(data) < 2**15, "longer files are written in blocks"
    while place < len(data):
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        found.append(Record.FromString(data[place + 7 : place + 7 + length]))
        place += 7 + length
    return found


@needs("trackio")
def test_trackio_has_each_step_once(resumed: RunDirectory) -> None:
    assert forward_all(resumed, "trackio") == 4 and forward_all(resumed, "trackio") == 0
    words = ["get", "metric", "--project", "tunedeck", "--run", resumed.name, "--metric", "train/loss", "--json"]
    command = [sys.executable, "-P", "-m", "trackio.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [each["step"] for each in json.loads(done.stdout)["values"]] == [1, 2, 3]


@needs("tensorboard")
def test_tensorboard_shows_each_step_once(resumed: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert forward_all(resumed, "tensorboard") == 6  # it replaces the steps that are done again
    shown = EventAccumulator(str(resumed.trackers / "tensorboard"))
    shown.Reload()
    assert [each.step for each in shown.Scalars("train/loss")] == [1, 2, 3]
    assert "result/text_summary" in shown.Tags()["tensors"]
