"""Doctor: the findings of `tunedeck doctor` about this machine, each with its fix.

`tunedeck doctor` runs in a separate process, because it needs torch, which the console never imports.

Try: the digit of Doctor in the title line; headless: `tunedeck doctor`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from textual.content import Content
from textual.timer import Timer
from textual.worker import get_current_worker

from engine.journal.event_text import clean
from engine.launch.process import ENTRY_FILE
from tui.keys import bindings
from tui.screens.text_screen import TextScreen

TIMEOUT_SECONDS = 60.0
"""Importing torch from a cold network disk takes long, but hardly longer than this."""

FINDING_STATES = {
    "ok": ("✓", "$good"), "note": ("·", "$muted"), "missing": ("○", "$caution"), "problem": ("✗", "bold $bad"),
}  # fmt: skip
"""Glyph and style for each state of a finding."""

TOPIC_WIDTH = 14
"""Cells of the topics at least."""

STATE_WIDTH = 9


class DoctorScreen(TextScreen):
    """The screen that runs `tunedeck doctor` and shows each of its findings in a row."""

    screen_name = "doctor"
    BINDINGS = bindings("doctor")

    def __init__(self) -> None:
        super().__init__()
        self._findings: list[dict[str, Any]] = []
        self._status = ""
        """Why there are no findings; empty while the machine is asked."""
        self._began = 0.0
        self._clock: Timer | None = None

    def on_mount(self) -> None:
        """Run `tunedeck doctor` as soon as the screen opens."""
        self.do_again()

    def do_again(self) -> None:
        """Discard the findings and run `tunedeck doctor` again."""
        self._findings, self._status, self._began = [], "", time.monotonic()
        self._stop_clock()
        self._clock = self.set_interval(1.0, self.refill)
        self.refill()
        self.run_worker(self._ask, thread=True, exclusive=True, exit_on_error=False)

    def title_detail(self) -> str:
        """The number of findings that report something missing or a problem."""
        count = sum(finding.get("state") in ("missing", "problem") for finding in self._findings)
        return f"{count} to fix" if count else ""

    def text_lines(self, width: int) -> Sequence[Content]:
        """The lines to show: each finding with its fix, wrapped at `width`; the status of the command while there are
        no findings."""
        if not self._findings:
            asked = f"checking this machine (imports torch): {time.monotonic() - self._began:.0f} s"
            return [Content.styled(f" {line}", "$muted") for line in (self._status or asked).splitlines()]
        topics = max(len(clean(finding.get("topic", ""))) for finding in self._findings) + 1
        topics = max(TOPIC_WIDTH, min(topics, width // 3))
        return [line for finding in self._findings for line in self._finding(finding, width, topics)]

    def _finding(self, finding: dict[str, Any], width: int, topics: int) -> Sequence[Content]:
        """The lines of one finding; its topic takes `topics` cells."""
        state = str(finding.get("state"))
        glyph, style = FINDING_STATES.get(state, ("·", ""))
        text = Content(clean(finding.get("text", "")))
        if finding.get("fix"):
            text = Content.assemble(text, "; ", (f"fix: {clean(finding['fix'])}", "$info"))
        lines = text.wrap(max(20, width - topics - STATE_WIDTH - 4))
        topic = f" {clean(finding.get('topic', ''))[: topics - 1]:<{topics}}"
        first = Content.assemble(
            (topic, "bold"), (f"{self.glyphs(glyph)} {state:<{STATE_WIDTH - 2}} ", style), lines[0]
        )
        blank = " " * (topics + STATE_WIDTH + 2)
        return [first, *(Content.assemble(blank, line) for line in lines[1:])]

    def _ask(self) -> None:
        """Run `tunedeck doctor` in a thread, and pass its findings to the screen."""
        worker = get_current_worker()
        command = [sys.executable, "-P", str(ENTRY_FILE), "doctor", "--json", "--runs", str(self.console.runs_dir)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
                stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONSAFEPATH": "1"},
            )  # fmt: skip
            findings, status = json.loads(done.stdout)["findings"], ""
        except subprocess.TimeoutExpired:
            findings, status = [], f"no answer within {TIMEOUT_SECONDS:.0f} s; try: tunedeck doctor"
        except OSError as error:
            findings, status = [], f"tunedeck doctor cannot be started: {error.strerror or error}"
        except (ValueError, KeyError, TypeError):
            findings, status = [], f"the output cannot be read:\n{done.stderr.strip()}\ntry: tunedeck doctor"
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show_answer, findings, status)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.stop()

    def _show_answer(self, findings: list[dict[str, Any]], status: str) -> None:
        self._stop_clock()
        self._findings, self._status = findings, "\n".join(clean(line) for line in status.splitlines())
        self.refill()
        self.refresh_title_and_footer()
