"""Real samples of a choice, tokenised by a process of its own: the console never imports torch or transformers.

Try: `tunedeck data -r demo --show 2 --json` prints what it reads.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from engine.errors import TunedeckError
from engine.launch.process import ENTRY_FILE

SAMPLES = 8


async def read_samples(arguments: Sequence[str]) -> dict[str, Any]:
    """What `tunedeck data` reports for these arguments. Raises TunedeckError with what the command said.

    Cancelling the call ends the process.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(ENTRY_FILE), "data", *arguments, "--show", str(SAMPLES), "--json",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise TunedeckError(f"no process can be started to read them: {error.strerror or error}") from error
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        raise TunedeckError("\n".join(lines[-6:]) or f"the samples could not be read: exit code {process.returncode}")
    try:
        return dict(json.loads(out))
    except (ValueError, TypeError) as error:
        raise TunedeckError("what tunedeck data printed cannot be read", fix="run it in a shell") from error
