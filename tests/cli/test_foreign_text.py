"""Text from files of other people never reaches the terminal as it is: every command, with escape codes in every text
of every file that it reads. And every command where the terminal shows ASCII alone."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli import app
from engine.config.files.text import UNSAFE
from engine.journal.event_schema import EVENT_KINDS
from engine.launch.process import ENTRY_FILE
from tests.cli.conftest import Tunedeck
from tests.journal.event_fields import SOUND, backoff_fields, step_fields
from tests.journal.run_directories import RUN_TOML

EVIL = "x\x1b]52;c;ZXZpbA==\x07\x1b[31m\u202e\x9b2J\x7f\r\x08\u2066"
"""Sets the clipboard, colours, turns the text around, clears the screen, goes back."""
NAME = f"20261128T000000Z-{EVIL.replace('/', '')}"
RECIPE = """schema = 1
kind = "recipe"
title = "{title}"
[model]
id = "builtin:tiny"
[method]
kind = "lora"
rank = 4
[data]
max_length = 64
[[data.sources]]
name = "main"
path = "{path}"
[train]
max_steps = 2
batch_size = 2
"""
ROOT = Path(__file__).resolve().parents[2]


def of_type(kind: str) -> Any:
    """A value of a field of an event, with EVIL where it is text."""
    name = kind.rstrip("?")
    return {"text": EVIL, "texts": [EVIL], "any": EVIL, "table": {EVIL: EVIL}}.get(name, SOUND.get(name, {}))


def write_json(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def evil_events(run: Path) -> None:
    """One event of each kind."""
    lines = []
    for number, (kind, fields) in enumerate(EVENT_KINDS.items(), 1):
        event = {"seq": number, "time": "2026-11-28T00:00:00.000Z", "kind": kind, "stage": EVIL, "rank": 0}
        event |= {"step": step_fields(1), "backoff": backoff_fields(1, remedy=EVIL, phase=EVIL)}.get(kind, {})
        event |= {name: of_type(of) for name, of in {**fields.required, **fields.optional}.items() if name not in event}
        lines.append(json.dumps(event) + "\n")
    (run / "events.jsonl").write_text("".join(lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with runs, a chat, a queue, recipes, profiles and data, in which every text is EVIL."""
    quoted = json.dumps(EVIL)[1:-1].replace("\x7f", "\\u007f")
    for name in (NAME, "20261128T000001Z-second"):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        toml = RUN_TOML.format(name=quoted).replace('"demo"', f'"{quoted}"').replace("builtin:tiny", quoted)
        (run / "run.toml").write_text(toml + f'[provenance]\nset = ["{quoted}"]\nprofile = "{quoted}"\n')
        evil_events(run)
        (run / "engine.log").write_text(f"Traceback (most recent call last):\n  {EVIL}\n")
        write_json(run / "labels.json", {"tags": [EVIL], "note": EVIL})
        write_json(
            run / "plan.json", {"verdict": EVIL, "peak_bytes": 1, "deciding_phase": EVIL, "components": {EVIL: 1}}
        )
        write_json(run / "engine.json", {"pid": 1, "started": EVIL, "host": EVIL})
        report = {"step": 1, "phase": EVIL, "figures": {EVIL: 5}, "held": {EVIL: 5}, "largest": [EVIL],
                  "processes": [EVIL], "remedy": EVIL, "ways": [{"key": EVIL, "value": EVIL}]}  # fmt: skip
        write_json(run / "oom" / "step-1.json", report)
        scored = {"time": "2026-11-28T00:00:00Z", "step": 1, "metrics": {EVIL: 0.5}, "count": 2, "data": EVIL,
                  "weights": EVIL, "samples": [{"prompt": EVIL, "answer": EVIL}], "values": EVIL, "sources": [EVIL],
                  "notes": [EVIL]}  # fmt: skip
        (run / "evaluations.jsonl").write_text(json.dumps(scored) + "\n")
    chat = tmp_path / "runs" / ".chats" / f"c1{EVIL}"
    (chat / "control").mkdir(parents=True)
    write_json(chat / "chat.json", {"targets": [EVIL]})
    evil_events(chat)
    write_json(tmp_path / "runs" / ".queue" / "order.json", {"waiting": [NAME, EVIL], "current": None})
    for kind in ("recipe", "profile"):
        (tmp_path / f"{kind}.toml").write_text(
            f'schema = 1\nkind = "{kind}"\ntitle = "{quoted}"\n["{quoted}"]\nx = "{quoted}"\n'
        )
        (tmp_path / "profiles" / f"{kind}s").mkdir(parents=True)
        (tmp_path / "profiles" / f"{kind}s" / "evil.toml").write_text(
            f'schema = 1\nkind = "{kind}"\ntitle = "{quoted}"\n'
        )
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": f"{EVIL} {n}", EVIL: EVIL}) + "\n" for n in range(20))
    )
    (tmp_path / "data.toml").write_text(RECIPE.format(title=quoted, path="data.jsonl"))
    (tmp_path / "other.yml").write_text(f'base_model: "{quoted}"\nadapter: lora\n"{quoted}": "{quoted}"\n')
    (tmp_path / f"a{EVIL}").write_text("no archive")
    return tmp_path


