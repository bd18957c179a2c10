"""What all tests share: no test touches the user's own folders and caches, or the network.

And the order they run in: groups of ranks on one worker, slow files, then fast ones.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDERS = ("TUNEDECK_STATE", "TUNEDECK_CACHE", "TUNEDECK_CONFIG", "HF_HOME")
RANKS = "tests/distributed/"
"""Tests that start two to four ranks, which wait for each other all the time. Two such groups at once on two cores took
four tenths more of the processors than one after the other, so one worker gets all of these files."""

SLOW = (
    RANKS,
    "tests/train/",
    "tests/stages/",
    "tests/twins/",
    "tests/package/",
    "tests/spec/test_schema_walk.py",
    "tests/docs/",
    "tests/simulate/",
    "tests/test_gpu_suites.py",
    "tests/cli/test_bad_runs.py",
    "tests/cli/test_queue.py",
    "tests/cli/test_evaluate.py",
    "tests/cli/test_clean_output.py",
    "tests/cli/test_full_disk.py",
    "tests/cli/test_deleted_folder.py",
    "tests/cli/test_bad_input.py",
    "tests/tui/launch/test_simulated.py",
    "tests/tui/test_tmux.py",
    "tests/tui/test_console.py",
    "tests/tui/test_terminal.py",
    "tests/tui/screens/test_library.py",
    "tests/tui/screens/test_scores.py",
    "tests/budget/test_capacity_runs.py",
    "tests/budget/test_fit_on_real_runs.py",
    "tests/budget/test_simulated.py",
    "tests/budget/test_accuracy.py",
    "tests/budget/test_vision.py",
    "tests/budget/test_inference.py",
    "tests/budget/test_rounding.py",
    "tests/budget/test_hub.py",
    "tests/budget/test_dense_layers.py",
    "tests/budget/test_router_statistics.py",
    "tests/budget/test_plans_table.py",
    "tests/data/test_prepare.py",
    "tests/data/test_command.py",
    "tests/data/test_stock_templates.py",
    "tests/device/test_conformance.py",
    "tests/device/test_torture.py",
    "tests/device/test_doctor.py",
    "tests/device/test_determinism.py",
    "tests/device/test_environment.py",
    "tests/model/test_attention.py",
    "tests/model/test_family_page.py",
    "tests/model/test_expert_balance.py",
    "tests/journal/test_follow.py",
    "tests/model/test_offload.py",
    "tests/model/test_liger.py",
    "tests/evaluate/test_scoring.py",
)
"""Files and folders that `make check` leaves out."""

ISOLATED = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment variables of folders and offline mode before anything is imported, because huggingface_hub
    reads them once, at import."""
    folder = tempfile.TemporaryDirectory(prefix="tunedeck-tests-", ignore_cleanup_errors=True)
    config.stash[ISOLATED] = folder
    os.environ.update({name: str(Path(folder.name, name.lower())) for name in FOLDERS})
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.pop("TUNEDECK_RUNS", None)


@pytest.fixture(autouse=True)
def _unknown_lengths() -> Iterator[None]:
    """Delete the stored sequence lengths after each test, so that no plan depends on data that an earlier test has
    read."""
    yield
    shutil.rmtree(Path(os.environ["TUNEDECK_CACHE"], "lengths"), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # -m and xdist read the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and assign the tests that must run on one worker to a group: all tests with groups of ranks,
    else the tests of one file. Then sort: tests of ranks, other slow files, fast files. Fast files come last, so that
    all workers end at about the same time."""
    for item in items:
        ranks, slow = item.nodeid.startswith(RANKS), item.nodeid.startswith(SLOW)
        item.add_marker(pytest.mark.xdist_group("ranks" if ranks else item.nodeid.partition("::")[0]))
        if slow:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: (not item.nodeid.startswith(RANKS), not item.nodeid.startswith(SLOW)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude all objects that exist now from garbage collection, so that the collections in engine starts and
    recoveries are fast. Raises UsageError if the installed pytest-xdist does not group tests."""
    # xdist 3.8 does not group under pytest 9.2 and does not say so: every worker would make every file's runs.
    grouped = getattr(session.config.option, "loadgroup", False)  # set by xdist in its workers
    if grouped and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist does not group tests: install the versions of constraints.txt")
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the temporary folders that `pytest_configure` created."""
    config.stash[ISOLATED].cleanup()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many allocations were made to fail. The tests that do this record the number."""
    # They record it when they are torn down, and what passes there is filed under no outcome.
    everything = [report for reports in terminalreporter.stats.values() for report in reports]
    ends = [report for report in everything if getattr(report, "when", "") == "teardown"]
    faults = sum(value for report in ends for name, value in report.user_properties if name == "faults")
    if faults:
        terminalreporter.write_line(f"{faults} allocation faults tried")
