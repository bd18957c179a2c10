"""A run's summary as text: the status block of `train` and `watch`, and the rows of `tunedeck show`. Pure functions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.journal.directory import RunDirectory, names_held_out_data
from engine.journal.event_text import (
    clean,
    describe_phase,
    format_bytes,
    format_duration,
    format_number,
    format_score,
    format_share,
    on_one_line,
    ready_at,
)
from engine.journal.events import Event
from engine.journal.journal_state import JournalState
from engine.journal.labels import Labels
from engine.journal.stages import typed_name
from engine.journal.summary import SUSPENDED, RunSummary

ETA_STEPS = 50
"""The time left is estimated from this many steps: enough to be steady, few enough to follow a backoff."""


LONG_SECONDS = 600
"""What takes longer says when it will be ready."""


@dataclass
class Progress:
    title: str
    simulated: bool
    state: JournalState = field(default_factory=JournalState)
    activity: str = "starting"
    capacity_bytes: int | None = None
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=ETA_STEPS))

    def take(self, event: Event) -> None:
        self.state.fold(event)
        kind = event["kind"]
        if kind in ("run_started", "plan"):
            self.capacity_bytes = event.get("capacity_bytes") or self.capacity_bytes
        if kind == "phase":
            self.activity = describe_phase(event)
        elif kind == "step":
            self.activity = "training"
            self._step_seconds.append(float(event.get("step_seconds") or 0.0))
        elif kind == "run_finished":
            self.activity = clean(event["status"])

    def lines(self) -> list[str]:
        """The status block: one line before the first step, two afterwards."""
        head = f"{self.title}: {self.activity}"
        step = self.state.last_step
        if step is None:
            return [head]
        return [f"{head}, {self._position()}", f"  {self._figures(step)}"]

    def line(self) -> str:
        step = self.state.last_step
        return self.lines()[0] if step is None else f"{self._position()}, {self._figures(step)}"

    def _position(self) -> str:
        total = self.state.max_steps
        done = f"step {self.state.step:,}" + (f" of {total:,}" if total else "")
        left = self.seconds_left()
        ready = f", {ready_at(left)}" if left is not None and left >= LONG_SECONDS else ""
        return done + (f", {format_duration(left)} left{ready}" if left is not None else "")

    def _figures(self, step: Event) -> str:
        peak = step.get("peak_bytes")
        memory = format_share(peak, self.capacity_bytes) if self.capacity_bytes and peak else format_bytes(peak)
        margin = f", margin {format_number(step['rewards_margin'])}" if "rewards_margin" in step else ""
        return (
            f"loss {format_number(step.get('loss'))}{margin}, {step.get('tokens_per_second') or 0:,.0f} tokens/s, "
            f"memory {memory}{' (simulated device)' if self.simulated else ''}"
        )

    def seconds_left(self) -> float | None:
        """By the mean of recent steps; None if the total number of steps is unknown, or no step was taken."""
        if not self.state.max_steps or not self._step_seconds:
            return None
        mean = sum(self._step_seconds) / len(self._step_seconds)
        return mean * max(0, self.state.max_steps - self.state.step)


Rows = list[tuple[str, str]]


def result_rows(summary: RunSummary) -> Rows:
    total = f" of {summary.max_steps:,}" if summary.max_steps else ""
    rows = [
        ("run", clean(summary.run)),
        ("status", status_text(summary)),
        *_stage_rows(summary),
        ("steps", f"{summary.step:,}{total}"),
        *_score_rows(summary.metrics),
        ("out of memory", ooms_text(summary)),
        ("samples lost", f"{summary.samples_lost:,}"),
        *_memory_rows(summary),
        *weight_rows(summary.weights),
    ]
    if summary.seconds is not None:
        rows.append(("time", _time_text(summary.seconds, summary.total_seconds)))
    if summary.result:
        rows.append(("result", clean(Path(summary.path) / str(summary.result))))
    return rows


def _time_text(seconds: float, total: float | None) -> str:
    """The time of the last start and, where there were several, of all together."""
    several = total is not None and round(total) > round(seconds)
    return format_duration(seconds) + (f", {format_duration(total or 0)} over all starts" if several else "")


MOST_UNREAD = 3
"""Names of tensors in a row."""


WRITTEN = ("result", "merged", "assembled")
"""Sources of accounts of files that were written; those of the others were read."""


def weight_rows(weights: list[dict[str, Any]]) -> Rows:
    """What was read of the weight files, with the tensors that were not, by reason; what is in those that were written,
    with the copies of the base's tensors."""
    rows: Rows = []
    for account in weights:
        count, written = len(account["files"]), account["source"] in WRITTEN
        loaded = "" if written else f"{account['loaded']:,} of "
        files = f"{account['tensors']:,} tensors in {count:,} file{'s' * (count != 1)}"
        rows.append((f"{'written' if written else 'read'}: {clean(account['source'])}", loaded + files))
        unread = account["unread"]
        for reason in dict.fromkeys(unread.values()):
            names = [clean(name) for name, each in unread.items() if each == reason]
            more = f" and {len(names) - MOST_UNREAD:,} more" if len(names) > MOST_UNREAD else ""
            shown = f"{', '.join(names[:MOST_UNREAD])}{more}: {clean(reason)}"
            rows.append(("  the base's" if written else "  not read", shown))
        if account.get("opened"):
            rows.append(("  opens", clean(account["opened"])))
    return rows


