"""The run directories of a staged run's stages, and how their events are copied into the run's own journal.

`RUN/stages/01-NAME/` is an ordinary run directory. The events of a stage are appended to the run's journal by its
conductor (`engine.stages.conductor`), each once, also when the conductor was killed in between.

Try: `ls runs/*/stages`, `tunedeck log last/NAME`
"""

from __future__ import annotations

import re

from engine.errors import UsageError
from engine.journal.directory import RunDirectory
from engine.journal.events import Event, EventTail, EventWriter
from engine.spec.load import load_run_spec
from engine.spec.stages import last_training_stage

STAGE_FOLDER = re.compile(r"^(\d+)-(.+)$")
"""NUMBER-NAME, as `stage_directory` makes it."""

NOT_COPIED = frozenset({"run_started", "run_finished", "heartbeat"})
"""Events of a stage for which the run has its own: stage_started and stage_finished, and heartbeats."""


def stage_directory(run: RunDirectory, number: int, name: str) -> RunDirectory:
    """The run directory of a stage, whether it exists or not. Stages are numbered from 1."""
    return RunDirectory(run.stages / f"{number:02d}-{name}")


def stage_directories(run: RunDirectory) -> list[RunDirectory]:
    """The run directories of the stages that have begun, in order; empty for a run without stages."""
    if not run.stages.is_dir():
        return []
    found = sorted(path for path in run.stages.iterdir() if STAGE_FOLDER.match(path.name))
    return [directory for path in found if (directory := RunDirectory(path)).exists()]


def stage_name(directory: RunDirectory) -> str:
    """The stage's name, from the name of its run directory."""
    matched = STAGE_FOLDER.match(directory.name)
    return matched[2] if matched else directory.name


def find_stage(run: RunDirectory, name: str) -> RunDirectory | None:
    """The run directory of the stage `name`; None if the run has no such stage, or it has not begun."""
    return next((stage for stage in stage_directories(run) if name in (stage.name, stage_name(stage))), None)


def result_run(run: RunDirectory) -> RunDirectory:
    """The run directory that contains a run's result: for a staged run that has begun, the directory of its last
    enabled training stage; else `run`.

    Raises UsageError where that stage has not begun.
    """
    if not run.stages.is_dir():
        return run
    number, stage = last_training_stage(load_run_spec(run.run_toml).recipe)
    last = stage_directory(run, number, stage.name)
    if not last.exists():
        raise UsageError(
            f"stage {stage.name} of {run.name}, the last one, has not begun",
            expected="a run whose last stage has begun, or RUN/STAGE",
            fix=f"tunedeck show {run.name}",
        )
    return last


def copied_so_far(run: RunDirectory) -> dict[str, int]:
    """Maps the name of each stage to the `seq` of the last event in the stage's own journal that was copied into the
    run's journal; 0 for a stage that was started again from its beginning."""
    copied: dict[str, int] = {}
    for event in EventTail(run.events).poll():
        if "stage_seq" in event:
            copied[event["stage"]] = int(event["stage_seq"])
        elif event["kind"] == "stage_started" and event.get("from_start"):
            copied[str(event["name"])] = 0  # the stage was done again from its start, in a new directory
    return copied


class StageJournalCopier:
    """Appends the events of one stage's journal to the run's journal."""

    def __init__(self, writer: EventWriter, stage: RunDirectory, name: str, copied: int) -> None:
        """`copied`: the `seq` of the last event of the stage that the run's journal already has."""
        self._writer, self._name, self._copied = writer, name, copied
        self._tail = EventTail(stage.events)
        self._pending: list[Event] = []

    def copy_new(self) -> None:
        """Copy every complete line that was written since the last call. Raises OSError on a full disk; the next
        call goes on with the line that could not be written."""
        for event in self._tail.poll():
            if event["seq"] > self._copied and event["kind"] not in NOT_COPIED:
                self._pending.append(event)
        while self._pending:
            self._writer.copy(self._pending[0], self._name)
            self._copied = self._pending.pop(0)["seq"]
