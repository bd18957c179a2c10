"""Processes that answer requests and can be ended."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from engine.data.killable import KillableProcess, ProcessEnded


class Stop(BaseException):
    """As Ctrl-C."""


def work(request: Any) -> Any:
    if request == "end":
        os.kill(os.getpid(), signal.SIGSEGV)
    if request == "fail":
        raise RuntimeError("in the other process")
    return (request, os.getpid())


def test_one_process_answers_until_it_is_closed() -> None:
    process = KillableProcess(work)
    (first, place), (second, same) = process.ask(1), process.ask(2)
    assert (first, second) == (1, 2) and place == same != os.getpid()
    process.close()
    assert process.ask(3)[1] != place
    process.close()


@pytest.mark.parametrize(("request_", "number"), [("end", signal.SIGSEGV), ("fail", 0)])
def test_a_process_that_ends_is_reported_and_the_next_request_starts_another(request_: str, number: int) -> None:
    process = KillableProcess(work)
    with pytest.raises(ProcessEnded) as ended:
        process.ask(request_)
    assert ended.value.signal == number
    assert process.ask(1)[0] == 1
    process.close()


def test_an_idle_process_ends_and_the_next_request_is_answered() -> None:
    process = KillableProcess(work, idle_seconds=0.0)
    for number in range(3):
        assert process.ask(number)[0] == number
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    process.close()


def test_a_killed_process_is_replaced() -> None:
    process = KillableProcess(work)
    os.kill(process.ask(1)[1], signal.SIGKILL)
    assert process.ask(2)[0] == 2
    process.close()


def test_after_an_interrupted_request_the_next_one_gets_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    process = KillableProcess(work)
    process.ask(0)

    def stop(number: int, frame: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(Stop):
            process.ask(Kicking())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert process.ask(2)[0] == 2
    process.close()


class Kicking:
    """Signals the process that asked as soon as the other one reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _kick, (os.getpid(),)


def _kick(process: int) -> str:
    os.kill(process, signal.SIGUSR1)
    signal.pause()
    return "too late"
