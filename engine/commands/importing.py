"""Importing the engine's libraries in three quarters of the time.

torch, transformers and what they need make 400,000 objects while they are imported, all of which stay. The garbage
collector looks through them again and again meanwhile: 1.3 s of the 4.8 s of a processor that the engine's imports take
(`gc.callbacks` around them), and 0.3 s for each full collection of a run.

Try: `python -m pytest tests/test_importing.py`
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Nothing is collected while the block imports, and what it has made is never looked at again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
