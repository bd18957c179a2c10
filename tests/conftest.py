"""What all tests share: no test touches the user's own folders and caches, or the network.

And the order they run in: groups of ranks on one worker, slow files, then fast ones.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch read it: processes are forked without threads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests import fork_server
from tests.torture_table import record

FOLDERS = ("TUNEDECK_STATE", "TUNEDECK_CACHE", "TUNEDECK_CONFIG", "HF_HOME")
RANKS = "tests/distributed/"
"""Tests that start two to four ranks, which wait for each other all the time. Two such groups at once on two cores took
four tenths more of the processors than one after the other, so one worker gets all of these files."""

MEASURED = Path(__file__).with_name("slow.json")
"""Processor seconds of each file that `make check` leaves out, with those of the processes it starts (null where they
were not measured), and of each parametrised case that takes a second. `make durations` writes it."""
SLOW_SECONDS = {"files": 2.0, "cases": 1.0}
TAKEN: dict[str, float | None] = json.loads(MEASURED.read_text())["files"]
SLOW_CASES: dict[str, float] = json.loads(MEASURED.read_text())["cases"]
SLOW = (RANKS, *TAKEN)
SAMPLED = 4
"""`make test` runs one in so many of a test's slow cases."""

ISOLATED = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that the Makefile gives."""
    parser.addoption("--durations-file", action="store_true", help=f"write {MEASURED.name}: which files are slow")
    parser.addoption("--sample", action="store_true", help=f"run one in {SAMPLED} of the slow cases of each test")


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment variables of folders and offline mode before anything is imported, because huggingface_hub
    reads them once, at import."""
    folder = tempfile.TemporaryDirectory(prefix="tunedeck-tests-", ignore_cleanup_errors=True)
    config.stash[ISOLATED] = folder
    os.environ.update({name: str(Path(folder.name, name.lower())) for name in FOLDERS})
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.pop("TUNEDECK_RUNS", None)
    fork_server.install()


@pytest.fixture(autouse=True)
def _as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, delete the stored sequence lengths and forget the runs folder that a console was opened with, so
    that nothing depends on what an earlier test has read or chosen."""
    yield
    os.environ.pop("TUNEDECK_RUNS", None)
    shutil.rmtree(Path(os.environ["TUNEDECK_CACHE"], "lengths"), ignore_errors=True)
    _exclude_from_garbage_collection(request.config)


@pytest.fixture(scope="module")
def fresh_interpreters() -> Iterator[None]:
    """Start Python anew for each process of a test: for tests of what a new interpreter imports, reads and leaves."""
    with fork_server.fresh_interpreters():
        yield


@pytest.hookimpl(tryfirst=True)  # -m and xdist read the marks in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests, and assign the tests that must run on one worker to a group: all tests with groups of ranks,
    else the tests of one file. Then sort: tests of ranks, other slow files from the slowest on, fast files. So all
    workers end at about the same time."""
    if config.getoption("sample"):
        left_out = _left_out({item.nodeid for item in items})
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
    for item in items:
        ranks, slow = item.nodeid.startswith(RANKS), item.nodeid.startswith(SLOW)
        item.add_marker(pytest.mark.xdist_group("ranks" if ranks else item.nodeid.partition("::")[0]))
        if slow:
            item.add_marker(pytest.mark.slow)
    items.sort(key=_turn)


def _left_out(cases: set[str]) -> set[str]:
    """The slow cases that a sample leaves out. It takes at least one of each test, the same ones each time: those whose
    names have the smallest digests."""
    of_test = defaultdict(list)
    for case in cases & SLOW_CASES.keys():
        of_test[case.partition("[")[0]].append(case)
    by_digest = (sorted(each, key=lambda case: sha256(case.encode()).digest()) for each in of_test.values())
    return {case for each in by_digest for case in each[math.ceil(len(each) / SAMPLED) :]}


def _turn(item: pytest.Item) -> tuple[bool, bool, float]:
    """Sorts tests into the order in which they run."""
    taken = TAKEN.get(item.nodeid.partition("::")[0])
    return not item.nodeid.startswith(RANKS), not item.nodeid.startswith(SLOW), -(taken or SLOW_SECONDS["files"])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Raises UsageError if the installed pytest-xdist does not group tests."""
    # xdist 3.8 does not group under pytest 9.2 and does not say so: every worker would make every file's runs.
    grouped = getattr(session.config.option, "loadgroup", False)  # set by xdist in its workers
    if grouped and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist does not group tests: install the versions of constraints.txt")
    _exclude_from_garbage_collection(session.config)


EXCLUDED = pytest.StashKey[int]()
"""How many modules had been imported when objects were last excluded from garbage collection."""


def _exclude_from_garbage_collection(config: pytest.Config) -> None:
    """Exclude all objects that exist now, if many modules were imported since the last time: an engine collects several
    times in each start and recovery, and each takes as long as there are objects."""
    if len(sys.modules) > config.stash.get(EXCLUDED, 0) + 20:
        gc.collect()
        gc.freeze()
        config.stash[EXCLUDED] = len(sys.modules)


SECONDS = pytest.StashKey[float]()


def _processor_seconds() -> float:
    """Of this process and of those that it has started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[SECONDS] = _processor_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Let the last report of a test say what the test took."""
    if call.when == "teardown":
        item.user_properties.append(("seconds", _processor_seconds() - item.stash[SECONDS]))


def _write_slow_files(ends: Iterable[Any]) -> None:
    """Write the file of slow files and cases from the last reports of all tests."""
    files: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    for report in ends:
        seconds = dict(report.user_properties).get("seconds", 0.0)
        # xdist adds the group to the name.
        name = report.nodeid.removesuffix("@ranks").partition("@tests/")[0]
        file = name.partition("::")[0]
        if not file.startswith(RANKS):
            files[file] += seconds
        if "[" in name:
            cases[name] += seconds
    measured = {
        kind: {name: round(taken, 1) for name, taken in sorted(seconds.items()) if taken >= SLOW_SECONDS[kind]}
        for kind, seconds in (("files", files), ("cases", cases))
    }
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the server of processes, and remove the temporary folders that `pytest_configure` created."""
    fork_server.close()
    config.stash[ISOLATED].cleanup()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many allocations were made to fail, which the tests that do this record, and write which files are
    slow, if asked to."""
    # They record it when they are torn down, and what passes there is filed under no outcome.
    everything = [report for reports in terminalreporter.stats.values() for report in reports]
    ends = [report for report in everything if getattr(report, "when", "") == "teardown"]
    if terminalreporter.config.getoption("durations_file"):
        _write_slow_files(ends)
    faults = sum(value for report in ends for name, value in report.user_properties if name == "faults")
    if faults:
        failed = len(terminalreporter.stats.get("failed", []))
        record("allocations", "one allocation fails, in tests", faults, failed)
        terminalreporter.write_line(f"{faults} allocation faults tried")
