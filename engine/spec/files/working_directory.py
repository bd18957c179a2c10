"""Says where the process was started, also after that folder was deleted.

A console may run for days, while the folder in which it was started is deleted. The process continues, but finds no
files in that folder.

Try: `python -m pytest tests/spec/test_working_directory.py`
"""

from __future__ import annotations

import os
from pathlib import Path


def working_directory() -> Path:
    """The absolute path of the working directory; if it was deleted, the path in $PWD, else the root."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        named = Path(os.environ.get("PWD", os.sep))
        return named if named.is_absolute() else Path(os.sep)
