"""Fuzzed journals and logs in the panes of the console: a function checks one input, a strategy makes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from textual.content import Content

from tests.fuzz.inputs import HARM, as_json, damaged, spliced
from tests.fuzz.runs import folder_run, shown
from tests.journal.event_fields import backoff_fields, step_fields
from tui.plot.metrics import METRICS
from tui.plot.run_curve import AXES, RunCurve
from tui.run.chain import chain_line, chain_of
from tui.run.gpus import gpu_lines
from tui.run.listing import short_name
from tui.run.log_tail import LogTail
from tui.run.memory import memory_lines
from tui.run.panels import event_lines, figure_strip, headline_lines, log_lines
from tui.run.ranks import rank_lines
from tui.run.scores import score_lines
from tui.run.watch import RunWatch
from tui.widgets.memory_bar import Look

WIDTH, HEIGHT = 80, 24
SECONDS = 10.0
"""Most that one journal of a few lines takes to read and to show: a bound on hanging, not on speed."""

PREDICTED = {"peak_bytes": 5 << 20, "components": {"weights": 3 << 20, "activations": 2 << 20}}
SAMPLES = [{"prompt": "a", "answer": "b", "reference": "c"}]
RANKS = [{"rank": rank, "step_seconds": 0.5, "peak_bytes": 5, "tokens": 9, "data_wait_seconds": 0.1} for rank in (0, 1)]
EVENTS: list[dict[str, Any]] = [
    {"kind": "run_started", "run": "x", "pid": 1, "world_size": 2, "versions": {"torch": "2"}, "device_name": "a"},
    {"kind": "stage_started", "name": "warm", "number": 1, "of": 2, "path": "stages/01-warm", "max_steps": 9},
    {"kind": "plan", "predicted": PREDICTED, "verdict": "fits_smaller", "capacity_bytes": 6 << 20, "micro_batch": 4,
     "phases": {"backward": {"weights": 5}}, "deciding_phase": "backward", "remedies": {"train.micro_batch": 2}},
    {"kind": "micro_batch", "step": 1, "sequences": 2, "length": 9, "reason": "r", "predicted": PREDICTED},
    {"kind": "phase", "name": "loading", "detail": "d", "done": 1, "total": 2},
    {"kind": "step", **step_fields(1), "ranks": RANKS,
     "expert_utilisation": {"mean": [0.1, 0.9], "entropy": 0.5}, "aux_loss": 0.1},
    {"kind": "step", **step_fields(2), "rewards_margin": 1.0, "rewards_accuracy": 0.5, "samples": SAMPLES},
    {"kind": "backoff", **backoff_fields(2)},
    {"kind": "eval", "step": 2, "metrics": {"loss": 0.5, "exact_match": 0.1}, "samples": SAMPLES},
    {"kind": "checkpoint_saved", "step": 2, "path": "p", "save_seconds": 0.1, "size_bytes": 9, "best": True},
    {"kind": "gpu", "index": 0, "used_bytes": 5, "utilisation_percent": 50, "temperature_celsius": 60,
     "power_watts": 70, "name": "n", "total_bytes": 9, "time": "2026-11-20T20:58:00Z"},
    {"kind": "control", "request": "stop", "accepted": True, "reason": "r"},
    {"kind": "warning", "code": "gradient_spike", "text": "t", "fix": "f", "step": 2},
    {"kind": "oom_report", "path": "oom/step-2.json", "step": 2},
    {"kind": "resumed", "step": 1, "from": "f", "path": "p", "schedule": "s"},
    {"kind": "stage_finished", "name": "warm", "status": "done", "exit_code": 0, "number": 1, "steps": 2},
    {"kind": "run_finished", "status": "failed", "exit_code": 1, "result": None, "error": "e\n  fix: f",
     "measured": {**PREDICTED, "predicted": PREDICTED}},
]  # fmt: skip
HEAD = {"time": "2026-11-20T20:58:00Z", "stage": "", "rank": 0}

lines = st.sampled_from(EVENTS).flatmap(
    lambda event: st.one_of(damaged({"seq": 1, **HEAD, **event}).map(as_json), spliced(as_json({**HEAD, **event})))
)
journals = st.lists(lines, min_size=1, max_size=8).map(b"\n".join)
logs = st.lists(st.one_of(st.sampled_from([text.encode() for text in HARM]), st.binary(max_size=60))).map(b"\n".join)


def panes(given: tuple[bytes, bytes], folder: Path) -> None:
    """Read the journal and the log, and make every pane of Run from them."""
    run, began = folder_run(folder), time.monotonic()
    journal, log = given
    run.events.write_bytes(journal + b"\n")
    run.log.write_bytes(log)
    watch = RunWatch(run)
    watch.read_more(seconds=SECONDS)
    shown(line.plain for line in pane_lines(watch))
    tail = LogTail(run.log)
    tail.refresh()
    shown(part.plain for line in tail.take() for part in log_lines(line, WIDTH))
    curve = RunCurve(run, *METRICS)
    curve.read_more(seconds=SECONDS)
    for metric in METRICS:
        for axis in AXES:
            curve.over(axis, metric).columns(WIDTH)
    shown([short_name(run), curve.read_error])
    assert time.monotonic() - began < SECONDS


def pane_lines(watch: RunWatch) -> Iterator[Content]:
    """The lines of every pane that is made of the journal."""
    look = Look(letters=False)
    yield from headline_lines(watch, WIDTH, str, ascii_only=False)
    yield from figure_strip(watch, WIDTH, 4, str, ascii_only=False)
    yield from memory_lines(watch, WIDTH, look)
    yield from score_lines(watch, WIDTH, str, 0)
    yield from gpu_lines(watch.gpus, WIDTH, HEIGHT, str, ascii_only=False, active=False)
    yield from rank_lines(watch, WIDTH, HEIGHT, str)
    chain = chain_of(watch)
    if chain:
        yield chain_line(chain, chain[0].name, WIDTH, ascii_only=False)
    for line in watch.feed:
        yield from event_lines(line, WIDTH)
