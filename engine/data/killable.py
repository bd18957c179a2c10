"""A process that answers requests and can be ended at any moment, for code that may never return: a single call in C
ends by no exception, and no other thread runs while it lasts.

The process is a fork: it has this one's libraries and tokenizer without loading them, and it starts in milliseconds.
It closes every file of this process, so that it keeps no lock, and ends with it.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

from engine.errors import EnvironmentProblem

FIRST_OF_OWN = 3
"""File descriptors below are standard input, output and errors."""


class ProcessEnded(Exception):
    """The process ended before it answered; `signal` is the number of the signal that ended it, 0 for none."""

    def __init__(self, number: int) -> None:
        super().__init__(f"was terminated by {signal.Signals(number).name}" if number else "ended")
        self.signal = number


class KillableProcess:
    """Calls `work` with one request after the other, in a fork that the first request starts."""

    def __init__(self, work: Callable[[Any], Any], *, idle_seconds: float | None = None) -> None:
        """The process ends when no request has come for `idle_seconds` (None: never), and the next one starts another:
        memory that this process writes to meanwhile is copied, so it should not stay for long beside a training."""
        self._work, self._idle_seconds = work, idle_seconds
        self._connection: Connection | None = None
        self._process = self._owner = 0

    def ask(self, request: Any) -> Any:
        """Return `work(request)`, computed in the process; both are pickled. Raises ProcessEnded where it ended."""
        fresh = self._started()
        try:
            return self._answer(request)
        except ProcessEnded as error:
            # One that was idle may have ended, or been ended, before the request came.
            if fresh or error.signal not in (0, signal.SIGTERM, signal.SIGKILL):
                raise
        self._started()
        return self._answer(request)

    def _answer(self, request: Any) -> Any:
        assert self._connection is not None
        is_answered = False
        try:
            self._connection.send(request)
            answer = self._connection.recv()
            is_answered = True
        except (EOFError, ConnectionError):
            raise ProcessEnded(self.close()) from None
        finally:
            if not is_answered and self._connection is not None:  # Ctrl-C: the next request must not get this answer
                os.kill(self._process, signal.SIGKILL)
                self.close()
        return answer

    def close(self) -> int:
        """End the process; returns the signal that had ended it before, 0 for none."""
        connection, self._connection = self._connection, None
        if connection is None or self._owner != os.getpid():
            return 0
        connection.close()
        try:
            _, status = os.waitpid(self._process, 0)
        except ChildProcessError:  # its status went to other code that waits for any child
            return 0
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    def _started(self) -> bool:
        """Start the process if there is none; returns whether it was started."""
        # A process of the parent's, if this one is itself a fork, is not used: two would read each other's answers.
        if self._connection is not None and self._owner == os.getpid():
            return False
        ours, theirs = Pipe()
        try:
            process = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            raise EnvironmentProblem(
                f"a process cannot be started: {error.strerror or error}",
                fix="end other processes, or raise the limit on processes (ulimit -u)",
            ) from error
        if process == 0:
            _serve(theirs, self._work, self._idle_seconds)
        theirs.close()
        self._process, self._connection, self._owner = process, ours, os.getpid()
        return True


def problem_of(work: Callable[[Any], str], request: Any, doing: str, cpu_seconds: float) -> str:
    """Return what `work(request)`, called once in a process of its own, finds wrong; "" for nothing. A process that
    ended is a problem, too: `doing` is what took more than `cpu_seconds`, which `work` bounds, or failed."""
    process = KillableProcess(work)
    try:
        return str(process.ask(request))
    except ProcessEnded as error:
        return f"{doing} takes more than {cpu_seconds:g} s" if error.signal == signal.SIGPROF else f"{doing}: {error}"
    finally:
        process.close()


def _serve(connection: Connection, work: Callable[[Any], Any], idle_seconds: float | None) -> NoReturn:
    """Answer requests until the other side closes, or none comes for `idle_seconds`. An error of `work` ends the
    process."""
    try:
        _let_go_of_parent(connection.fileno())
        patience = None  # for the first request, for which it was started
        while connection.poll(patience):
            connection.send(work(connection.recv()))
            patience = idle_seconds
    finally:
        os._exit(0)  # nothing of the parent may run here: no exit handlers, no buffers written twice


def _let_go_of_parent(kept: int) -> None:
    """Close the parent's files but `kept`, take the default action of all signals, and leave its objects alone."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPROF, signal.SIGVTALRM, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the connection
    os.closerange(FIRST_OF_OWN, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the tokenizer did not come along
    gc.freeze()  # a collection would write to every page that the two share


@contextmanager
def bounded(cpu_seconds: float, memory_bytes: int) -> Iterator[None]:
    """Inside the block, end this process by SIGPROF after `cpu_seconds` of its processor time, and raise MemoryError
    for `memory_bytes` more memory. To be used in a KillableProcess, where SIGPROF has its default action."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space_bytes() + memory_bytes
    lower = most if resource.RLIM_INFINITY in (soft, hard) and soft == resource.RLIM_INFINITY else min(most, soft)
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space_bytes() -> int:
    file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(file, 64).split()[0]) * resource.getpagesize()
    finally:
        os.close(file)
