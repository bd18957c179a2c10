"""Imports the heavy libraries with garbage collection switched off, which saves about a quarter of the time.

torch, transformers and what they import create 400,000 objects that are never freed. While they are created, the
garbage collector scans them again and again: 1.3 s of the 4.8 s of processor time that the engine's imports take
(measured with `gc.callbacks`), and 0.3 s for each full collection of a run.

Try: `python -m pytest tests/test_importing.py`
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Switch garbage collection off while the block imports, and exempt the objects created in the block from all later
    collections.

    Raises EnvironmentProblem if packages for training are not installed.
    """
    from engine.launch.training_packages import require_training_packages

    enabled = gc.isenabled()
    gc.disable()
    try:
        require_training_packages()
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
