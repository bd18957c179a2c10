"""Folders of the user that hold no settings.

Try: `python -c "from engine.spec.files.user_folders import cache_folder; print(cache_folder())"`
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of cached tokens and of the tables of `datasets`: $TUNEDECK_CACHE, else the user's cache folder."""
    if configured := os.environ.get("TUNEDECK_CACHE"):
        return Path(configured).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("tunedeck"))
