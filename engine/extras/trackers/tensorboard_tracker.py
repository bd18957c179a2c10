"""Writes metrics into TensorBoard's event files, in `trackers/tensorboard/` of the run directory.

tensorboard's own EventFileWriter writes in a thread: to forward each event once, the follower must know how many bytes
of each file belong to events that it has remembered.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from engine.extras.trackers.tracker import Point, TrackedRun

FILE_PREFIX = "events.out.tfevents"
"""By which TensorBoard recognises its files. It reads a folder's files in the order of their names."""


class TensorBoardTracker:
    """Each process that follows the run begins a new event file in the folder of `run`."""

    last_seq: int | None = None
    replaces_steps = True

    def __init__(self, run: TrackedRun, position: dict[str, Any] | None) -> None:
        """`position` is {file name: size in bytes}. What is beyond these sizes or not named, a killed process wrote
        without remembering it; it is removed (with None, all files are)."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._sizes = dict(position or {})
        _cut_back(run.folder, self._sizes)
        number = len(self._sizes) + 1
        earlier = (int(name.split(".")[3]) for name in self._sizes)
        seconds = max([int(time.time()), *earlier])  # the clock may have been set back since
        name = f"{FILE_PREFIX}.{seconds:010d}.{socket.gethostname()}.{number:05d}"
        self._path = run.folder / name
        self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._make_event = Event
        self._add(time.time(), 0, file_version="brain.Event:2")
        if position is None:
            self._add(time.time(), 0, summary=_text("run", _description(run)))

    def forward(self, point: Point) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.metrics.items()]
        self._add(point.seconds, point.step, summary=Summary(value=values))

    def rewind(self, step: int) -> None:
        """Write the record that makes TensorBoard drop all points after `step`."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(time.time(), step + 1, session_log=SessionLog(status=SessionLog.START))

    def refer_to(self, result: Path) -> None:
        """As a text: TensorBoard has no artifacts."""
        self._add(time.time(), 0, summary=_text("result", f"`{result}`"))

    def position(self) -> dict[str, Any]:
        """Write all metrics to the disk; returns {file name: bytes} for every event file of the run."""
        self._records.flush()
        os.fsync(self._file.fileno())
        self._sizes[self._path.name] = self._file.tell()
        return self._sizes

    def close(self, exit_code: int) -> dict[str, Any]:
        """TensorBoard shows no status of a run: `exit_code` is not used."""
        position = self.position()
        self._records.close()
        return position

    def _add(self, seconds: float, step: int, **content: Any) -> None:
        self._records.write(self._make_event(wall_time=seconds, step=step, **content).SerializeToString())


def _cut_back(folder: Path, sizes: dict[str, int]) -> None:
    """Event files that are not in `sizes` are removed."""
    for path in folder.glob(f"{FILE_PREFIX}.*"):
        if path.name in sizes:
            os.truncate(path, min(sizes[path.name], path.stat().st_size))
        else:
            path.unlink()


def _description(run: TrackedRun) -> str:
    about = {"run": run.name, "group": run.group, "project": run.project, "tags": ", ".join(run.tags)}
    lines = [f"- {name}: {text}" for name, text in about.items() if text]
    return "\n".join([*lines, "", "```json", json.dumps(run.config, indent=2), "```"])


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

    shown_as = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
    tensor = TensorProto(
        dtype="DT_STRING", string_val=[text.encode()], tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    )
    value = Summary.Value(tag=f"{tag}/text_summary", metadata=SummaryMetadata(plugin_data=shown_as), tensor=tensor)
    return Summary(value=[value])
