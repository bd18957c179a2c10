"""The state of a run according to its journal, computed by adding one event after the other.

No other module interprets events. The summary of a run, which adds its files and its process, is in
`engine.journal.summary`.

Try: `python -m pytest tests/journal/test_summary.py`
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.journal.event_text import OLD_VERDICTS
from engine.journal.events import Event


@dataclass
class JournalState:
    """The state of a run according to the events so far."""

    step: int = 0
    max_steps: int | None = None
    first_step: Event | None = None
    last_step: Event | None = None
    evals: list[Event] = field(default_factory=list)
    backoffs: list[Event] = field(default_factory=list)
    warnings: list[Event] = field(default_factory=list)
    oom_reports: list[str] = field(default_factory=list)
    predicted: dict[str, Any] = field(default_factory=dict)
    started: str | None = None
    updated: str | None = None
    running: Event | None = None
    finished: Event | None = None
    paused: bool = False
    phase: str = ""
    peak_bytes: int = 0

    def fold(self, event: Event) -> None:
        """Update the state with one event."""
        self.updated = event.get("time", self.updated)
        handler = _FOLDS.get(event["kind"])
        if handler is not None:
            handler(self, event)

    def fold_steps(self, first: Event | None, last: Event) -> None:
        """Update the state with consecutive step events, of which only the first and the last were parsed."""
        if self.first_step is None:
            self.first_step = first or last
        self.fold(last)


def _run_started(state: JournalState, event: Event) -> None:
    state.started = state.started or event.get("time")
    state.running, state.finished = event, None
    state.paused = False


def _stage_started(state: JournalState, event: Event) -> None:
    state.max_steps = event.get("max_steps", state.max_steps)


def _plan(state: JournalState, event: Event) -> None:
    state.predicted = plan_digest(event)


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
    state.oom_reports.append(str(event["path"]))


def _warning(state: JournalState, event: Event) -> None:
    state.warnings.append(event)


def _paused(state: JournalState, _event: Event) -> None:
    state.paused = True


def _resumed(state: JournalState, event: Event) -> None:
    """Discard what happened after the step from which the run is resumed."""
    step = int(event["step"])
    for kept in (state.evals, state.backoffs):
        kept[:] = [earlier for earlier in kept if int(earlier["step"]) <= step]
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
    "plan": _plan,
    "phase": _phase,
    "step": _step,
    "eval": _eval,
    "backoff": _backoff,
    "oom_report": _oom_report,
    "warning": _warning,
    "paused": _paused,
    "resumed": _resumed,
    "run_finished": _run_finished,
}


def plan_digest(plan: dict[str, Any]) -> dict[str, Any]:
    """The predicted figures in a plan (event or `plan.json`) that are later compared with measured ones."""
    predicted = plan.get("predicted")
    inner = predicted if isinstance(predicted, dict) else {"peak_bytes": predicted} if predicted is not None else {}
    keys = ("peak_bytes", "capacity_bytes", "verdict", "deciding_phase", "components")
    digest = {**inner, **{key: plan[key] for key in keys if plan.get(key) is not None}}
    if "verdict" in digest:
        digest["verdict"] = OLD_VERDICTS.get(digest["verdict"], digest["verdict"])
    return digest