COMMANDS = [
    ["runs"], ["runs", "--json"], ["show", "last"], ["show", NAME], ["show", NAME, "--oom"], ["show", NAME, "--json"],
    ["show", NAME, "--oom", "--json"], ["log", NAME], ["watch", NAME], ["compare", NAME, "second"],
    ["compare", NAME, "second", "--json"], ["compare", NAME, "second", "--csv"],
    ["compare", NAME, "second", "--markdown"], ["compare", NAME, "second", "--metric", EVIL], ["report", NAME],
    ["tag", NAME], ["tag", NAME, "good"], ["tag", NAME, "--remove", EVIL], ["wait", NAME], ["stop", NAME],
    ["pause", NAME], ["checkpoint", NAME], ["resume", NAME], ["sync", NAME], ["export", NAME, "--out", "x.tunedeck"],
    ["import", f"a{EVIL}"], ["merge", NAME], ["handover", NAME, "--vllm"], ["push", NAME, "a/b", "--yes"],
    ["eval", NAME], ["chat", NAME, "--prompt", "x"], ["chat", "--list"], ["queue", "list"], ["queue", "remove", NAME],
    ["recipes", "list"], ["recipes", "show", "./recipe.toml"], ["recipes", "check", "./recipe.toml", "evil"],
    ["recipes", "check", "./recipe.toml", "--json"], ["recipes", "import", "recipe.toml"],
    ["recipes", "import", "other.yml"], ["profiles", "list"], ["profiles", "check", "./profile.toml"],
    ["profiles", "show", "evil"], ["data", "-r", "./data.toml", "--show", "2"], ["data", "-r", "./data.toml", "--json"],
    ["plan", "-p", "demo", "-r", "./data.toml"], ["advise", "-p", "demo", "-r", "./data.toml"],
    ["train", "-p", "demo", "-r", "./recipe.toml"], ["launch", "--help"],
    ["models", EVIL], ["doctor"], ["rename", NAME, EVIL], ["rename", NAME, "new"], ["rm", EVIL], ["rm", "last"],
]  # fmt: skip


def test_no_command_prints_control_characters_of_a_file(folder: Path, tunedeck: Tunedeck) -> None:
    tried = {command[0] for command in COMMANDS}
    known = {command.name or command.callback.__name__ for command in app.registered_commands
             if not command.hidden and command.callback is not None}  # fmt: skip
    assert known - tried <= {"schema"}, "a command that this test does not know"
    for command in COMMANDS:
        outcome = tunedeck(*command)
        for text in (outcome.out, outcome.err):
            found = UNSAFE.search(text.replace("\n", "").replace("\t", ""))
            assert found is None, (command, text[max(0, found.start() - 80) : found.end() + 20])
        assert "tunedeck: unexpected " not in outcome.err, (command, outcome.err)


def test_commands_write_through_one_function() -> None:
    """Nothing in engine/commands writes to a stream by itself, but for a copy of a file, a counter that is drawn again,
    and the reporter of a run."""
    allowed = {"shared.py": 1, "library.py": 1, "models.py": 2, "follow.py": 1}
    for file in sorted((ROOT / "engine" / "commands").glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = [ast.unparse(call.func) for call in calls]
        ends = (".stdout.write", ".stderr.write", "_stream.write", ").write")
        writes = [name for name in names if name.endswith(ends) or name in ("print", "typer.echo", "typer.secho")]
        assert len(writes) == allowed.get(file.name, 0), (file.name, writes)


IN_ASCII = [
    ["runs"], ["show", "last"], ["log", "last"], ["chat", "--list"], ["recipes", "list"], ["import", "a"],
    ["recipes", "check", "./r\u00e4zept.toml"], ["data", "-r", "./r\u00e4zept.toml"], ["r\u00fcn"],
]  # fmt: skip


@pytest.mark.parametrize("variables", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}])
def test_what_the_terminal_cannot_show_is_replaced(tmp_path: Path, variables: dict[str, str]) -> None:
    run = tmp_path / "runs" / "20261128T000000Z-x"
    run.mkdir(parents=True)
    (run / "run.toml").write_text(RUN_TOML.format(name="\u00d7\u4e2d"), "utf-8")
    evil_events(run)
    (run / "engine.log").write_text("\u00e9\u4e2d \u00d7\n", "utf-8")
    (tmp_path / "r\u00e4zept.toml").write_text(RECIPE.format(title="\u00d7", path="d\u00e4ta.jsonl"), "utf-8")
    (tmp_path / "d\u00e4ta.jsonl").write_text('{"text": "\u00d7 \u4e2d one two three"}\n' * 4, "utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("LANG", "LC_ALL", "PYTHONUTF8")}
    for command in IN_ASCII:
        done = subprocess.run(
            [sys.executable, "-P", str(ENTRY_FILE), *command], cwd=tmp_path, env={**environment, **variables},
            capture_output=True, check=False,
        )  # fmt: skip
        text = done.stdout + done.stderr
        assert text.isascii() and b"Traceback" not in text and b"unexpected" not in text, (command, text)
