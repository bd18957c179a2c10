"""A runs folder whose disk becomes read-only while its queue is worked: what was finished stays, and when it can be
written again, everything goes on."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from engine.journal.queue import Queue
from engine.journal.summary import summarise
from engine.launch.process import ENTRY_FILE
from tests.cli.small_recipes import write_profile, write_recipe
from tests.events import read_events
from tests.faults.failing_disk import preload
from tests.journal.waiting import until


def test_what_was_finished_stays_and_the_rest_goes_on_once_the_folder_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    for name in ("LD_PRELOAD", "FAILING_DISK"):
        monkeypatch.setenv(name, "")  # restored after the test
    runs = tmp_path / "runs"
    monkeypatch.setenv("TUNEDECK_RUNS", str(runs))
    disk = preload(tmp_path)

    def tunedeck(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [sys.executable, "-P", ENTRY_FILE, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    recipe = write_recipe(tmp_path, ("max_steps = 2", "max_steps = 600"), ("every_steps = 1", "every_steps = 200"))
    for name in ("one", "two"):
        done = tunedeck("queue", "add", "-p", write_profile(tmp_path), "-r", recipe, "--name", name)
        assert done.returncode == 0, done.stderr
    one, two = (RunDirectory(next(runs.glob(f"*-{name}"))) for name in ("one", "two"))
    starter = subprocess.Popen([sys.executable, "-P", ENTRY_FILE, "queue", "start"], stderr=subprocess.PIPE, text=True)
    until(lambda: summarise(one).step > 250)
    with disk.failing(runs, 1, errno.EROFS, lasting=True):
        _, said = starter.communicate()
        assert starter.returncode and "Traceback" not in said, said
        for words in (["runs"], ["show", one.path], ["queue", "list"], ["log", one.path]):
            shown = tunedeck(*words)
            assert (shown.returncode, shown.stderr.count("Traceback")) == (0, 0), shown.stderr
        for words in (["resume", one.path], ["queue", "start"], ["queue", "remove", two.name]):
            refused = tunedeck(*words)
            assert refused.returncode and "fix:" in refused.stderr and "Traceback" not in refused.stderr, refused.stderr
    assert Queue(runs).read().waiting == [two.name] and not two.events.exists()
    for words in (["resume", one.path], ["queue", "start"]):
        assert tunedeck(*words).returncode == 0
    for run in (one, two):
        assert (summarise(run).status, summarise(run).damaged_lines) == ("done", 0)
    steps = [event["step"] for event in read_events(one.events) if event["kind"] == "step"]
    assert set(range(1, 601)) == set(steps) and len(steps) < 601 + 200, "from the checkpoint at step 200"
