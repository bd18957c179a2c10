"""Fuzzed recipes, files of runs, and references to them: a function checks one input, a strategy makes them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st

from engine.config.files.find import find_spec_file
from engine.config.files.text import UNSAFE
from engine.config.files.write import import_spec_file
from engine.config.load import check_text, load_run_spec
from engine.config.schema.recipe import Model
from engine.errors import TunedeckError
from engine.journal.checkpoints_on_disk import (
    best_step,
    damage,
    find_checkpoints,
    learned_memory,
    newest_sound,
    removed_checkpoints,
)
from engine.journal.compare import compare, comparison_rows
from engine.journal.control import REQUESTS, ControlInbox, RunRequests
from engine.journal.directory import RunDirectory
from engine.journal.evaluations import read_evaluations, values_of
from engine.journal.event_text import describe_event
from engine.journal.events import EventTail, EventWriter
from engine.journal.index import list_runs, resolve_run
from engine.journal.oom_text import read_report, report_lines
from engine.journal.queue import Queue
from engine.journal.summary import summarise
from engine.journal.summary_text import Progress, checkpoint_rows, detail_rows, file_problems, next_steps, result_rows
from engine.model.reference import find_starting_weights
from tests.fuzz.inputs import HARM, as_json, damaged, json_files, scalars, spliced, texts
from tests.journal.event_fields import backoff_fields, junk_lines, step_fields
from tests.journal.run_directories import RUN_TOML, new_run


def shown(lines: Iterable[object]) -> None:
    """Assert that a terminal shows these lines as they are."""
    for line in lines:
        found = UNSAFE.search(str(line).replace("\n", "").replace("\t", ""))
        assert found is None, repr(line)


def refused(error: TunedeckError) -> None:
    """Assert that an error's text may be shown as the command line shows it, which makes it visible."""
    assert len(error.render()) < 100_000


# recipes and profiles


def recipe_text(text: str, folder: Path) -> None:
    shown(check_text("recipe", text, "mine", "mine.toml"))
    shown(check_text("profile", text, "mine", "mine.toml"))


def toml_texts(whole: str) -> st.SearchStrategy[str]:
    lines = whole.splitlines(keepends=True)
    keys = st.sampled_from([line.partition("=")[0].strip() for line in lines if "=" in line])
    quoted = texts.map(json.dumps)
    written = st.one_of(
        scalars.map(str), quoted, st.sampled_from(["[", "{", "'''", "[1, [2]]", "{a = 1}", "1979-05-27"])
    )
    line = st.tuples(keys, written).map(lambda pair: f"{pair[0]} = {pair[1]}\n")
    table = st.sampled_from(["[model]\n", "[[stages]]\n", "[sweep]\n", "[evaluate]\n", "[[data.sources]]\n", "[x.y]\n"])
    more = st.lists(st.one_of(line, table, texts), max_size=4)
    return st.tuples(st.permutations(lines), st.integers(0, len(lines)), more).map(
        lambda parts: "".join([*lines[: parts[1]], *parts[2], *parts[0][parts[1] :]])
    )


def import_recipe(data: bytes, folder: Path) -> None:
    given, target = folder / "given.toml", folder / "config"
    given.write_bytes(data)
    with mock.patch.dict(os.environ, TUNEDECK_CONFIG=str(target)):
        try:
            placed = import_spec_file("recipe", given, force=True)
        except TunedeckError as error:
            refused(error)
            return
    assert placed.resolve().is_relative_to(target.resolve()), placed
    text = placed.read_text()
    assert not any(word in text for word in ("on_finish", "trust_remote_code")), text


# runs

BEST = as_json({"step": 3})
RUN_FILES = {
    "run.toml": RUN_TOML.format(name="x").encode(),
    "plan.json": as_json({"verdict": "fits", "peak_bytes": 5, "capacity_bytes": 6, "components": {"weights": 3}}),
    "engine.json": as_json({"pid": 1, "started": "1", "host": "h"}),
    "launch.json": as_json({"launcher": "slurm", "job": "1"}),
    "evaluations.jsonl": as_json({
        "time": "2026-11-20T20:58:00Z", "step": 3, "metrics": {"loss": 0.5}, "count": 2, "data": "ab", "weights": "x",
        "samples": [{"prompt": "a", "answer": "b"}], "values": "evaluations/x.json", "sources": ["s"], "notes": ["n"],
    }),
    "checkpoints/best": BEST,
    "checkpoints/removed.json": as_json({"steps": [1, 2], "best": 2}),
    "oom/step-3.json": as_json({"step": 3, "phase": "backward", "figures": {"allocated": 5}, "held": {"weights": 5},
                                "largest": [], "processes": [], "remedy": "cut", "ways": [{"key": "x", "value": 1}]}),
}  # fmt: skip

run_files = st.sampled_from(list(RUN_FILES)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        json_files(json.loads(RUN_FILES[name])) if not name.endswith("toml") else spliced(RUN_FILES[name]),
    )
)


def fresh_run(folder: Path) -> RunDirectory:
    shutil.rmtree(folder / "runs", ignore_errors=True)
    run = new_run(folder / "runs", "x")
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        writer.write("step", **step_fields(1))
        writer.write("eval", step=1, metrics={"loss": 0.5})
        writer.write("backoff", **backoff_fields(1))
    return run


