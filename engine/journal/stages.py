"""The run directories of a staged run's stages, `RUN/stages/01-NAME/`, and how their events are copied into the run's
own journal: each once, also when the conductor (`engine.extras.stages.conductor`) was killed in between."""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import UsageError
from engine.journal.directory import RunDirectory
from engine.journal.events import Event, EventTail, EventWriter

STAGE_FOLDER = re.compile(r"^(\d+)-(.+)$")

NOT_COPIED = frozenset({"run_started", "run_finished", "heartbeat"})
"""Events for which the run has its own: stage_started and stage_finished, and heartbeats."""


class StageDirectory(RunDirectory):
    """A stage's run directory, found inside its run's wherever that is."""

    def __init__(self, run: RunDirectory, folder: str) -> None:
        object.__setattr__(self, "_run", run)
        object.__setattr__(self, "_folder", folder)

    @property
    def path(self) -> Path:
        run: RunDirectory = vars(self)["_run"]
        return run.stages / str(vars(self)["_folder"])


def stage_directory(run: RunDirectory, number: int, name: str) -> RunDirectory:
    """Stages are numbered from 1."""
    return StageDirectory(run, f"{number:02d}-{name}")


def stage_directories(run: RunDirectory) -> list[RunDirectory]:
    """Stages that have begun, in order; empty for a run without stages."""
    if not run.stages.is_dir():
        return []
    found = sorted(path for path in run.stages.iterdir() if STAGE_FOLDER.match(path.name))
    return [directory for path in found if (directory := RunDirectory(path)).exists()]


def stage_name(directory: RunDirectory) -> str:
    matched = STAGE_FOLDER.match(directory.name)
    return matched[2] if matched else directory.name


def typed_name(directory: RunDirectory) -> str:
    """As commands find it: the name of a run's directory, and RUN/STAGE for a stage."""
    run = directory.path.parent.parent
    is_stage = STAGE_FOLDER.match(directory.name) and directory.path.parent == RunDirectory(run).stages
    return f"{run.name}/{stage_name(directory)}" if is_stage else directory.name


def find_stage(run: RunDirectory, name: str) -> RunDirectory | None:
    """None if the run has no such stage, or it has not begun."""
    return next((stage for stage in stage_directories(run) if name in (stage.name, stage_name(stage))), None)


def result_run(run: RunDirectory) -> RunDirectory:
    """Where a run's result is: for a staged run that has begun, its last enabled training stage, else `run`. Raises
    UsageError where that stage has not begun."""
    if not run.stages.is_dir():
        return run
    # Imported here: the rules of run specs take longer than a list of runs.
    from engine.config.load import load_run_spec
    from engine.config.stages import last_training_stage

    number, stage = last_training_stage(load_run_spec(run.run_toml).recipe)
    last = stage_directory(run, number, stage.name)
    if not last.exists():
        raise UsageError(
            f"stage {stage.name} of {run.name}, its last stage, has not started",
            expected="a run whose last stage has started, or RUN/STAGE",
            fix=f"tunedeck show {run.name}",
        )
    return last


def copied_so_far(run: RunDirectory) -> dict[str, int]:
    """By stage, the `seq` of its journal's last copied event; 0 for a stage started again from its beginning."""
    copied: dict[str, int] = {}
    for event in EventTail(run.events).poll():
        if "stage_seq" in event:
            copied[event.get("stage", "")] = event["stage_seq"]
        elif event["kind"] == "stage_started" and event.get("from_start"):
            copied[event.get("name", "")] = 0  # the stage was done again from its start, in a new directory
    return copied


class StageJournalCopier:
    def __init__(self, writer: EventWriter, stage: RunDirectory, name: str, copied: int) -> None:
        """`copied`: the `seq` of the stage's last event that the run's journal already has."""
        self._writer, self._name, self._copied, self._stage = writer, name, copied, stage
        self._tail = EventTail(stage.events)
        self._pending: list[Event] = []

    def copy_new(self) -> None:
        """Copy the complete lines since the last call. Raises OSError on a full disk; the next call goes on there."""
        self._tail.path = self._stage.events  # of a run that was moved elsewhere than before
        for event in self._tail.poll():
            if event["seq"] > self._copied and event["kind"] not in NOT_COPIED:
                self._pending.append(event)
        while self._pending:
            self._writer.copy(self._pending[0], self._name)
            self._copied = self._pending.pop(0)["seq"]
