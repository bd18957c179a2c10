"""Output of commands: only JSON on stdout with --json, no escape codes in pipes, and no error message if the reader
closes the pipe.

Each command runs in a process of its own, because the interpreter itself handles closed pipes and the last flush.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.commands.shared import print_table
from engine.launch.process import ENTRY_FILE
from tests.cli.conftest import Tunedeck
from tests.cli.outcome import CONTROL, assert_block
from tests.cli.small_recipes import write_profile, write_recipe

TUNEDECK = [sys.executable, "-P", str(ENTRY_FILE)]


def test_a_reader_that_leaves_is_no_error() -> None:
    with subprocess.Popen(
        [*TUNEDECK, "recipes", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_output_that_cannot_be_written_is_exit_6() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*TUNEDECK, "recipes", "schema"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert_block(done.stderr, "standard output cannot be written", "fix:")
    assert done.returncode == 6


def test_a_failing_run_leaves_json_on_stdout_and_its_error_on_stderr(tunedeck: Tunedeck, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data='{"text": ""}\n')
    outcome = tunedeck("train", "-p", write_profile(tmp_path), "-r", recipe, "--json")
    events = [json.loads(line) for line in outcome.out.splitlines()]
    assert (events[-1]["kind"], events[-1]["exit_code"], outcome.code) == ("run_finished", 5, 5)
    assert_block(outcome.err, "text is empty", "fix:")
    assert json.loads(tunedeck("show", "last", "--json").out)["status"] == "failed"
    assert tunedeck("wait", "last").code == 5
    tunedeck("eval", "last").complains(2, "has no checkpoint", "fix:")


def test_detached_runs_are_told_in_one_json_document_and_can_be_waited_for(tunedeck: Tunedeck, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    started = tunedeck("train", "-p", write_profile(tmp_path), "-r", recipe, "--detach", "--json")
    told = json.loads(started.out)
    assert (set(told), started.code) == ({"run", "path", "pid"}, 0)
    assert tunedeck("wait", told["run"]).code == 0
    assert [run["status"] for run in json.loads(tunedeck("runs", "--json").out)] == ["done"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "-p", "demo", "-r", "demo", "--json"),
        ("advise", "-p", "demo", "-r", "demo", "--json"),
        ("profiles", "list", "--json"),
        ("profiles", "show", "demo", "--json"),
        ("recipes", "schema"),
        ("data", "-r", "demo", "--json"),
        ("runs", "--json"),
        ("doctor", "--json"),
    ],
    ids=" ".join,
)
def test_json_is_one_document_and_nothing_else(tunedeck: Tunedeck, arguments: tuple[str, ...]) -> None:
    json.loads(tunedeck(*arguments).out)


def test_nothing_but_text_goes_into_a_pipe(tunedeck: Tunedeck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    recipe = write_recipe(tmp_path)
    commands = [
        ("train", "-p", write_profile(tmp_path), "-r", recipe), ("show", "last"), ("runs",), ("log", "last"),
        ("data", "-r", recipe, "--show", 3), ("plan", "-p", "demo", "-r", "demo"),
        ("advise", "-p", "demo", "-r", "demo"),
        ("profiles", "list"), ("recipes", "show", "demo"), ("doctor",),
    ]  # fmt: skip
    for command in commands:
        outcome = tunedeck(*command)
        assert not CONTROL.search(outcome.out + outcome.err), command


def test_run_names_stay_whole_on_a_narrow_terminal(
    tunedeck: Tunedeck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    write_profile(tmp_path)
    recipe = write_recipe(tmp_path, data='{"text": ""}\n')
    tunedeck("train", "-p", "./here.toml", "-r", recipe, "--name", "a-name-of-some-length")
    (name,) = os.listdir(tmp_path / "runs")
    assert name in tunedeck("runs").out


def test_a_table_is_folded_only_if_it_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, first, second = "a" * 10, "b" * 20, "c" * 20
    as_wide = len(name) + len(first) + len(second) + 2 * len("  ")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns, lines in ((as_wide, 1), (as_wide - 1, 2)):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_table(["", "", ""], [[name, first, second]])
        told = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
        assert len(told) == lines
        assert max(map(len, told)) <= columns and told[0].startswith(name)