def tell(run: RunDirectory) -> None:
    """Everything that show, runs, compare and log say of a run."""
    summary = summarise(run)
    best, learned = best_step(run.checkpoints), learned_memory(run)
    rows = [*result_rows(summary), *detail_rows(summary), *next_steps(summary)]
    rows += checkpoint_rows(summary.checkpoints, best, learned)
    shown(part for row in rows for part in row)
    shown(file_problems(summary))
    for evaluation in read_evaluations(run):
        values_of(run, evaluation, "loss")
    for row in comparison_rows(compare([run, run])):
        shown(map(str, row))
    json.dumps(summary.__dict__, default=str)


def run_file(given: tuple[str, bytes], folder: Path) -> None:
    name, data = given
    run = fresh_run(folder)
    path = run.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    tell(run)
    for report in sorted(run.oom.glob("*.json")) if run.oom.exists() else ():
        found = read_report(report)
        shown(report_lines(found) if found is not None else ())
    removed_checkpoints(run.checkpoints)
    try:
        spec = load_run_spec(run.run_toml)
    except TunedeckError as error:
        refused(error)
    else:
        assert spec.limits.on_finish in ("", None) and not spec.limits.trust_remote_code


def events(data: bytes, folder: Path) -> None:
    run = folder_run(folder)
    run.events.write_bytes(data)
    tail, progress = EventTail(run.events), Progress(title="x", simulated=False)
    for event in tail.poll():
        progress.take(event)
        shown([describe_event(event) or ""])
    shown(progress.lines())
    tell(run)


def folder_run(folder: Path) -> RunDirectory:
    """The run of a folder, made once."""
    found = list_runs(folder / "runs")
    return found[0] if found else fresh_run(folder)


JUNK_LINES = junk_lines(400)
event_files = st.lists(
    st.one_of(
        st.sampled_from(JUNK_LINES),
        st.sampled_from(JUNK_LINES).flatmap(spliced),
        st.sampled_from(JUNK_LINES)
        .flatmap(lambda line: damaged(json.loads(line)))
        .map(lambda each: as_json(each) + b"\n"),
    ),
    max_size=6,
).map(b"".join)


def control(given: tuple[str, bytes], folder: Path) -> None:
    name, data = given
    run = folder_run(folder)
    path = run.control / f"00000000000000000001-{name}"
    if "/" in name or "\0" in name or len(path.name) > 200:
        return
    path.write_bytes(data)
    inbox = ControlInbox(run)
    assert all(request.name in REQUESTS for request in inbox.poll())
    requests = RunRequests(inbox, None, None)
    requests.poll()
    assert requests.ending in (None, "stop", "pause")
    for left in run.control.iterdir():
        left.unlink()


control_files = st.tuples(
    st.one_of(st.sampled_from(["stop.json", "pause.json", "x.json"]), texts),
    json_files({"request": "stop", "time": "2026", "fields": {"a": 1}}),
)


def manifest(given: tuple[str, bytes], folder: Path) -> None:
    name, data = given
    checkpoints = folder / "checkpoints"
    for step in (1, 2):
        place = checkpoints / f"step-{step:08d}"
        if not place.exists():
            (place / "weights").mkdir(parents=True)
            (place / "weights" / "model.safetensors").write_bytes(b"weights")
            (place / "state.json").write_bytes(STATE)
        (place / "state.json").write_bytes(STATE)
        (place / "manifest.json").write_bytes(MANIFEST)
    (checkpoints / "step-00000002" / name).write_bytes(data)
    newest = find_checkpoints(checkpoints)[0]
    sound, complaints = newest_sound(checkpoints)
    assert sound is not None and (sound.step == 2) == (damage(newest) is None)
    assert len(complaints) == (sound.step == 1)
    if sound.step == 2:
        listed = json.loads(data)["files"] if name == "manifest.json" else {}
        assert all(not Path(each).is_absolute() and ".." not in Path(each).parts for each in listed)


STATE = as_json({"step": 2, "budget": {}, "remedies": {}})
WEIGHTS = {"size": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
LISTED = {"files": {"weights/model.safetensors": WEIGHTS,
                    "state.json": {"size": len(STATE), "sha256": hashlib.sha256(STATE).hexdigest()}}}  # fmt: skip
MANIFEST = as_json(LISTED)
manifests = st.one_of(
    st.tuples(st.just("manifest.json"), json_files(LISTED)), st.tuples(st.just("state.json"), json_files({"step": 2}))
)


def queue(data: bytes, folder: Path) -> None:
    waiting = Queue(folder / "runs")
    waiting.folder.mkdir(parents=True, exist_ok=True)
    (waiting.folder / "order.json").write_bytes(data)
    try:
        state = waiting.read()
    except TunedeckError as error:
        refused(error)
        return
    names = [*state.waiting, *([state.current] if state.current else []), *(state.limited_to or [])]
    assert all(waiting.run(name).path.parent == waiting.runs_dir for name in names), names


QUEUED = {"waiting": ["a", "b"], "current": "c", "worker": {"pid": 1, "started": "1", "host": "h"}, "limited_to": ["a"]}


def reference(text: str, folder: Path) -> None:
    run = folder_run(folder)
    try:
        found = resolve_run(text, folder / "runs")
        assert found.exists(), found
        assert found.path.resolve() == run.path.resolve() or os.sep in text, found
    except TunedeckError as error:
        refused(error)
    for kind in ("recipe", "profile"):
        try:
            assert find_spec_file(kind, text, folder).path.exists()
        except TunedeckError as error:
            refused(error)
    try:
        find_starting_weights(Model(id=text or "x"))
    except TunedeckError as error:
        refused(error)


references = st.one_of(
    texts, st.lists(st.sampled_from([*HARM, "run:", "@", "/", "last", "x", "best", "1"]), max_size=4).map("".join)
)
