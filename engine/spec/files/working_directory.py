"""The working directory, also where it has been deleted under the process.

A console stays open for days, and the folder it was started in may go meanwhile. Nothing is found there any more, which
the searches say; that is no reason to end. Try: `pytest tests/spec/test_here.py`
"""

from __future__ import annotations

import os
from pathlib import Path


def working_directory() -> Path:
    """Absolute. Where the folder is gone, the name it had when the shell last spoke of it ($PWD), else the root."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        named = Path(os.environ.get("PWD", os.sep))
        return named if named.is_absolute() else Path(os.sep)
