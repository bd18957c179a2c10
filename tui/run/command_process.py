"""Runs a command on a run, such as `tunedeck eval RUN`, in a process of its own; its output goes into the run's folder.

Try: `E` on the list of runs
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean

TAIL_BYTES = 4096
"""How much of the end of a log is read for the message."""


async def run_command(directory: RunDirectory, command: str, ended: Callable[[str, bool], None]) -> None:
    """Run `tunedeck COMMAND PATH` without a terminal, in its own session, so that it goes on when the console is left;
    then call `ended` with a sentence, and whether the command failed."""
    from engine.launch.process import ENTRY_FILE  # slow to import: not before the first paint

    log = directory.path / f"{command}.log"
    try:
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", str(ENTRY_FILE), command, str(directory.path), start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
    except OSError as error:
        ended(f"tunedeck {command} cannot be started: {error.strerror or error}", True)
        return
    code = await process.wait()
    ended(ending(command, directory, log, code), bool(code))


def ending(command: str, directory: RunDirectory, log: Path, code: int) -> str:
    """What the command came to: its last lines if it failed, else where its result is."""
    if not code:
        result = {"eval": "the scores are on the Run screen: b", "merge": "the model is in merged/ of its folder"}
        return f"tunedeck {command} {clean(directory.name)} is done; {result.get(command, f'see {log.name}')}"
    try:
        lines = log.read_bytes()[-TAIL_BYTES:].decode("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    last = "; ".join(clean(line) for line in lines[-3:] if line.strip())
    return f"tunedeck {command} ended with exit code {code}: {last}"
