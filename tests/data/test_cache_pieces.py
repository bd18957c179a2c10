"""The token cache is written so that a killed process loses little: a later one goes on behind what was committed, and
the tokens are those of an undisturbed build, for any number of workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.data import prepare, store, workers
from engine.data.prepare import PreparedData, prepare_data
from engine.errors import EnvironmentProblem
from tests.data.specs import run_spec, tokenizer

Write = Callable[..., str]
ROWS: list[dict[str, Any]] = [{"text": f"row {number} " + "x" * (number % 40)} for number in range(3000)]
ROWS[7] = {"text": ""}
ROWS[2100] = {"text": " "}

BUILD = """
import sys
from engine.data import store
from engine.data.prepare import prepare_data
from tests.data.specs import run_spec, tokenizer
store.COMMIT_SECONDS = 0.0
commit = store.StoreWriter._commit
def committed(writer):
    commit(writer)
    print(writer.counts[-1].read, flush=True)
    sys.stdin.readline()
store.StoreWriter._commit = committed
sources = [{"name": str(number), "path": path} for number, path in enumerate(sys.argv[1].split(","))]
prepare_data(run_spec({"sources": sources, "workers": 0}), tokenizer())
"""


def prepared(paths: list[str], notify: Callable[[str], None] = lambda text: None, **data: Any) -> PreparedData:
    sources = [{"name": str(number), "path": path} for number, path in enumerate(paths)]
    return prepare_data(run_spec({"sources": sources, **data}), tokenizer(), notify=notify)


def same(one: PreparedData, other: PreparedData) -> bool:
    columns = [
        (vars(one.train.columns)[name], vars(other.train.columns)[name]) for name in ("ids", "targets", "offsets")
    ]
    return all(np.array_equal(*pair) for pair in columns) and one.report.as_json() == other.report.as_json()


@pytest.mark.parametrize("source", [0, 1])
def test_a_killed_build_is_gone_on_with_and_gives_the_same_tokens(
    source: int, jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [jsonl(ROWS, "a.jsonl"), jsonl(ROWS[::-1], "b.jsonl")]
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, ",".join(paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    for _ in range(7 if source else 1):
        assert process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    (draft,) = (tmp_path / "cache" / "tokens").glob(".*-draft")
    assert (draft / "progress.json").exists()
    said: list[str] = []
    continued = prepared(paths, said.append)
    assert any("continuing after" in line for line in said)
    assert not list((tmp_path / "cache" / "tokens").glob(".*-draft"))
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "other"))
    assert same(continued, prepared(paths))


@pytest.mark.parametrize("harm", ["cut", "garbled"])
def test_a_draft_that_cannot_be_gone_on_with_is_built_again(
    harm: str, jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(ROWS)
    with monkeypatch.context() as patched:
        _fail_after(patched, 2)
        with pytest.raises(EnvironmentProblem):
            prepared([path])
    (draft,) = (tmp_path / "cache" / "tokens").glob(".*-draft")
    if harm == "cut":
        os.truncate(draft / "ids.npy", 200)
    else:
        (draft / "progress.json").write_text("{")
    said: list[str] = []
    found = prepared([path], said.append)
    assert not any("continuing after" in line for line in said)
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "other"))
    assert same(found, prepared([path]))


def _fail_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A worker that is killed after `count` pieces."""
    monkeypatch.setattr(store, "COMMIT_SECONDS", 0.0)
    given = workers.tokenise_rows

    def failing(*rest: Any, **keys: Any) -> Iterator[workers.Piece]:
        for number, piece in enumerate(given(*rest, **keys)):
            if number == count:
                raise EnvironmentProblem("killed")
            yield piece

    monkeypatch.setattr(prepare, "tokenise_rows", failing)


def test_auto_takes_processes_where_the_rate_makes_them_worth_it(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = prepared([path := jsonl(ROWS)], workers=0)
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(workers, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(workers, "START_SECONDS", 1e-9)
    monkeypatch.setattr(workers, "MOST_WORKERS", 2)
    asked: list[int] = []
    given = workers._in_processes

    def noted(*rest: Any) -> Iterator[workers.Piece]:
        asked.append(rest[3])
        return given(*rest)

    monkeypatch.setattr(workers, "_in_processes", noted)
    assert same(alone, prepared([path]))
    assert asked == [min(2, len(os.sched_getaffinity(0)))] if len(os.sched_getaffinity(0)) > 1 else not asked


def test_few_seconds_of_work_are_no_reason_for_processes() -> None:
    assert workers.workers_for(10.0) == 0
    assert workers.workers_for(1e6) == min(len(os.sched_getaffinity(0)), 16) or workers.workers_for(1e6) == 0


def test_progress_names_the_rate_and_the_time_left(jsonl: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "PROGRESS_SECONDS", 0.0)
    ticks = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    said: list[str] = []
    prepared([jsonl(ROWS)], said.append, workers=0)
    assert any("512 of 3,000 rows (17 %)" in line and "rows/s" in line and "left" in line for line in said)


def test_prepare_makes_the_tokens_that_a_run_reads(jsonl: Write, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'schema = 1\nkind = "recipe"\n[model]\nid = "builtin:tiny"\n[data]\n[[data.sources]]\nname = "0"\n'
        f'path = "{jsonl(ROWS)}"\n'
    )
    done = CliRunner().invoke(app, ["data", "-r", str(recipe), "--prepare"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("train: 2,998 sequences, ")
    (entry,) = (path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir())
    before = (entry / "ids.npy").stat().st_mtime_ns
    prepared([str(tmp_path / "rows.jsonl")])
    assert (entry / "ids.npy").stat().st_mtime_ns == before
