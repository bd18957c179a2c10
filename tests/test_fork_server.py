"""Processes that tests start by forking are as new interpreters would be; where they would not, one is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from engine.launch.process import ENTRY_FILE
from tests.fork_server import fresh_interpreters

TUNEDECK = [sys.executable, "-P", str(ENTRY_FILE)]


@contextmanager
def waiting(new_session: bool = False, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its standard input."""
    with subprocess.Popen(
        [*TUNEDECK, "_simulate"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=new_session,
        env={**os.environ, **environment},
    ) as process:  # fmt: skip
        yield process


def is_forked(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process had torch before it ran."""
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_forked_process_is_a_child_with_its_own_command_environment_and_session() -> None:
    with waiting(new_session=True, TUNEDECK_CACHE="elsewhere") as process:
        assert is_forked(process)
        place = Path(f"/proc/{process.pid}")
        assert place.joinpath("cmdline").read_bytes().decode().split("\0")[:-1] == [*TUNEDECK, "_simulate"]
        assert b"TUNEDECK_CACHE=elsewhere" in place.joinpath("environ").read_bytes().split(b"\0")
        assert f"PPid:\t{os.getpid()}\n" in place.joinpath("status").read_text()
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    with waiting() as process:
        assert os.getsid(process.pid) == os.getsid(0) and os.getpgid(process.pid) == os.getpgrp()


def test_it_has_its_own_streams_and_exit_code() -> None:
    told = subprocess.run([*TUNEDECK, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == f"tunedeck {version('tunedeck')}\n"
    wrong = subprocess.run([*TUNEDECK, "nonsense"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "nonsense" in wrong.stderr and not wrong.stdout


def test_it_has_a_server_of_its_own_which_ends_with_it() -> None:
    with pytest.raises(ProcessLookupError), waiting() as process:
        servers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(servers) == 1
        process.kill()
        process.wait()
        while True:
            os.kill(int(servers[0]), 0)


def test_a_new_interpreter_is_started_for_other_variables_and_where_a_test_asks_for_it() -> None:
    with waiting(HF_HOME="/elsewhere") as process:
        assert not is_forked(process)
    with fresh_interpreters(), waiting() as process:
        assert not is_forked(process)
