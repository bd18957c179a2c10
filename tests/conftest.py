"""What all tests share: nothing they do reaches the user's own folders, caches or the network."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

FOLDERS = ("TUNEDECK_STATE", "TUNEDECK_CACHE", "TUNEDECK_CONFIG", "HF_HOME")
ISOLATED = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Before anything is imported: the hub's client reads its folders and its offline switch once, at import."""
    folder = tempfile.TemporaryDirectory(prefix="tunedeck-tests-", ignore_cleanup_errors=True)
    config.stash[ISOLATED] = folder
    os.environ.update({name: str(Path(folder.name, name.lower())) for name in FOLDERS})
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.pop("TUNEDECK_RUNS", None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: recoveries and the engine's start collect garbage, and need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folders again."""
    config.stash[ISOLATED].cleanup()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many allocations were made to fail (the tests that do it record the number)."""
    # They record it when they are torn down, and what passes there is filed under no outcome.
    everything = [report for reports in terminalreporter.stats.values() for report in reports]
    ends = [report for report in everything if getattr(report, "when", "") == "teardown"]
    faults = sum(value for report in ends for name, value in report.user_properties if name == "faults")
    if faults:
        terminalreporter.write_line(f"{faults} allocation faults tried")
