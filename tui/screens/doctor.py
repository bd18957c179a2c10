"""Doctor: what this machine offers a run and what is missing, as `tunedeck doctor` finds it.

Asked of a process of its own: the answer needs torch, and torch stays out of the console.

Try: the digit of Doctor in the title line; headless: `tunedeck doctor`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from textual.content import Content
from textual.worker import get_current_worker

from engine.journal.event_text import clean
from engine.launch.process import ENTRY_FILE
from tui.keys import bindings
from tui.screens.text_screen import ReadingScreen

PATIENCE_SECONDS = 60.0
"""Importing torch from a cold network disk takes long; longer than this is a finding of its own."""

STATES = {"ok": ("✓", "$good"), "note": ("·", "$muted"), "missing": ("○", "$caution"), "problem": ("✗", "bold $bad")}

TOPIC_WIDTH = 14
STATE_WIDTH = 9


class DoctorScreen(ReadingScreen):
    """Findings, one a row, each with its fix."""

    where = "doctor"
    BINDINGS = bindings("doctor")

    def __init__(self) -> None:
        super().__init__()
        self._findings: list[dict[str, Any]] = []
        self._said = "asking"

    def on_mount(self) -> None:
        """Ask at once."""
        self.do_again()

    def do_again(self) -> None:
        """Ask once more."""
        self._findings, self._said = [], "asking this machine; importing torch takes a few seconds"
        self.refill()
        self.run_worker(self._ask, thread=True, exclusive=True, exit_on_error=False)

    def about(self) -> str:
        """How many findings want something done."""
        wanting = sum(finding.get("state") in ("missing", "problem") for finding in self._findings)
        return f"{wanting} to mend" if wanting else ""

    def lines(self, width: int) -> Sequence[Content]:
        """A row a finding; its fix under it."""
        if not self._findings:
            return [Content.styled(f" {line}", "$muted") for line in self._said.splitlines()]
        return [line for finding in self._findings for line in self._finding(finding, width)]

    def _finding(self, finding: dict[str, Any], width: int) -> Sequence[Content]:
        state = str(finding.get("state"))
        glyph, style = STATES.get(state, ("·", ""))
        text = Content(clean(finding.get("text", "")))
        if finding.get("fix"):
            text = Content.assemble(text, "; ", (f"fix: {clean(finding['fix'])}", "$info"))
        lines = text.wrap(max(20, width - TOPIC_WIDTH - STATE_WIDTH - 4))
        head = (f" {clean(finding.get('topic', '')):<{TOPIC_WIDTH}}", f"{self.draw(glyph)} {state:<{STATE_WIDTH - 2}} ")
        blank = " " * (TOPIC_WIDTH + STATE_WIDTH + 2)
        first = Content.assemble((head[0], "bold"), (head[1], style), lines[0])
        return [first, *(Content.assemble(blank, line) for line in lines[1:])]

    def _ask(self) -> None:
        """In a thread: run the command and read its answer."""
        worker = get_current_worker()
        command = [sys.executable, "-P", str(ENTRY_FILE), "doctor", "--json", "--runs", str(self.console.runs_dir)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
                stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONSAFEPATH": "1"},
            )  # fmt: skip
            findings, said = json.loads(done.stdout)["findings"], ""
        except subprocess.TimeoutExpired:
            findings, said = [], f"no answer within {PATIENCE_SECONDS:.0f} s; try: tunedeck doctor"
        except OSError as error:
            findings, said = [], f"cannot be asked: {error.strerror or error}"
        except (ValueError, KeyError, TypeError):
            findings, said = [], f"no answer that can be read:\n{done.stderr.strip()}\ntry: tunedeck doctor"
        if not worker.is_cancelled:
            self.app.call_from_thread(self._answer, findings, said)

    def _answer(self, findings: list[dict[str, Any]], said: str) -> None:
        self._findings, self._said = findings, "\n".join(clean(line) for line in said.splitlines())
        self.refill()
        self.refresh_bars()