MOST_ANSWERS = 3


def sample_rows(samples: object) -> Rows:
    """The newest generated answers of an evaluation, each beside its reference where there is one."""
    rows: Rows = []
    for sample in samples if isinstance(samples, list) else []:
        if not isinstance(sample, dict) or len(rows) == MOST_ANSWERS:
            continue
        reference = f" (reference {_quoted(sample['reference'])})" if sample.get("reference") is not None else ""
        rows.append(
            (
                "" if rows else "answers",
                f"{_quoted(sample.get('prompt'))} -> {_quoted(sample.get('answer'))}{reference}",
            )
        )
    return rows


MOST_QUOTED = 120


def _quoted(text: object) -> str:
    shown = clean(text or "")
    return repr(shown if len(shown) <= MOST_QUOTED else shown[: MOST_QUOTED - 3] + "...")


def label_rows(labels: Labels) -> Rows:
    """Tags and note, where there are any."""
    rows = [("tags", clean(" ".join(labels.tags)))] if labels.tags else []
    return rows + ([("note", clean(labels.note))] if labels.note else [])


def ooms_text(summary: RunSummary) -> str:
    """How often memory ran out, and whether the run survived it."""
    if not summary.backoffs:
        return "never"
    times = f"{summary.backoffs} time{'s' * (summary.backoffs > 1)}"
    return f"{times}, the last one ended the run" if summary.status == "oom" else f"{times}, survived"


def status_text(summary: RunSummary) -> str:
    """With a note for a simulated device or a suspended engine, and the recorded reason why the run ended, if no error
    tells it."""
    told = bool(summary.reason) and (summary.last_error or "").startswith(summary.reason)
    why = SUSPENDED if summary.phase == SUSPENDED else "" if told else clean(summary.reason)
    reason = f": {why}" if why else ""
    return summary.status + (" (simulated device)" if summary.simulated else "") + reason


def _stage_rows(summary: RunSummary) -> Rows:
    rows = []
    for stage in summary.stages:
        steps = f" at step {stage['steps']:,}" if stage["steps"] else ""
        peak = f", peak {format_bytes(stage['peak_bytes'])}" if stage["peak_bytes"] else ""
        reason = f": {clean(stage['reason'])}" if stage["reason"] else ""
        rows.append((f"stage {clean(stage['name'])}", f"{stage['status']}{steps}{peak}{reason}"))
    return rows


def _score_rows(metrics: dict[str, Any]) -> Rows:
    first, rows = metrics.get("first", {}), []
    if "train_loss" in metrics:
        rows.append(("loss", f"{format_number(first.get('train_loss'))} -> {format_number(metrics['train_loss'])}"))
    for name, value in metrics.items():
        if name not in ("train_loss", "tokens_per_second", "first"):
            label = {"loss": "validation loss"}.get(name, clean(name).replace("_", " "))
            before = f"{format_score(name, first[name])} -> " if name in first else ""
            rows.append((label, before + format_score(name, value)))
    return rows


