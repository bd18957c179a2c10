"""Watches what code under test does: no process is started, nothing is sent, no file is opened for writing outside one
folder. Python's own audit events say so (PEP 578); they cannot be avoided from inside a template or a file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "ctypes.dlopen", "webbrowser.open",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Watch:
    allowed: tuple[str, ...] | None = None
    seen: tuple[str, ...] = ()


_watch = _Watch()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch.allowed is None:
        return
    if event in FORBIDDEN:
        _watch.seen += (f"{event} {str(arguments)[:200]}",)
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        path = os.path.realpath(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes) else ""
        if path and not path.startswith(_watch.allowed):
            _watch.seen += (f"{path} is opened for writing",)
    elif event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod"):
        given = [os.fsdecode(each) for each in arguments if isinstance(each, str | bytes | Path)]
        inside = any(isinstance(each, int) and each >= 0 for each in arguments[1:])  # relative to an open folder
        paths = [] if inside and not os.path.isabs(given[0]) else [os.path.realpath(each) for each in given]
        _watch.seen += tuple(f"{event} {path}" for path in paths if not path.startswith(_watch.allowed))


sys.addaudithook(_hook)  # for the life of the process; it does nothing outside `guarded`


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Inside the block nothing may be executed, sent, or written outside `folder`, the folders of this test session and
    /dev/null. Raises AssertionError after it otherwise."""
    own = [os.path.realpath(text) for name, text in os.environ.items() if name.startswith(("TUNEDECK_", "HF_HOME"))]
    _watch.allowed = (str(folder.resolve()), *own, "/dev/null", os.path.join(tempfile.gettempdir(), "tmp"))
    _watch.seen = ()
    compiled, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a first import writes beside its source
    try:
        yield
    finally:
        _watch.allowed, sys.dont_write_bytecode = None, compiled
    assert not _watch.seen, _watch.seen
