"""The text of the Run screen's panes: functions from a `RunWatch` to lines. They read no files and use no widgets. The
parameter `glyphs` is a function that replaces the console's glyphs by ASCII characters where necessary.

Try: `[line.plain for line in figure_lines(watch, str, ascii_only=True)]`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from textual.content import Content

from engine.journal.directory import nested, read_spec
from engine.journal.event_text import clean, format_duration, format_number, format_score, on_one_line, ready_at
from engine.journal.summary import SUSPENDED, RunSummary
from engine.journal.summary_text import LONG_SECONDS, ooms_text
from tui.run.log_tail import LogLine
from tui.run.ranks import ranks_in_brief
from tui.run.table import ASKED_FOR, EIGHTHS, state_cell, state_of
from tui.run.watch import FeedLine, RunWatch

Glyphs = Callable[[str], str]

LABEL_WIDTH = 15
"""Cells for the name of a figure."""

MOST_BARS = 10
"""Bars for the experts of a mixture; with more experts, a bar stands for several."""

ASCII_EIGHTHS = "_.,-=+*#"

NEXT_KEYS = {
    "queued": "waiting in the queue",
    "paused": "r resumes it",
    "stopped": "r resumes from the last checkpoint",
    "stale": "r resumes from the last checkpoint",
    "failed": "r tries again from the last checkpoint",
    "oom": "o opens the out-of-memory report; r tries again",
}
"""What can be done with a run that is not running, by state."""
NOT_FINITE = "not finite"
"""Words of the error of a run that diverged, which would do so again from its last checkpoint."""
CHANGE_SETTINGS = "n opens Launch to change its settings"

FEED_STYLES = {
    "backoff": "$caution", "warning": "$caution", "eval": "$mark", "run_finished": "bold", "resumed": "$info",
}  # fmt: skip


LEVEL_STYLES = {"error": "$bad", "warning": "$caution", "info": "$muted"}


def headline_lines(watch: RunWatch, width: int, glyphs: Glyphs, *, ascii_only: bool) -> list[Content]:
    """Return the two lines that are shown at every screen size: state and progress of the run; then its phase, or its
    error if there is one. `glyphs` replaces the console's glyphs by ASCII characters where necessary."""
    summary = watch.summary
    if summary is None:
        style = "$bad" if watch.read_error else "$muted"
        return [Content.styled(f" {watch.read_error or 'reading'}", style), Content("")]
    return [_state_line(watch, summary, width, glyphs, ascii_only), _status_line(watch, summary)]


BAR_CELLS = (8, 40)
"""Least and most cells of the bar of progress."""


def _state_line(watch: RunWatch, summary: RunSummary, width: int, glyphs: Glyphs, ascii_only: bool) -> Content:
    """State and progress in one line of `width` cells. Where not all has room, what matters less is left out: the bar,
    that the device is simulated, when the run will be ready, the steps, the time left; last the share."""
    state = state_cell(state_of(summary), glyphs, ascii_only=ascii_only)
    total, step = summary.max_steps, watch.step
    share = min(1.0, step / total) if total else None
    left = watch.seconds_left() if summary.status == "running" else None
    steps = f"step {step:,}" + (f" of {total:,}" if total else "")
    # In the order of the line, each with its place in the order of importance.
    parts = [
        (4, Content.styled("(simulated device)", "$muted") if summary.simulated else None),
        (2, Content(steps)),
        (0, Content(f"{100 * share:.0f} %") if share is not None else None),
        (1, Content(f"{format_duration(left)} left") if left is not None else None),
        (3, Content(ready_at(left)) if left is not None and left >= LONG_SECONDS else None),
    ]
    there = [(rank, part) for rank, part in parts if part is not None]
    room = width - 2 - state.cell_length
    kept = []
    for rank, part in sorted(there, key=lambda pair: pair[0]):
        if part.cell_length + 2 <= room:
            room -= part.cell_length + 2
            kept.append(rank)
    line = Content.assemble(" ", state, *(Content.assemble("  ", part) for rank, part in there if rank in kept))
    bar = min(BAR_CELLS[1], room - 2)
    if share is None or bar < BAR_CELLS[0] or len(kept) < len(there):
        return line
    full = round(share * bar)
    return Content.assemble(line, "  ", (glyphs("█" * full), "$info"), (glyphs("░" * (bar - full)), "$muted"))