def _memory_rows(summary: RunSummary) -> Rows:
    measured, runs = summary.measured.get("peak_bytes"), summary.in_force
    # Of several stages the peak is the highest, the prediction that of the last.
    planned = None if len(summary.stages) > 1 else (runs or summary.predicted).get("peak_bytes")
    capacity = summary.predicted.get("capacity_bytes")
    if measured is None:
        return []
    text = format_share(measured, capacity) if capacity else format_bytes(measured)
    if summary.on_plain_cpu:
        return [("peak memory", f"{text}, of the whole process; a plan only counts tensors")]
    predicted = summary.measured.get("predicted")
    if predicted and len(summary.stages) < 2:
        shape = f"{summary.measured['sequences']} × {summary.measured['length']} tokens"
        return [("peak memory", f"{text}, predicted {format_bytes(predicted.get('peak_bytes'))} for {shape}")]
    number = f" for micro-batch {runs['micro_batch']}" if runs else ""
    return [("peak memory", text + (f", predicted {format_bytes(planned)}{number}" if planned else ""))]


def detail_rows(summary: RunSummary) -> Rows:
    """What only `tunedeck show` prints: names, memory by component, warnings, the error and the folder."""
    rows = [("model", clean(summary.model)), ("profile", clean(summary.profile)), ("recipe", clean(summary.recipe))]
    measured = summary.measured.get("components") or {}
    plan = summary.measured.get("predicted") or summary.in_force or summary.predicted
    # Components measured on a plain CPU are those of the whole process, beside which no prediction of tensors stands.
    predicted = {} if summary.on_plain_cpu else plan.get("components") or {}
    for name, predicted_bytes in predicted.items():
        suffix = f", measured {format_bytes(measured[name])}" if name in measured else ""
        if predicted_bytes or (suffix and measured[name]):
            rows.append((f"  {clean(name)}", f"predicted {format_bytes(predicted_bytes)}{suffix}"))
    rows += [("warning", clean(warning["text"])) for warning in summary.warnings]
    rows += [("warning", problem) for problem in file_problems(summary)]
    if summary.last_error:
        rows.append(("error", on_one_line(summary.last_error)))
    return [*rows, ("folder", clean(summary.path))]


def file_problems(summary: RunSummary) -> list[str]:
    """A sentence for each of the run's files of which something could not be read."""
    count = summary.damaged_lines
    lines = [f"{count} damaged line{'s' if count > 1 else ''} of events.jsonl left out"] if count else []
    return [*lines, *map(clean, summary.problems)]


def checkpoint_rows(steps: list[int], best: int | None, learned: dict[str, Any] | None) -> Rows:
    """Checkpoints on disk, the `best` one marked, and the newest one's micro-batch budget (`learned_memory`)."""
    if not steps:
        return []
    rows = [("checkpoints", ", ".join(f"{step} (best)" if step == best else str(step) for step in steps))]
    if learned:
        failed = learned["ceiling_bytes"] or learned["passing_bytes"]
        limit = f", {format_bytes(failed)} failed" if failed else ""
        slope = f"; measured/predicted {learned['slope']:.2f}" if learned["slope"] else ""
        budget = format_bytes(learned["budget_bytes"])
        rows.append(("budget", f"micro-batches with a predicted size of up to {budget}{limit}{slope}"))
        layers = learned["remedies"].get("checkpointing")
        if layers:
            number = "" if layers is True else f" of {layers} layer{'s' if layers > 1 else ''}"
            rows.append(("active", f"gradient checkpointing{number}"))
    return rows


def next_steps(summary: RunSummary, *, shown: bool = False) -> Rows:
    """The commands to type next. `shown`: without the one that shows the run. A stage is resumed with its run; the log
    of a staged run that failed is that of its failed stage."""
    named = clean(typed_name(RunDirectory(Path(summary.path))))
    run, _, stage = named.partition("/")
    failed = next((clean(row["name"]) for row in summary.stages if row.get("status") in ("failed", "oom")), "")
    read = f"{run}/{failed}" if failed and not stage else named
    commands = {
        "done": [
            f"tunedeck show {named}",
            *([f"tunedeck eval {named}"] if names_held_out_data(RunDirectory(Path(summary.path))) else []),
        ],
        "paused": [f"tunedeck resume {run}"],
        "stopped": [f"tunedeck resume {run}", f"tunedeck show {named}"],
        "oom": [f"tunedeck show {read} --oom"],
        "failed": [f"tunedeck log {read}"],
        "running": [f"tunedeck watch {named}"],
        "queued": ["tunedeck queue list"],
        "stale": [f"tunedeck resume {run}"],
    }.get(summary.status, [f"tunedeck show {named}"])
    commands = [command for command in commands if not shown or command != f"tunedeck show {named}"]
    return [("next" if index == 0 else "", command) for index, command in enumerate(commands)]
