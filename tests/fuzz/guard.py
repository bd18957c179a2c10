"""Watches what code under test does: no process is started, nothing is sent, no file is opened outside one folder and
those of Python and its libraries, and none is written there. Python's own audit events say so (PEP 578); they cannot be
avoided from inside a template or a file.

The one process that may be started is the fork in which templates are rendered (`engine.data.killable`). It is watched
as well: what it does reaches this process through shared memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import sysconfig
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


ROOT = Path(__file__).resolve().parents[2]
READABLE = tuple(
    os.path.realpath(str(place))
    for place in (*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, ROOT, "/proc", "/sys", "/dev/urandom",
                  "/usr/share", "/usr/lib", "/etc/mime.types", "/etc/localtime", "/etc/os-release")
)  # fmt: skip
"""Where Python, its libraries and this project lie, and what they ask the system."""


class _Watch:
    allowed: tuple[str, ...] | None = None
    seen: tuple[str, ...] = ()
    process = os.getpid()
    of_forks = mmap.mmap(-1, 4096)
    """What a fork of this process did first, of what is forbidden."""


_watch = _Watch()


def _see(what: str) -> None:
    if os.getpid() == _watch.process:
        _watch.seen += (what,)
    elif not _watch.of_forks[0]:
        _watch.of_forks[:1000] = what.encode("utf-8", "replace")[:1000].ljust(1000, b"\0")


def _renders() -> bool:
    """Whether the fork is that of a process that can be ended."""
    frame = sys._getframe(2)
    return frame.f_globals.get("__name__") == "engine.data.killable"


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch.allowed is None:
        return
    if event in FORBIDDEN:
        if event != "os.fork" or not _renders():
            _see(f"{event} {str(arguments)[:200]}")
    elif event == "open" and isinstance(arguments[2], int):
        path = os.path.realpath(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes) else ""
        if arguments[2] & WRITING:
            name = os.fsdecode(arguments[0]) if path else ""
            in_open_folder = arguments[1] is None and os.sep not in name and name.endswith(".lock")  # see `locked`
            if path and not in_open_folder and not path.startswith(_watch.allowed):
                _see(f"{path} is opened for writing")
        elif path and os.path.isabs(os.fsdecode(arguments[0])) and not path.startswith((*_watch.allowed, *READABLE)):
            # A path that is not absolute may be one below an open folder, which the event does not name.
            _see(f"{path} is opened")
    elif event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod"):
        given = [os.fsdecode(each) for each in arguments if isinstance(each, str | bytes | Path)]
        inside = any(isinstance(each, int) and each >= 0 for each in arguments[1:])  # relative to an open folder
        paths = [] if inside and not os.path.isabs(given[0]) else [os.path.realpath(each) for each in given]
        for path in paths:
            if not path.startswith(_watch.allowed):
                _see(f"{event} {path}")


sys.addaudithook(_hook)  # for the life of the process; it does nothing outside `guarded`


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Inside the block nothing may be executed, sent, or read or written outside `folder`, the folders of this test
    session and /dev/null; Python's and the project's files may be read. Raises AssertionError after it otherwise."""
    own = [os.path.realpath(text) for name, text in os.environ.items() if name.startswith(("TUNEDECK_", "HF_HOME"))]
    _watch.allowed = (str(folder.resolve()) + os.sep, *own, "/dev/null", os.path.join(tempfile.gettempdir(), "tmp"))
    _watch.seen, _watch.process = (), os.getpid()
    _watch.of_forks[:1000] = bytes(1000)
    compiled, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a first import writes beside its source
    try:
        yield
    finally:
        _watch.allowed, sys.dont_write_bytecode = None, compiled
    if _watch.of_forks[0]:
        _watch.seen += (_watch.of_forks[:1000].rstrip(b"\0").decode(),)
    assert not _watch.seen, _watch.seen
