"""The summary of a run: status, progress, scores and memory, from its events, its files and its process.

Each refresh reads only new lines. Opening a long run is fast: nearly all of its lines are steps, and of consecutive
steps only the first and the last are parsed.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from engine.errors import EnvironmentProblem, TunedeckError
from engine.journal.checkpoints_on_disk import find_checkpoints
from engine.journal.control import was_requested
from engine.journal.directory import RunDirectory, enabled_stages, nested, read_spec_and_problems
from engine.journal.events import FINAL_STATUSES, Event, EventTail, decode_event
from engine.journal.files import read_table
from engine.journal.journal_state import JournalState, StageState, plan_digest
from engine.journal.kept_reading import FROM_BYTES, Reading, find_reading, keep_reading
from engine.journal.liveness import (
    REMOTE_STALE_SECONDS,
    STALE_SECONDS,
    ProcessIdentity,
    ProcessState,
    changed_within,
    engine_process,
    is_claimed,
    is_suspended,
    process_state,
)
from engine.journal.score_groups import BestEvaluation, best_evaluation

STEP_MARK = b'"kind":"step"'
"""A step event, as the writer spells it."""

STEP_LINE = re.compile(
    rb'\{"seq":\d{1,18},"time":"[^"\\]{1,40}","kind":"step","stage":"[^"]*","rank":\d{1,9},"step":\d{1,18},"epoch":'
)
"""How a step's line begins, as the writer spells it. A line spelled differently is parsed in full, with the same
result."""

PEAK = re.compile(rb'"peak_bytes":(\d{1,18})[,}]')
"""The field whose largest value is kept; read from every step line without parsing it."""

QUIET_LINE = re.compile(rb'"kind":"(?:gpu|heartbeat)"')
"""Events of which only the time matters, so that only the newest is parsed."""

KIND_WITHIN_BYTES = 120
"""`seq`, `time` and `kind` come first on a line, before this byte."""

SUSPENDED = "suspended by a signal"
"""The phase of a run whose engine is suspended: it lives, and does nothing until SIGCONT."""

SAMPLED = re.compile(rb'"step":(\d{1,18}),"epoch":[^,]*,"loss":([\d.e+-]{1,40}),')
"""Step and loss on a step's line."""

WEIGHT_KEYS = ("source", "path", "files", "tensors", "loaded", "unread", "opened")
"""Fields of the event `weights`."""

MOST_LOSSES = 64
"""Losses that are kept of a run, evenly over its steps: enough for a line of a few cells."""

LATEST_LINES = 64
"""Unparsed step lines that are kept: if the last one is no event, the one before it counts."""

LINES_PER_CLOCK_CHECK = 512
"""About a millisecond's worth."""


@dataclass
class RunSummary:
    """The summary of a run at one moment; None means that a value is unknown, or not known yet."""

    run: str
    path: str
    name: str
    status: str
    step: int
    max_steps: int | None
    metrics: dict[str, Any]
    best: BestEvaluation | None
    """Inside training, by checkpoint.best_metric; of a staged run, in the stage that started last."""
    backoffs: int
    samples_lost: int
    predicted: dict[str, Any]
    in_force: dict[str, Any]
    """What is predicted for the micro-batches that run, with their number and its reason; empty before the probe."""
    measured: dict[str, Any]
    result: Any
    started: str | None
    updated: str | None
    seconds: float | None
    """Seconds from the last start of an engine to its end or the newest event."""
    total_seconds: float | None
    """Seconds of all starts together."""
    reason: str
    """Why the run ended, where recorded: early stopping, a request, or --max-hours."""
    last_error: str | None
    exit_code: int | None
    model: str
    profile: str
    recipe: str
    simulated: bool
    on_plain_cpu: bool
    """Memory is measured of the whole process, while a plan counts tensors."""
    phase: str
    checkpoints: list[int]
    """Steps of the checkpoints on disk."""
    oom_reports: list[str]
    warnings: list[dict[str, Any]]
    stages: list[dict[str, Any]]
    """Name, status, number, steps, peak and result of each stage that has begun or was skipped."""
    damaged_lines: int
    """Lines of events.jsonl that are no events, and were left out."""
    problems: list[str]
    """What else in the run's files could not be read, as sentences."""
    stopping: bool
    """A stop was requested and the engine has not ended yet."""
    sweep: str
    """The id of the sweep to which the run belongs; empty if it belongs to none."""
    overrides: list[str]
    """Settings that were changed with --set or in the console, as KEY=VALUE."""
    enabled_stages: list[str]
    """Empty for a run without stages."""
    weights: list[dict[str, Any]] = field(default_factory=list)
    """What was read of the weight files of base and adapter at the last start, and what is in the result: the events
    `weights`."""
    losses: list[float] = field(default_factory=list)
    """Training losses, evenly over the steps; at most MOST_LOSSES."""


