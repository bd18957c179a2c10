"""The state of a run according to its journal, computed by adding one event after the other. No other module interprets
events; `engine.journal.summary` adds the run's files and its process."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from engine.journal.event_schema import is_prediction
from engine.journal.event_text import OLD_VERDICTS
from engine.journal.events import Event

MOST_WARNINGS = 1_000
"""The newest warnings that are kept. All are in events.jsonl."""


@dataclass
class StageState:
    started: Event | None = None
    finished: Event | None = None

    @property
    def status(self) -> str:
        """running, done, failed, stopped, paused or skipped."""
        return str(self.finished["status"]) if self.finished is not None else "running"


@dataclass
class JournalState:
    """The state of a run so far. Of a staged run, step, losses and scores are those of the stage that started last."""

    stages: dict[str, StageState] = field(default_factory=dict)
    """Started or skipped stages by name, in that order."""
    stage: str = ""
    """The stage that started last; "" in the journal of a run without stages."""
    step: int = 0
    max_steps: int | None = None
    first_step: Event | None = None
    last_step: Event | None = None
    evals: list[Event] = field(default_factory=list)
    backoffs: list[Event] = field(default_factory=list)
    warnings: list[Event] = field(default_factory=list)
    weights: list[Event] = field(default_factory=list)
    """What was read of the weight files at the last start, and what is in the files that were written."""
    oom_reports: list[str] = field(default_factory=list)
    predicted: dict[str, Any] = field(default_factory=dict)
    in_force: dict[str, Any] = field(default_factory=dict)
    """What is predicted for the micro-batches that run, as `predicted`, with their `micro_batch` and `reason`."""
    started: str | None = None
    updated: str | None = None
    running: Event | None = None
    earlier_seconds: float = 0.0
    """Seconds of the starts before the one in `running`, each to its last event."""
    finished: Event | None = None
    paused: bool = False
    phase: str = ""
    peak_bytes: int = 0

    @property
    def seconds(self) -> float | None:
        """Seconds from the last start of an engine to its end or, if it has not ended, to the newest event."""
        said = (self.finished or {}).get("seconds")
        if said is not None:
            return float(said)
        if self.running is None or self.updated is None:
            return None
        last = (self.finished or {}).get("time", self.updated)  # merging may come days later
        try:
            began, ended = datetime.fromisoformat(self.running["time"]), datetime.fromisoformat(last)
            return (ended - began).total_seconds()
        except (KeyError, TypeError, ValueError):  # a damaged line: no engine wrote these times
            return None

    def folder_of(self, event: Event) -> str:
        """What paths in an event are relative to, with a slash at its end: empty for the run directory, the stage's
        folder for an event that a stage's engine wrote."""
        stage = self.stages.get(event.get("stage", "")) if "stage_seq" in event else None
        path = stage.started.get("path") if stage is not None and stage.started is not None else None
        return f"{path}/" if path else ""

    def fold(self, event: Event) -> None:
        if event["kind"] == "run_started":
            self.earlier_seconds += self.seconds or 0.0
        self.updated = event.get("time", self.updated)
        handler = _FOLDS.get(event["kind"])
        if handler is not None:
            handler(self, event)

    def fold_steps(self, first: Event | None, last: Event) -> None:
        """Add consecutive step events, of which only these two were parsed."""
        if self.first_step is None:
            self.first_step = first or last
        self.fold(last)


def _run_started(state: JournalState, event: Event) -> None:
    state.started = state.started or event.get("time")
    state.running, state.finished = event, None
    state.weights = []
    state.paused = False


def _stage_started(state: JournalState, event: Event) -> None:
    if "number" not in event:  # written by the engine of a stage, or of a run without stages
        state.max_steps = event.get("max_steps", state.max_steps)
        return
    name = str(event.get("name") or "")
    state.stages[name] = StageState(started=event)
    if name != state.stage or event.get("from_start"):
        state.stage, state.step, state.max_steps = name, 0, None
        state.predicted, state.in_force = {}, {}
        state.first_step = state.last_step = None
        state.evals.clear()


def _stage_finished(state: JournalState, event: Event) -> None:
    state.stages.setdefault(str(event["name"]), StageState()).finished = event
    state.phase = ""


def _plan(state: JournalState, event: Event) -> None:
    state.predicted = plan_digest(event)


def _micro_batch(state: JournalState, event: Event) -> None:
    capacity = {key: state.predicted[key] for key in ("capacity_bytes",) if key in state.predicted}
    state.in_force = {
        **capacity, **plan_digest(event), "micro_batch": int(event["sequences"]),
        "length": int(event["length"]), "reason": str(event["reason"]),
    }  # fmt: skip


def _phase(state: JournalState, event: Event) -> None:
    state.phase = str(event.get("name", ""))


def _step(state: JournalState, event: Event) -> None:
    state.first_step = state.first_step or event
    state.last_step = event
    state.step = int(event["step"])
    state.phase = "training"
    state.peak_bytes = max(state.peak_bytes, int(event.get("peak_bytes") or 0))


def _eval(state: JournalState, event: Event) -> None:
    state.evals.append(event)


def _backoff(state: JournalState, event: Event) -> None:
    state.backoffs.append(event)


def _oom_report(state: JournalState, event: Event) -> None:
    state.oom_reports.append(f"{state.folder_of(event)}{event['path']}")


def _weights(state: JournalState, event: Event) -> None:
    if event["source"] == "merged":  # again, or from another checkpoint, long after the run
        state.weights = [each for each in state.weights if each["source"] != "merged"]
    state.weights.append(event)


def _warning(state: JournalState, event: Event) -> None:
    state.warnings.append(event)
    del state.warnings[:-MOST_WARNINGS]


def _paused(state: JournalState, _event: Event) -> None:
    state.paused = True


def _resumed(state: JournalState, event: Event) -> None:
    """Discard what happened after the step from which the run is resumed."""
    step = int(event["step"])
    for kept in (state.evals, state.backoffs):
        kept[:] = [each for each in kept if each.get("stage") != event.get("stage") or int(each["step"]) <= step]
    state.step = step
    for name in ("first_step", "last_step"):
        earlier = getattr(state, name)
        if earlier is not None and int(earlier["step"]) > step:
            setattr(state, name, None)
    state.finished = None
    state.paused = False


def _run_finished(state: JournalState, event: Event) -> None:
    state.finished = event
    state.phase = ""


_FOLDS = {
    "run_started": _run_started,
    "stage_started": _stage_started,
    "stage_finished": _stage_finished,
    "plan": _plan,
    "micro_batch": _micro_batch,
    "phase": _phase,
    "step": _step,
    "eval": _eval,
    "backoff": _backoff,
    "oom_report": _oom_report,
    "warning": _warning,
    "weights": _weights,
    "paused": _paused,
    "resumed": _resumed,
    "run_finished": _run_finished,
}


def plan_digest(plan: dict[str, Any]) -> dict[str, Any]:
    """The predicted figures in a plan (event or `plan.json`) that are later compared with measured ones; empty if a
    figure is none."""
    if not is_prediction(plan) or not is_prediction(plan.get("predicted")):
        return {}
    predicted = plan.get("predicted")
    inner = predicted if isinstance(predicted, dict) else {"peak_bytes": predicted} if predicted is not None else {}
    keys = ("peak_bytes", "capacity_bytes", "verdict", "deciding_phase", "components")
    digest = {**inner, **{key: plan[key] for key in keys if plan.get(key) is not None}}
    if "verdict" in digest:
        digest["verdict"] = OLD_VERDICTS.get(digest["verdict"], digest["verdict"])
    return digest
