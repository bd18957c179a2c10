"""Files by strangers in an open console: no screen ends, and no escape code or direction mark reaches the terminal."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from engine.journal.directory import RunDirectory
from tests.tui.conftest import Opener
from tests.tui.console_pilot import ConsolePilot
from tests.tui.recorded_runs import PLAN, make_run

pytestmark = pytest.mark.asyncio

HARM = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2028é"
"""Clears the screen, sets the window's title, sets a colour, turns the direction of writing, ends a line."""


def hostile_run(runs: Path) -> RunDirectory:
    """A run whose folder, settings, labels, events, log, plan, scores and report have HARM in every text."""
    made = make_run(runs, status="failed", error=HARM)
    run = RunDirectory(made.path.rename(runs / f"20260101T000000Z-{HARM.replace('/', '')}"))
    quoted = json.dumps(HARM)
    run.run_toml.write_text(run.run_toml.read_text().replace('"demo"', quoted).replace('"builtin:tiny"', quoted))
    (run.path / "labels.json").write_text(json.dumps({"tags": ["keep"], "note": HARM}))
    events: list[dict[str, Any]] = [
        {"kind": "warning", "code": HARM, "text": HARM, "fix": HARM},
        {"kind": "eval", "step": 3, "metrics": {HARM: 1.0}, "samples": [{"prompt": HARM, "answer": HARM}]},
        {"kind": "phase", "name": HARM, "detail": HARM},
        {"kind": "gpu", "index": 0, "used_bytes": 5, "utilisation_percent": 1, "temperature_celsius": 1,
         "power_watts": 1, "name": HARM},
    ]  # fmt: skip
    head: dict[str, Any] = {"seq": 99, "time": HARM, "stage": HARM, "rank": 0}
    with run.events.open("a") as file:
        file.writelines(json.dumps({**head, **event}, ensure_ascii=False) + "\n" for event in events)
        file.write('{"kind": "step", "seq": 1')  # half a line
    run.log.write_text(f"{HARM}\nTraceback (most recent call last):\n{HARM}: {'x' * 100_000}")
    (run.path / "plan.json").write_text(json.dumps({**PLAN, "verdict": HARM, "components": {HARM: 5}}))
    run.oom.mkdir(exist_ok=True)
    report = {"step": 1, "attempt": 1, "phase": HARM, "text": HARM, "device": HARM, "held": {HARM: 5}, "remedy": HARM}
    (run.oom / "step-1.json").write_text(json.dumps(report))
    return run


def assert_plain(pilot: ConsolePilot) -> None:
    harmful = {letter for letter in pilot.text.replace("\n", "") if unicodedata.category(letter) in ("Cc", "Cf", "Zl")}
    assert not harmful, f"{harmful} on\n{pilot.text!r}"
    assert not {letter for letter in pilot.screen.terminal_title() if unicodedata.category(letter)[0] == "C"}


@pytest.mark.parametrize("size", [(80, 24), (200, 50)], ids=str)
async def test_no_text_of_a_file_moves_the_cursor(
    console: Opener, runs: Path, empty_folder: Path, size: tuple[int, int]
) -> None:
    hostile_run(runs)
    other = make_run(runs, "other")
    os.utime(other.events, (0, 0))
    for kind in ("hardware", "recipes"):
        folder = empty_folder / "profiles" / kind
        folder.mkdir(parents=True)
        (folder / f"{HARM.replace('/', '')}.toml").write_text(f"title = {json.dumps(HARM)}\n# {HARM}\n[x{HARM}\n")
    async with console(*size) as pilot:
        for keys in (["1"], ["G"], ["space", "g", "space", "c"], ["G"], ["1"], ["g", "slash", "o", "w", "n", "enter"]):
            await pilot.press(*keys)
            assert_plain(pilot)
        await pilot.press("enter")
        await pilot.until(lambda: pilot.screen.screen_name == "run", "the run")
        await pilot.sees("owned")
        for key in ("tab", "tab", "tab", "b", "b", "M", "M", "v", "z", "z", "f", "escape", "o", "G", "escape", "n"):
            await pilot.press(key)
            assert_plain(pilot)
        for key in ("R", "G", "escape", "P", "G", "escape", "3", "g", "G", "j", "4", "5", "7", "question_mark"):
            await pilot.press(key)
            assert_plain(pilot)