def _status_line(watch: RunWatch, summary: RunSummary) -> Content:
    if watch.read_error:
        return Content.styled(f" {watch.read_error}", "bold $bad")
    if watch.unread_share > 0.01:
        return Content.styled(f" reading its journal: {100 * (1 - watch.unread_share):.0f} %", "$muted")
    if summary.status in NEXT_KEYS:
        reason = "" if summary.reason == ASKED_FOR else summary.reason
        error = on_one_line(summary.last_error or reason or "")
        if summary.status == "stale":
            error = "the engine ended without recording a reason"
        why = f"  {error}" if error else ""
        again = summary.status != "failed" or NOT_FINITE not in error
        next_key = NEXT_KEYS[summary.status] if again else CHANGE_SETTINGS
        return Content.assemble((f" {next_key}", "bold"), (why, "$bad"))
    if summary.stopping:
        return Content.styled(" stops after this step, with a checkpoint; x again: stop now", "$caution")
    if summary.phase == SUSPENDED:
        return Content.styled(f" {SUSPENDED}; it continues after SIGCONT (kill -CONT)", "$caution")
    if summary.status == "done":
        result = f"; result in {watch.directory.name}/{summary.result}" if summary.result else "; no result"
        ended = f" {summary.reason or 'finished'}{result}"
        return Content.styled(f" {clean(ended)}", "$muted")
    return Content.styled(f" {clean(summary.phase or 'starting')}", "$muted")


