"""One run's bad files: they are left out, counted and said in that run alone, by every reader of runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.journal.compare import compare, comparison_rows
from engine.journal.directory import RunDirectory
from engine.journal.event_text import describe_event
from engine.journal.events import EventTail, EventWriter
from engine.journal.summary import summarise
from engine.journal.summary_text import Progress, detail_rows, file_problems, result_rows
from tests.journal.event_fields import junk_lines, step_fields
from tests.journal.run_directories import new_run

DEEP = "[" * 100_000 + "]" * 100_000

BAD_LINES = {
    "a step without its number": '{"kind":"step","seq":99}',
    "a step in words": '{"seq":9,"time":"","kind":"step","stage":"","rank":0,"step":"many","epoch":0,"loss":1}',
    "a kind that is none": '{"seq":9,"kind":["step"]}',
    "no metrics": '{"seq":9,"kind":"eval","step":1,"metrics":[1]}',
    "a stage without a name": '{"seq":9,"kind":"stage_finished","status":"done","exit_code":0}',
    "a size of ten thousand digits": '{"seq":9,"kind":"resumed","from":"x","step":' + "9" * 10_000 + "}",
    "beyond a float": '{"seq":9,"kind":"eval","step":1,"metrics":{},"seconds":1e999}',
    "deeply nested": DEEP,
    "answers that are none": '{"seq":9,"kind":"eval","step":1,"metrics":{},"samples":5}',
    "no number": '{"seq":"9","kind":"paused"}',
    "a prediction in words": '{"seq":9,"kind":"plan","verdict":"fits","predicted":{"peak_bytes":"much"}}',
}


def written(run: RunDirectory, steps: int = 3) -> RunDirectory:
    """The journal of a run that took some steps and is done."""
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        for step in range(1, steps + 1):
            writer.write("step", **step_fields(step))
        writer.write("eval", step=steps, metrics={"loss": 0.5})
        writer.write("run_finished", status="done", exit_code=0, result="adapter")
    return run


def told(*arguments: object) -> tuple[int, str, str]:
    """Exit code, output and messages of a command."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_counted_and_said_and_the_rest_of_the_run_is_shown(run: RunDirectory, line: str) -> None:
    sound = summarise(written(run))
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join([*lines[:-1], line.encode() + b"\n", lines[-1]]))
    summary = summarise(run)
    assert summary.damaged_lines == 1 and file_problems(summary) == ["1 damaged line of events.jsonl left out"]
    assert (summary.status, summary.step, summary.metrics) == (sound.status, sound.step, sound.metrics)
    tail = EventTail(run.events)
    assert len(tail.poll()) == len(lines) and tail.damaged == 1
    assert "1 damaged line" in told("show", run.path)[1]


def test_a_bad_last_step_leaves_the_step_before_it(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        for step in (1, 2):
            writer.write("step", **step_fields(step))
        torn = {**step_fields(3), "tokens": "many"}
        writer.write("step", **torn)
    summary = summarise(run)
    assert (summary.step, summary.damaged_lines) == (2, 1)


def spoil(run: RunDirectory, what: str) -> None:
    """Give one of the run's files a wrong shape."""
    if what == "events is a folder":
        run.events.unlink()
        run.events.mkdir()
    elif what == "events is a pipe":
        run.events.unlink()
        os.mkfifo(run.events)
    elif what == "checkpoints is a file":
        run.checkpoints.rmdir()
        run.checkpoints.write_text("")
    else:
        name, _, text = what.partition(" ")
        Path(run.path, name).write_text(text)


SPOILED = [
    "engine.json [1]", "engine.json {}", f"engine.json {DEEP}", 'engine.json {"pid":-1,"started":"","host":""}',
    "engine.json \0", "run.toml =", "run.toml name = [1]", 'run.toml recipe = 5\nprovenance = "x"', "plan.json [1]",
    'run.toml [recipe]\nstages = 5\nmodel = "x"\ncheckpoint = []', f"run.toml x = {DEEP}",
    'plan.json {"peak_bytes": "much"}', "events is a folder", "events is a pipe", "checkpoints is a file",
]  # fmt: skip


@pytest.mark.parametrize("what", SPOILED, ids=[what[:40] for what in SPOILED])
def test_one_runs_bad_file_leaves_the_list_of_all_runs(run: RunDirectory, what: str) -> None:
    written(run)
    other = written(new_run(run.path.parent, "other"))
    spoil(run, what)
    code, listed, said = told("runs", "--json", "--runs", run.path.parent)
    rows = {row["run"]: row for row in json.loads(listed)}
    assert code == 0 and rows.keys() == {run.name, other.name}
    assert (rows[other.name]["status"], rows[other.name]["problems"]) == ("done", [])
    if not what.startswith(("plan.json", "checkpoints")):
        assert rows[run.name]["problems"] and run.name in said and other.name not in said
    assert told("show", run.path)[0] == told("compare", run.path, other.path)[0] == 0


def test_a_line_of_any_length_takes_little_memory(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.journal.events.MOST_LINE_BYTES", 1000)
    written(run)
    sound = run.events.read_bytes()
    run.events.write_bytes(b'{"kind":"' + b"x" * 5000 + b'"}\n' + sound)
    tail = EventTail(run.events)
    assert len(tail.poll()) == sound.count(b"\n") and tail.damaged > 0 and tail.offset == run.events.stat().st_size


def test_no_field_of_an_event_ends_a_reader(run: RunDirectory) -> None:
    lines = junk_lines(3000)
    run.events.write_bytes(b"".join(lines))
    tail, progress = EventTail(run.events), Progress("run", simulated=False)
    for event in tail.poll():
        assert "\x1b" not in (describe_event(event) or "")
        progress.take(event)
        assert "\x1b" not in "".join(progress.lines())
    assert len(lines) // 4 < tail.damaged < len(lines)
    for end in range(0, len(lines), 100):
        run.events.write_bytes(b"".join(lines[: end + 1]))
        summary = summarise(run)
        assert "\x1b" not in str([*result_rows(summary), *detail_rows(summary)])
        assert list(comparison_rows(compare([run, run])))
