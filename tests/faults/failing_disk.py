"""A disk that fails once: processes below a folder get an error from the n-th change of a file, or are killed there.

`preload()` compiles failing_disk.c and sets LD_PRELOAD for the processes that are started afterwards; they share one
page of memory with this process, which says what fails and counts the changes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("failing_disk.c")

KILL, STOP, SET_CLOCK, MOVE = 0, -1, -2, -3
"""What may happen in place of an error, as in failing_disk.c."""


class _Page(ctypes.Structure):
    """`struct control` of failing_disk.c."""

    _fields_ = (
        ("count", ctypes.c_ulonglong), ("number", ctypes.c_ulonglong), ("error", ctypes.c_int), ("done", ctypes.c_int),
        ("lasting", ctypes.c_int), ("jump", ctypes.c_longlong), ("clock", ctypes.c_longlong),
        ("root", ctypes.c_char * 1024), ("what", ctypes.c_char * 1024), ("log", ctypes.c_char * 1024),
        ("source", ctypes.c_char * 1024), ("target", ctypes.c_char * 1024),
    )  # fmt: skip


@dataclass(frozen=True)
class CallSite:
    """Where a change comes from: those of one call site differ in the run, the step and the time alone."""

    call: str
    file: str
    """Below the folder, without the name of the run, numbers and what is drawn by chance."""
    stack: str
    """The lines of Python that led to the call, innermost first; empty in a thread or program without Python."""


class FailingDisk:
    """The control page of all processes that were started since `preload`."""

    def __init__(self, page: _Page, log: Path) -> None:
        self._page = page
        self._log = log

    @contextmanager
    def failing(
        self, root: Path, number: int, error: int, *, lasting: bool = False, jump_seconds: int = 0,
        moved: tuple[Path, Path] | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Inside the block, the `number`-th change of a file below `root` fails with `error`; if it is `lasting`, so do
        all after it. With number 0, changes are only counted. Instead of an error, KILL and STOP send a signal to the
        process, SET_CLOCK sets the clock of all processes by `jump_seconds` until the block ends, and MOVE renames the
        folder `moved[0]` to `moved[1]`; then the change is made."""
        page = self._page
        page.count, page.number, page.error, page.done, page.what = 0, number, error, 0, b""
        page.lasting, page.jump, page.clock = lasting, jump_seconds, 0
        page.source, page.target = map(os.fsencode, moved or ("", ""))
        page.root, page.log = os.fsencode(root), os.fsencode(self._log)
        self._log.unlink(missing_ok=True)
        try:
            yield
        finally:
            self._root, page.root, page.log, page.clock = f"{root}/", b"", b"", 0

    @property
    def pid(self) -> int:
        """The process to which the fault has happened; 0 before that."""
        return int(self._page.done)

    @property
    def count(self) -> int:
        """Changes in the last block."""
        return int(self._page.count)

    @property
    def what(self) -> str:
        """The call that failed and its path; empty if there were fewer changes."""
        return os.fsdecode(self._page.what)

    def call_sites(self) -> dict[int, CallSite]:
        """The call site of each change in the last block, by its number."""
        heads = re.split(r"^(\d+) (\w+) (.*)\n", self._log.read_text(errors="replace"), flags=re.MULTILINE)[1:]
        parts = zip(*(heads[start::4] for start in range(4)), strict=True)
        return {int(number): CallSite(call, _pattern(path.removeprefix(self._root)), stack)
                for number, call, path, stack in parts}  # fmt: skip


def _pattern(path: str) -> str:
    text = re.sub(r"^\d+T\d+Z-[^/]+", "RUN", path)
    return re.sub(r"[0-9a-f]{8,}|\d+|(?<=\.new-)[^/]*", "#", text)


def preload(folder: Path) -> FailingDisk:
    """Let processes that this one starts from now on have the failing disk; its library is compiled into `folder`."""
    library, control = folder / "failing_disk.so", folder / "control"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    control.write_bytes(bytes(ctypes.sizeof(_Page)))
    with control.open("r+b") as file:
        page = _Page.from_buffer(mmap.mmap(file.fileno(), 0))
    os.environ.update(LD_PRELOAD=str(library), FAILING_DISK=str(control))
    return FailingDisk(page, folder / "changes.log")