@dataclass
class _UnparsedLines:
    """The first and the last of consecutive step events, and the newest `gpu` or `heartbeat` event after them, of which
    only the time matters."""

    first: bytes | None = None
    latest: deque[bytes] = field(default_factory=lambda: deque(maxlen=LATEST_LINES))
    quiet: bytes | None = None


class SummaryReader:
    """Follows one run; each `refresh` reads only the new lines."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.state = JournalState()
        self._tail = EventTail(directory.events)
        self._damaged = 0
        self._unread = ""
        """Why the journal cannot be read; empty if it can."""
        self._losses: list[tuple[int, float]] = []
        """Steps and losses, of every `_stride`-th step line."""
        self._stride, self._lines = 1, 0
        self._kept_offset = -1
        """Up to where the reading is kept for later processes; -1 before the first read."""

    def refresh(self) -> RunSummary:
        """Read all new lines; no file is written."""
        self.read()
        return self.summary()

    def summary(self) -> RunSummary:
        """Later lines may change any value."""
        summary = summarise_state(self.directory, self.state, self._damaged, self._unread)
        summary.losses = [loss for _, loss in self._losses]
        return summary

    def read(self, *, seconds: float = math.inf) -> bool:
        """Read new lines for about `seconds`; returns whether all were read. A million steps take about a second."""
        deadline = time.monotonic() + seconds
        unparsed = _UnparsedLines()
        over = True
        self._unread = ""
        if self._kept_offset < 0:
            self._go_on_from_kept()
        try:
            for count, line in enumerate(self._tail.lines(), 1):
                self._take(line, unparsed)
                if count % LINES_PER_CLOCK_CHECK == 0 and time.monotonic() > deadline:
                    over = False
                    break
        except OSError as error:
            self._unread = f"events.jsonl cannot be read: {error.strerror or error}"
        self._close(unparsed)
        if over and self._tail.offset - self._kept_offset >= FROM_BYTES:
            self._keep()
        return over

    def _go_on_from_kept(self) -> None:
        reading = find_reading(self.directory.events)
        self._kept_offset = 0
        if reading is not None:
            self._tail.offset = self._kept_offset = reading.offset
            self.state, self._damaged, self._losses = reading.state, reading.damaged, reading.losses
            self._stride, self._lines = reading.stride, reading.lines

    def _keep(self) -> None:
        self._kept_offset = self._tail.offset
        reading = Reading(self._tail.offset, self.state, self._damaged, self._losses, self._stride, self._lines)
        keep_reading(self.directory.events, reading)

    def _take(self, line: bytes, unparsed: _UnparsedLines) -> None:
        if STEP_LINE.match(line) and line.endswith(b"}\n"):
            unparsed.first, unparsed.quiet = unparsed.first or line, None
            unparsed.latest.append(line)
            self._sample_loss(line)
            peak = PEAK.search(line, KIND_WITHIN_BYTES)
            if peak is not None and (found := int(peak[1])) > self.state.peak_bytes:
                self.state.peak_bytes = found
            return
        unparsed.quiet = line if QUIET_LINE.search(line, 0, KIND_WITHIN_BYTES) else None
        if unparsed.quiet is not None:
            return
        event = decode_event(line)
        if event is None:
            self._damaged += 1
            return
        if event["kind"] in _STEP_BOUND:
            self._fold_steps(unparsed)
        if event["kind"] == "resumed":
            self._losses = [found for found in self._losses if found[0] <= int(event["step"])]
        if (
            event["kind"] == "stage_started"
            and "number" in event
            and (event.get("name") != self.state.stage or event.get("from_start"))
        ):
            self._losses, self._stride, self._lines = [], 1, 0
        self.state.fold(event)
        if event["kind"] == "eval":
            for old in self.state.evals[-2:-1]:
                old.pop("samples", None)  # only those of the last evaluation are shown

    def _sample_loss(self, line: bytes) -> None:
        """Keep the loss of every `_stride`-th step; where there are too many, of every second one of these."""
        self._lines += 1
        if self._lines % self._stride:
            return
        found = SAMPLED.search(line)
        if found is None:
            return
        try:
            self._losses.append((int(found[1]), float(found[2])))
        except ValueError:
            return  # no number: a damaged line, which is counted where it is parsed
        if len(self._losses) >= MOST_LOSSES:
            self._losses, self._stride = self._losses[1::2], 2 * self._stride

    def _close(self, unparsed: _UnparsedLines) -> None:
        self._fold_steps(unparsed)
        if unparsed.quiet is None:
            return
        event = decode_event(unparsed.quiet)
        self._damaged += event is None
        if event is not None:
            self.state.fold(event)

    def _fold_steps(self, unparsed: _UnparsedLines) -> None:
        first, unparsed.first = unparsed.first, None
        event = None
        while event is None and unparsed.latest:
            event = decode_step(unparsed.latest.pop())
            self._damaged += event is None
        unparsed.latest.clear()
        if event is not None:
            opening = decode_step(first) if first is not None and self.state.first_step is None else None
            self.state.fold_steps(opening, event)


_STEP_BOUND = ("step", "resumed", "run_started", "run_finished", "stage_started", "stage_finished", "phase")
"""Kinds whose meaning depends on earlier steps: unparsed step lines are folded before them."""


def decode_step(line: bytes) -> Event | None:
    """None for a line that is not the event of a step."""
    event = decode_event(line)
    return event if event is not None and event["kind"] == "step" else None


def summarise(directory: RunDirectory) -> RunSummary:
    """No state of the run's files raises an error: `problems` and `damaged_lines` say what could not be read."""
    return SummaryReader(directory).refresh()


