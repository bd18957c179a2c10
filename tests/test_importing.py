"""Imports of the engine's libraries are not interrupted by the garbage collector."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COUNTED = """
import gc
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
from engine.commands.shared import importing
collections.clear()
with importing():
    import torch
    assert not collections, collections
    made = len(gc.get_objects())
assert gc.isenabled()
assert gc.get_freeze_count() > 0.9 * made > 10_000, (gc.get_freeze_count(), made)
assert len(gc.get_objects()) < 1_000  # of those that a collection looks at
"""


def test_nothing_is_collected_meanwhile_and_what_was_imported_is_not_looked_at_again() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", COUNTED],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


AT_EXIT = """
import atexit, gc, sys
sys.path.insert(0, {folder!r})
import triton
assert triton.__file__.startswith({folder!r})
atexit.register(lambda: print(gc.get_freeze_count()))  # called after what is registered later
from engine.commands.shared import importing
with importing():
    pass
"""


@pytest.mark.parametrize(("version", "frozen"), [("3.7.1", True), ("3.9.0", False)])
def test_at_exit_triton_finds_its_objects_collected(tmp_path: Path, version: str, frozen: bool) -> None:
    """Triton 3.9 prints 25 lines about those that are not, on standard error of every command."""
    (tmp_path / "triton.py").touch()
    described = tmp_path / f"triton-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", AT_EXIT.format(folder=str(tmp_path))],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 0) == frozen
