"""The working directory, also after it was deleted.

A console stays open for days, and the folder that it was started in may be deleted meanwhile. Files are not found there
any more, but the process goes on.

Try: `python -m pytest tests/spec/test_working_directory.py`
"""

from __future__ import annotations

import os
from pathlib import Path


def working_directory() -> Path:
    """The absolute path of the working directory; where it was deleted, $PWD, else the root."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        named = Path(os.environ.get("PWD", os.sep))
        return named if named.is_absolute() else Path(os.sep)