def _status(directory: RunDirectory, state: JournalState) -> tuple[str, ProcessIdentity | None, str]:
    """The status (queued, running, paused, the final status that the engine recorded, or stale: the engine is gone, or
    not visible from here, and the run's files have not changed for too long), the recorded engine, and what is wrong
    with that record."""
    engine, problem = None, ""
    try:
        engine = engine_process(directory)
    except (EnvironmentProblem, OSError) as error:
        problem = error.found if isinstance(error, TunedeckError) else f"engine.json cannot be read: {error.strerror}"
    process = "gone" if engine is None else process_state(engine)
    recorded = engine is not None or bool(problem)
    if process == "alive":
        # Also after `run_finished`: an engine holds the device until it ends, and a resumed one may still be loading.
        return "running", engine, problem
    return _without_process(directory, state, process, recorded=recorded), engine, problem


def _without_process(directory: RunDirectory, state: JournalState, process: ProcessState, *, recorded: bool) -> str:
    if state.finished is not None:
        said = str(state.finished.get("status"))
        return said if said in FINAL_STATUSES else "failed"
    if not recorded and state.running is None:
        return "queued"
    if state.paused:
        return "paused"
    # A container sees no process of another one, but their locks.
    limit = STALE_SECONDS if process == "gone" else REMOTE_STALE_SECONDS
    lives = is_claimed(directory) or changed_within(limit, directory.events, directory.engine)
    return "running" if lives else "stale"


