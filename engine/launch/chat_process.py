"""Starts the process of a chat, in an OS session of its own: a closed terminal or console does not end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from engine.journal.chats import create_chat, is_answering, list_chats
from engine.journal.directory import RunDirectory
from engine.journal.liveness import identify, record_engine, refuse_if_claimed
from engine.launch.process import ENTRY_FILE, engine_environment
from engine.launch.requirements import require_training_packages


def begin_chat(runs_dir: Path, asked: dict[str, Any], *, trust_remote_code: bool = False) -> RunDirectory:
    """Create a chat and start its process. Raises EnvironmentProblem if it cannot be started."""
    require_training_packages()
    directory = create_chat(runs_dir, asked)
    _start(directory, trust_remote_code)
    return directory


def take_up_chat(directory: RunDirectory, *, trust_remote_code: bool = False) -> bool:
    """Start the process of a chat that has ended again; returns False if it still answers."""
    if is_answering(directory):
        return False
    require_training_packages()
    for path in directory.control.glob("*.json"):
        path.unlink(missing_ok=True)  # requests to the process that ended
    _start(directory, trust_remote_code)
    return True


def find_chat(name: str, runs_dir: Path) -> RunDirectory:
    """The chat whose folder's name begins with `name`, or the newest for "last". Raises UsageError if none or several
    do."""
    chats = list_chats(runs_dir)
    found = chats[:1] if name == "last" else [chat for chat in chats if chat.name.startswith(name)]
    if len(found) != 1:
        raise UsageError(
            f"{len(found) or 'no'} chats in {runs_dir} begin with {name!r}",
            expected="the name of one, or last",
            fix="tunedeck chat --list",
        )
    return found[0]


def _start(directory: RunDirectory, trust_remote_code: bool) -> None:
    refuse_if_claimed(directory)
    flags = ["--trust-remote-code"] if trust_remote_code else []
    with directory.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", str(ENTRY_FILE), "_chat", str(directory.path), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=engine_environment(),
            start_new_session=True,
        )
    identity = identify(process.pid)
    try:
        if identity is not None:
            record_engine(directory, identity)
    except OSError:
        os.killpg(process.pid, signal.SIGKILL)  # on a full disk: what cannot be found again is worse than none
        process.wait()
        raise
    _CHILDREN.append(process)


_CHILDREN: list[subprocess.Popen[bytes]] = []
"""Chats that this process started. They are polled when the next one is looked at, so that none stays a zombie."""


def reap_chats() -> None:
    _CHILDREN[:] = [process for process in _CHILDREN if process.poll() is None]
