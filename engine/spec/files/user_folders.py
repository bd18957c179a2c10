"""Finds the user's cache folder.

Try: `python -c "from engine.spec.files.user_folders import cache_folder; print(cache_folder())"`
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder for cached tokens, tables of the package `datasets`, and simulations: $TUNEDECK_CACHE, else Tunedeck's
    folder in the platform's cache folder."""
    if configured := os.environ.get("TUNEDECK_CACHE"):
        return Path(configured).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("tunedeck"))
