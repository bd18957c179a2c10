"""A file system of its own that a test may fill, where one can be mounted (as root on Linux). Not a test module."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PIECE = 4096


@contextmanager
def small_disk(folder: Path, mebibytes: int = 16) -> Iterator[Path]:
    """A file system of its own below `folder`."""
    disk = folder / "disk"
    disk.mkdir()
    try:
        command: list[str | Path] = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", disk]
        mounted = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path, *, left: int = 0) -> Path:
    """A file that leaves no room on `disk`, or so many bytes; others may write there meanwhile."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        with suppress(OSError):  # it is full
            while file.write(bytes(PIECE)):
                pass
        file.truncate(max(0, file.tell() - left))
    return ballast
