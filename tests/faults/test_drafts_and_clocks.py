"""What stopped processes, changed clocks and moved folders must not do to drafts, requests and chats."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.errors import as_os_error, disk_problem, moved_problem
from engine.extras.trackers.tensorboard_tracker import TensorBoardTracker
from engine.extras.trackers.tracker import TrackedRun
from engine.journal.chats import append_rows, create_chat, list_chats, read_chat
from engine.journal.control import next_request_file
from engine.journal.events import EventWriter
from engine.journal.files import held_draft, write_atomically
from engine.journal.liveness import claim
from tests.fork_server import ROOT
from tests.trackers.look_alikes import PACKAGES

HOLDS = """
import sys
from pathlib import Path
from engine.journal.files import held_draft
with held_draft(Path(sys.argv[1])) as draft:
    draft.write_text("half")
    print("ready", flush=True)
    sys.stdin.read()
"""


def holder(target: Path) -> subprocess.Popen[str]:
    """A process that makes a draft of `target` until its input ends."""
    command = [sys.executable, "-P", "-c", HOLDS, str(target)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_draft_goes_with_the_next_process_once_its_own_was_killed(tmp_path: Path) -> None:
    target = tmp_path / "result"
    with holder(target) as process:
        (draft,) = tmp_path.iterdir()
        os.utime(draft, (0, 0))  # however old it looks, its process lives
        with held_draft(target) as other:
            assert draft.exists() and other != draft
        process.kill()
        process.wait()
        with held_draft(tmp_path / "another"):
            assert not draft.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_again_if_its_draft_was_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace
    removed: list[Path] = []

    def after_a_long_sleep(draft: Path, path: Path) -> None:
        if not removed:
            removed.append(draft)
            os.unlink(draft)
        replace(draft, path)

    monkeypatch.setattr("os.replace", after_a_long_sleep)
    write_atomically(tmp_path / "note", "text")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["text"] and removed


def test_rows_are_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"own": 1}')  # without an end of line
    append_rows(path, [{"row": 1}, {"row": 2}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"own": 1}, {"row": 1}, {"row": 2}]
    before = path.read_bytes()
    program = """
import resource, signal, sys
from pathlib import Path
from engine.errors import DataError
from engine.journal.chats import append_rows
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5,) * 2)
try:
    append_rows(path, [{"row": 3}])
except DataError as error:
    print(error.render())
"""
    command = [sys.executable, "-P", "-c", program, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "cannot be written" in done.stdout and path.read_bytes() == before


def test_requests_keep_their_order_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    for seconds in (1e9, 5e8, 7e8):
        monkeypatch.setattr(time, "time_ns", lambda now=seconds: int(now * 1e9))
        sent.append(next_request_file(tmp_path, "ask"))
        sent[-1].touch()
    assert sorted(sent) == sent


def test_a_chat_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(Exception, match="the chat cannot be stored"):
        patched.setattr("engine.journal.chats.write_atomically", full)
        create_chat(tmp_path, {})
    assert list((tmp_path / ".chats").iterdir()) == []
    made = create_chat(tmp_path, {"targets": ["last"]})
    assert [chat.path for chat in list_chats(tmp_path)] == [made.path]


def test_a_chat_that_is_taken_up_again_is_not_ended(tmp_path: Path) -> None:
    chat = create_chat(tmp_path, {})
    with EventWriter(chat) as writer:
        writer.write("run_finished", status="done", exit_code=0, result=None, reason="asked for")
    assert read_chat(chat).status == "ended"
    with claim(chat):
        assert read_chat(chat).status == "loading"


def test_a_folder_that_was_moved_is_named_with_a_fix(tmp_path: Path) -> None:
    gone = tmp_path / "runs" / "one" / "file"
    problem = moved_problem(FileNotFoundError(errno.ENOENT, "No such file or directory", str(gone)))
    assert problem is not None and problem.found.startswith(f"{tmp_path / 'runs'} was moved or removed")
    assert moved_problem(FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "file"))) is None


def test_a_full_disk_that_safetensors_reports_in_words_is_a_full_disk(tmp_path: Path) -> None:
    failed = as_os_error(Exception("I/O error: No space left on device (os error 28)"), tmp_path / "model")
    problem = disk_problem(failed, "") if failed is not None else None
    assert problem is not None and problem.found == f"{tmp_path / 'model'} cannot be written: No space left on device"
    assert as_os_error(ValueError("no number"), tmp_path) is None


def test_tensorboard_reads_files_in_the_order_of_writing_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    run = TrackedRun("run", None, "project", [], {}, tmp_path)
    first = TensorBoardTracker(run, None).close(0)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    (earlier, later) = TensorBoardTracker(run, first).close(0)
    assert earlier < later