def in_columns(lines: list[Content], height: int, width: int) -> list[Content]:
    """The lines beside each other in as many columns as it takes to show all in `height` lines, if `width` cells are
    enough for them; else the lines as they are."""
    columns = -(-len(lines) // max(1, height))
    size = width // max(1, columns)
    if columns < 2 or size < max(line.cell_length for line in lines) + 1:
        return lines
    rows = -(-len(lines) // columns)
    return [
        Content.assemble(*(line.pad_right(size - line.cell_length) for line in lines[row::rows])) for row in range(rows)
    ]


def figure_strip(watch: RunWatch, width: int, lines: int, glyphs: Glyphs, *, ascii_only: bool) -> list[Content]:
    """The figures of the latest step in at most `lines` lines of `width` cells, the most important first; those for
    which there is no room are left out."""
    rows = dict(figure_rows(watch, glyphs, ascii_only=ascii_only))
    if (watch.latest or {}).get("ranks"):
        rows["ranks"] = ranks_in_brief(watch)
    if lines == 1 and isinstance(rows["tokens/s"], Content):
        rows["tokens/s"] = rows["tokens/s"].plain.partition(" ")[0]
    order = [name for name in STRIP_ORDER if name in rows] + [name for name in rows if name not in STRIP_ORDER]
    found: list[list[Content]] = [[] for _ in range(lines)]
    rooms = [width - 1] * lines
    for name in order:
        value = rows[name]
        if isinstance(value, str) and value in UNKNOWN_FIGURES:
            continue
        part = Content.assemble((f"{name} ", "$muted"), value, "   ")
        at = next((index for index, room in enumerate(rooms) if part.cell_length - 3 <= room), None)
        if at is None:
            continue
        rooms[at] -= part.cell_length
        found[at].append(part)
    return [Content.assemble(" ", *parts).rstrip() for parts in found]


STRIP_ORDER = (
    "loss", "eval loss", "tokens/s", "ranks", "micro-batch", "experts, even", "gradient norm", "out of memory",
)  # fmt: skip
"""The figures that are shown first in one line; then come the others, in their order."""

UNKNOWN_FIGURES = ("-", "not known", "never")
"""Values that say nothing, which are left out of the line."""


def figure_lines(watch: RunWatch, glyphs: Glyphs, *, ascii_only: bool, with_ranks: bool = True) -> list[Content]:
    """Return the figures of the latest step, one per line. `with_ranks` adds a brief line about the ranks, for screens
    without the table of ranks; `glyphs` replaces the console's glyphs by ASCII characters where necessary."""
    rows = figure_rows(watch, glyphs, ascii_only=ascii_only)
    if with_ranks and (watch.latest or {}).get("ranks"):
        rows.append(("ranks", ranks_in_brief(watch)))
    return [_row(name, value) for name, value in rows]


def figure_rows(watch: RunWatch, glyphs: Glyphs, *, ascii_only: bool) -> list[tuple[str, str | Content]]:
    """Names and values of the figures of the latest step."""
    step = watch.latest or {}
    rows: list[tuple[str, str | Content]] = [("loss", _loss(step))]
    rows += _scores(watch)
    rows += [
        ("learning rate", format_number(step.get("learning_rate", "-"))),
        ("gradient norm", format_number(step.get("grad_norm", "-"))),
        ("tokens/s", _speed(watch, step, ascii_only)),
        ("MFU", f"{100 * step['mfu']:.1f} %" if step.get("mfu") is not None else "not known"),
        ("step time", _seconds(step.get("step_seconds"))),
        ("data wait", _wait(step)),
        ("micro-batch", glyphs(_micro_batch(watch, step))),
        *_experts(step, ascii_only),
    ]
    if watch.summary is not None:
        rows.append(("out of memory", ooms_text(watch.summary)))
        rows.append(("samples lost", f"{watch.summary.samples_lost:,}"))
    return rows


def _row(name: str, value: str | Content) -> Content:
    return Content.assemble((f" {name:<{LABEL_WIDTH}}", "$muted"), value)


def _scores(watch: RunWatch) -> Iterable[tuple[str, str]]:
    if watch.state.evals:
        for name, value in list(watch.state.evals[-1]["metrics"].items())[:3]:
            label = "eval loss" if name == "loss" else clean(name).replace("_", " ")
            yield label[: LABEL_WIDTH - 1], format_score(name, value)


def _speed(watch: RunWatch, step: dict[str, Any], ascii_only: bool) -> str | Content:
    speed = step.get("tokens_per_second")
    if speed is None:
        return "-"
    recent = [event["tokens_per_second"] for event in watch.curves.recent if event.get("tokens_per_second")]
    return Content.assemble(f"{speed:,.0f}  ", (sparkline(recent[-8:], ascii_only=ascii_only), "$band"))


def _loss(step: dict[str, Any]) -> str:
    """Format the loss of a step's event; for a mixture of experts, also its auxiliary loss; for
    preferences, the margin of rewards and the share of pairs that are right."""
    if "loss" not in step:
        return "-"
    auxiliary = f", aux {format_number(step['aux_loss'])}" if "aux_loss" in step else ""
    if "rewards_margin" in step:
        auxiliary += f", margin {format_number(step['rewards_margin'])}"
    if "rewards_accuracy" in step:
        auxiliary += f", {100 * step['rewards_accuracy']:.0f} % right"
    return format_number(step["loss"]) + auxiliary


def _experts(step: dict[str, Any], ascii_only: bool) -> Iterable[tuple[str, Content]]:
    """The use of a mixture's experts: bars with the mean share of each expert (or of several neighbouring experts, if
    there are many), and how even the shares are in the least even layer, in per cent. Yields nothing for a model
    without experts."""
    found = step.get("expert_utilisation")
    if not found or not found["mean"]:
        return
    together = -(-len(found["mean"]) // MOST_BARS)
    groups = [found["mean"][first : first + together] for first in range(0, len(found["mean"]), together)]
    bars = sparkline([sum(group) / len(group) for group in groups], ascii_only=ascii_only)
    yield "experts, even", Content.assemble((bars, "$band"), f"  {100 * found['entropy']:.0f} %")


def sparkline(values: list[float], *, ascii_only: bool = False) -> str:
    """One bar character per value, scaled from zero to the greatest value."""
    letters = ASCII_EIGHTHS if ascii_only else EIGHTHS
    top = max(values, default=0.0)
    return "".join(letters[min(7, int(8 * value / top))] for value in values) if top > 0 else ""


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 10 else format_duration(value)


def _wait(step: dict[str, Any]) -> str:
    waited, took = step.get("data_wait_seconds"), step.get("step_seconds")
    if waited is None or not took:
        return "-"
    return f"{_seconds(waited)}, {100 * waited / took:.0f} %"


def _micro_batch(watch: RunWatch, step: dict[str, Any]) -> str:
    pieces, rows = step.get("micro_batches"), step.get("largest_micro_batch")
    if pieces is None:
        return "-"
    batch = nested(read_spec(watch.directory), "recipe", "train", "batch_size")
    if watch.state.in_force:
        held = f"{watch.state.in_force['micro_batch']} at full length"
        return f"{held}; batch {batch} in {pieces}" if batch else f"{held}; {pieces} a step"
    largest = f"{'' if pieces == 1 else '≤'}{rows} × {pieces}" if rows else f"{pieces} a step"
    return f"{largest}, batch {batch}" if batch else largest


def event_lines(line: FeedLine, width: int) -> list[Content]:
    """One event: the time of day and its text, wrapped and indented."""
    wrapped = Content.styled(line.text, FEED_STYLES.get(line.kind, "")).wrap(max(10, width - 11))
    clocks = [_clock(line.time), *[""] * len(wrapped)]
    return [Content.assemble((f" {clock:<8}  ", "$muted"), part) for clock, part in zip(clocks, wrapped, strict=False)]


def log_lines(line: LogLine, width: int) -> list[Content]:
    """Return one line of the engine's log as lines of at most `width` cells."""
    styled = Content.styled(line.text, LEVEL_STYLES[line.level])
    size = max(10, width - 1)
    # Wrapping takes ten times as long as a line that fits needs.
    parts = styled.wrap(size) if styled.cell_length > size else [styled]
    return [Content.assemble(" ", part) for part in parts]


def _clock(time: str) -> str:
    """The local time of day of an ISO 8601 time; empty if `time` is any other text."""
    try:
        return datetime.fromisoformat(time).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return ""
