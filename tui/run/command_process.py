"""Runs a command on a run, such as `tunedeck merge RUN`, in a process of its own; it prints into the run's folder.

Try: `W` on the list of runs
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean

TAIL_BYTES = 4096
"""How much of the end of a log is read for the message."""


async def run_command(
    directory: RunDirectory, command: str, words: Sequence[str], ended: Callable[[str, bool], None]
) -> None:
    """Run `tunedeck COMMAND PATH WORDS` without a terminal, in its own session, so that it goes on when the console is
    left; then call `ended` with a sentence, and whether the command failed."""
    from engine.launch.process import ENTRY_FILE  # slow to import: not before the first paint

    log = directory.path / f"{command}.log"
    try:
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", str(ENTRY_FILE), command, str(directory.path), *words, start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
    except OSError as error:
        ended(f"tunedeck {command} cannot be started: {error.strerror or error}", True)
        return
    code = await process.wait()
    ended(ending(command, directory, log, code), bool(code))


def ending(command: str, directory: RunDirectory, log: Path, code: int) -> str:
    """What the command came to: its last lines if it failed, else where its result is, which push prints last."""
    try:
        lines = log.read_bytes()[-TAIL_BYTES:].decode("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    last = [clean(line) for line in lines[-3:] if line.strip()]
    if code:
        return f"tunedeck {command} ended with exit code {code}: {'; '.join(last)}"
    result = "the model is in merged/ of its folder" if command == "merge" else (last or [f"see {log.name}"])[-1]
    return f"tunedeck {command} {clean(directory.name)} is done; {result}"