def summarise_state(
    directory: RunDirectory, state: JournalState, damaged: int, unread: str = "", *, end: JournalState | None = None
) -> RunSummary:
    """`damaged` is the number of lines that could not be read, `unread` says why no line can. `end`: the state after
    the journal's last events alone, which gives the status while `state` is that of the events before them."""
    finished = state.finished or {}
    spec, spec_problems = read_spec_and_problems(directory)
    status, engine, engine_problem = _status(directory, end or state)
    suspended = status == "running" and engine is not None and is_suspended(engine)
    problems = [found for found in (*spec_problems, engine_problem, unread) if found]
    return RunSummary(
        run=directory.name,
        path=str(directory.path),
        name=str(spec.get("name") or directory.name),
        status=status,
        step=state.step,
        max_steps=state.max_steps,
        metrics=_metrics(state),
        best=_best(state, spec),
        backoffs=len(state.backoffs),
        samples_lost=_samples_lost(state),
        predicted=state.predicted or _predicted_on_disk(directory),
        in_force=state.in_force,
        measured=finished.get("measured") or ({"peak_bytes": state.peak_bytes} if state.peak_bytes else {}),
        result=finished.get("result"),
        started=state.started,
        updated=state.updated,
        seconds=state.seconds,
        total_seconds=_total_seconds(state),
        reason=str(finished.get("reason") or ""),
        last_error=finished.get("error"),
        exit_code=finished.get("exit_code"),
        model=str(nested(spec, "recipe", "model", "id")),
        profile=str(nested(spec, "profile", "name")),
        recipe=str(nested(spec, "recipe", "name")),
        simulated=nested(spec, "profile", "device", "kind") == "metered",
        on_plain_cpu=nested(spec, "profile", "device", "kind") == "cpu",
        phase=SUSPENDED if suspended else state.phase,
        checkpoints=[saved.step for saved in reversed(find_checkpoints(directory.checkpoints))],
        oom_reports=list(state.oom_reports),
        warnings=[{key: event.get(key) for key in ("code", "text", "fix")} for event in state.warnings],
        stages=[_stage_row(name, stage, state) for name, stage in state.stages.items()],
        damaged_lines=damaged,
        problems=problems,
        stopping=state.finished is None and was_requested(directory, "stop"),
        sweep=str(nested(spec, "provenance", "sweep", "id")),
        overrides=list(nested(spec, "provenance", "set")),
        enabled_stages=enabled_stages(spec),
        weights=[{key: event.get(key) for key in WEIGHT_KEYS} for event in state.weights],
    )


def _stage_row(name: str, stage: StageState, state: JournalState) -> dict[str, Any]:
    started, finished = stage.started or {}, stage.finished or {}
    return {
        "name": name,
        "status": stage.status,
        "number": started.get("number") or finished.get("number"),
        "path": started.get("path"),
        "steps": finished.get("steps", state.step if name == state.stage else 0),
        **{key: finished.get(key) for key in ("exit_code", "seconds", "peak_bytes", "result", "reason")},
    }


def _metrics(state: JournalState) -> dict[str, Any]:
    """Latest scores, training loss and speed (tokens per second) by name; `first` has the first scores and loss."""
    metrics: dict[str, Any] = dict(state.evals[-1]["metrics"]) if state.evals else {}
    first: dict[str, Any] = dict(state.evals[0]["metrics"]) if len(state.evals) > 1 else {}
    if state.first_step is not None:
        first["train_loss"] = state.first_step.get("loss")
    if state.last_step is not None:
        metrics["train_loss"] = state.last_step.get("loss")
        metrics["tokens_per_second"] = state.last_step.get("tokens_per_second")
    return {**metrics, "first": first} if metrics or first else {}


def _best(state: JournalState, spec: dict[str, Any]) -> BestEvaluation | None:
    stages = [stage for stage in nested(spec, "recipe", "stages") or () if stage.get("name") == state.stage]
    tables = [*stages, nested(spec, "recipe")]
    metric = next((found for table in tables if (found := nested(table, "checkpoint", "best_metric"))), "loss")
    values = {int(event["step"]): event["metrics"].get(metric) for event in state.evals}
    return best_evaluation(metric, {step: value for step, value in values.items() if isinstance(value, int | float)})


def _total_seconds(state: JournalState) -> float | None:
    return None if state.seconds is None else state.earlier_seconds + state.seconds


def _samples_lost(state: JournalState) -> int:
    """The engine's total if the run has finished, else the sum over its backoff events."""
    total = (state.finished or {}).get("samples_lost")
    return int(total) if total is not None else sum(int(event.get("samples_lost") or 0) for event in state.backoffs)


def _predicted_on_disk(directory: RunDirectory) -> dict[str, Any]:
    try:
        return plan_digest(read_table(directory.plan_json))
    except (OSError, ValueError):
        return {}
