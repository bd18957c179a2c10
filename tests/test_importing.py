"""Imports of the engine's libraries are not interrupted by the garbage collector."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
