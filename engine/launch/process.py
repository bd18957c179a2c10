"""Starts an engine process, follows it, and ends it by force. No other module starts or kills an engine.

The engine runs in an OS session of its own, so neither a closed terminal nor a killed follower ends it. A follower asks
for a stop with a control request, not a signal: a request works from another machine, is answered by an event, and is
not lost if it is sent while the engine still loads.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from engine.checks.machine import require_training_packages
from engine.config.files.machine import working_directory
from engine.errors import FULL_DISK, KILLED_CODE, EnvironmentProblem, TunedeckError
from engine.journal import control
from engine.journal.directory import HeldRunDirectory, RunDirectory, read_spec
from engine.journal.events import Event, EventTail, EventWriter, end_of_events
from engine.journal.liveness import (
    ProcessIdentity,
    clear_engine,
    engine_process,
    identify,
    is_alive,
    killed_text,
    lock_after_engine,
    process_state,
    record_engine,
    refuse_if_claimed,
)
from engine.journal.stages import stage_directories

_PACKAGES_FOLDER = Path(__file__).resolve().parents[2]
_CHECKOUT_ENTRY = _PACKAGES_FOLDER / "tunedeck.py"

ENTRY_FILE = _CHECKOUT_ENTRY if _CHECKOUT_ENTRY.is_file() else _PACKAGES_FOLDER / "__init__.py"
"""Fixes the import path: `tunedeck.py` in a checkout, `tunedeck/__init__.py` where Tunedeck is installed. Child
processes start through it, with -P."""

POLL_SECONDS = 0.25
"""How often a follower reads events; a screen is redrawn half as often."""

DETACHED_CODE = 0
"""A follower left while the engine goes on, as after `train --detach`."""

LOG_LINES = 15
"""Lines of engine.log, shown when an engine died without recording why."""


@dataclass(frozen=True)
class FileOffsets:
    """Bytes in `events.jsonl` and `engine.log` at which a new engine's output begins."""

    events: int = 0
    log: int = 0

    @classmethod
    def of(cls, directory: RunDirectory) -> FileOffsets:
        return cls(end_of_events(directory.events), directory.log.stat().st_size if directory.log.exists() else 0)


def start_engine(
    directory: RunDirectory, *, resume_from: int | None = None, resume: bool = False
) -> subprocess.Popen[bytes]:
    """Start an engine on this run, or a conductor on a staged one, in an OS session of its own; output goes to
    `engine.log`. `resume` continues from the newest checkpoint, or from that of step `resume_from`.

    Raises EnvironmentProblem when another engine works on the run, packages for training are not installed, or the
    process cannot be started.
    """
    require_training_packages()
    refuse_if_claimed(directory)
    # Requests to an earlier engine are not meant for this one.
    control.clear_requests(directory)
    arguments = ["--resume"] if resume else []
    arguments += ["--from", str(resume_from)] if resume_from is not None else []
    with _opened_log(directory) as log:
        process = subprocess.Popen(
            [sys.executable, "-P", str(ENTRY_FILE), _command_of(directory), str(directory.path), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=_engine_folder(directory),
            env={**engine_environment(), **_runs_variable(directory)},
            start_new_session=True,
        )
    # Recorded here as well as by the engine's own claim, so that it can be found and killed while it imports torch.
    record_started(directory, process)
    return process


def record_started(directory: RunDirectory, process: subprocess.Popen[bytes]) -> None:
    """Record the process that works in `directory` from now on. Kills it and raises OSError on a full disk: a process
    that cannot be found again is worse than none."""
    identity = identify(process.pid)
    try:
        if identity is not None:
            record_engine(directory, identity)
    except OSError:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _runs_variable(directory: RunDirectory) -> dict[str, str]:
    # A run.toml of an earlier version may name a run without its path: it is beside this one, or beside a stage's run.
    return {} if directory.path.parent.name == "stages" else {"TUNEDECK_RUNS": str(directory.path.parent)}


def _opened_log(directory: RunDirectory) -> BinaryIO:
    try:
        return directory.log.open("ab")
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        raise EnvironmentProblem(
            f"{directory.log} cannot be written: {error.strerror or error}",
            expected="a run directory that you can write to",
            fix="move it away, or get write permission",
        ) from error


def _command_of(directory: RunDirectory) -> str:
    if directory.assembly.is_file():
        return "_assemble"
    recipe = read_spec(directory).get("recipe", {})
    return "_conductor" if isinstance(recipe, dict) and recipe.get("stages") else "_engine"


def _engine_folder(directory: RunDirectory) -> Path:
    """The working directory, or the run directory if that was deleted (MKL ends a process in a deleted folder)."""
    cwd = working_directory()
    return cwd if cwd.is_dir() else directory.path


def engine_environment() -> dict[str, str]:
    """This process's environment, with unbuffered output and without the tokenizer's warning about forks.

    PYTHONSAFEPATH passes -P on to Python processes that the engine starts. A user's PYTHONPATH is left: `tunedeck.py`
    puts its own folder first, and the user's data or model code may need the others.
    """
    # Beside another busy process OpenMP's threads use up their time slices spinning for each other: on two cores, 40
    # demo steps next to a two-thread program took over 60 s, with a bounded spin 13 s, and alone 6 s either way.
    # By default glibc returns each large freed block to the kernel, which clears it page by page for the next tensor:
    # with these thresholds 4 steps of a small model on the CPU took 2,500 page faults instead of 52,000.
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31)}
    defaults = {"GOMP_SPINCOUNT": "30000", **malloc}
    always = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**defaults, **os.environ, **always}


def wait_until_running(
    directory: RunDirectory, process: subprocess.Popen[bytes], *, start: FileOffsets = FileOffsets()
) -> None:
    """Wait for the engine's first event after `start`. Raises TunedeckError if `process` ends without one."""
    tail = EventTail(directory.events, offset=start.events)
    while not tail.poll():
        try:
            code = process.wait(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        if tail.poll():
            return
        raise engine_died(directory, code, log_start=start.log)


def follow_engine(
    directory: RunDirectory,
    process: subprocess.Popen[bytes],
    *,
    on_event: Callable[[Event], None],
    on_tick: Callable[[], None] = lambda: None,
    on_notice: Callable[[str], None] = lambda text: None,
    start: FileOffsets = FileOffsets(),
) -> int:
    """Follow an engine to its end and return its exit code, the recorded one if a signal ended it after its record.

    `on_event` gets each event after `start`, `on_tick` is called about four times a second, `on_notice` gets sentences
    for the user. Ctrl-C and TERM ask the engine to stop; a second signal kills it, and KILLED_CODE is returned. HUP, or
    an OSError of the callbacks because the reader of their output is gone, leaves the engine running and returns
    DETACHED_CODE. Raises TunedeckError when the engine ended without recording how.
    """
    directory = HeldRunDirectory(directory.path)
    tail = EventTail(directory.events, offset=start.events)
    recorded: int | None = None
    stops = 0

    def relay() -> bool:
        """Returns True once the process has ended."""
        nonlocal recorded
        ended = process.poll() is not None  # before reading, so that no event written before the end is missed
        with suppress(EnvironmentProblem):  # the folder was removed: the engine ends by itself
            tail.path = directory.events
        for event in tail.poll():
            if event["kind"] == "run_finished":
                recorded = event["exit_code"]
            elif event["kind"] in ("resumed", "run_started"):
                recorded = None
            on_event(event)
        on_tick()
        return ended

    with _signals() as received:
        try:
            while not relay():
                _sleep_until_signal_or_end(process, received)
                if signal.SIGHUP in received:
                    return DETACHED_CODE
                for _ in range(stops, min(2, len(received))):
                    stops += 1
                    if stops == 2:
                        _kill_child(directory, process)
                        return KILLED_CODE
                    _ask_to_stop(directory, process, on_notice)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            return DETACHED_CODE
    code = process.returncode
    if recorded is None:
        raise engine_died(directory, code, log_start=start.log)
    return code if code >= 0 else recorded  # a signal after the last record, as on a full host, changes nothing


def _ask_to_stop(directory: RunDirectory, process: subprocess.Popen[bytes], on_notice: Callable[[str], None]) -> None:
    try:
        control.send_request(directory, "stop")
    except OSError:
        # On a full disk no request can be written; the engine stops on TERM, too.
        process.terminate()
    on_notice("stopping after this step, with a checkpoint; a second Ctrl-C stops immediately, without one")


def _kill_child(directory: RunDirectory, process: subprocess.Popen[bytes]) -> None:
    """Kill the whole OS session of a child, whose pid cannot have been reused, because nobody has waited for it yet."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _force_stop_stages(directory)
    record_forced_stop(directory)


def force_stop(directory: RunDirectory) -> None:
    """Kill the engine of this run and everything it started, and record the end in the journal. Raises
    EnvironmentProblem when the engine is on another machine, or belongs to another user."""
    identity = engine_process(directory)
    if identity is not None:
        _require_on_this_machine(identity)
        _kill(identity)
    _force_stop_stages(directory)
    record_forced_stop(directory)


def _force_stop_stages(directory: RunDirectory) -> None:
    """A stage's engine does not end when the conductor is killed."""
    for stage in stage_directories(directory):
        identity = engine_process(stage)
        if identity is not None and is_alive(identity):
            force_stop(stage)


def _require_on_this_machine(identity: ProcessIdentity) -> None:
    if process_state(identity) == "remote":
        raise EnvironmentProblem(
            f"the engine is process {identity.pid} on {identity.host}, and only that machine can kill it",
            fix=f"run the same command on {identity.host}",
        )


def _kill(identity: ProcessIdentity) -> None:
    """Send SIGKILL to exactly this process, and to its group if it leads one, then wait until it is gone."""
    try:
        handle = os.pidfd_open(identity.pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        return
    try:
        # Checked after the handle was opened: while it is open, the pid cannot be given to another process.
        if not is_alive(identity):
            return
        if os.getpgid(identity.pid) == identity.pid:
            os.killpg(identity.pid, signal.SIGKILL)
        else:
            os.kill(identity.pid, signal.SIGKILL)
        _wait_until_gone(identity)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise EnvironmentProblem(
            f"process {identity.pid} belongs to another user", fix="ask its owner to stop it"
        ) from error
    finally:
        if handle is not None:
            os.close(handle)


def _wait_until_gone(identity: ProcessIdentity) -> None:
    """A driver may delay the end by seconds. Raises EnvironmentProblem after half a minute."""
    deadline = time.monotonic() + 30.0
    while is_alive(identity):
        if time.monotonic() > deadline:
            raise EnvironmentProblem(
                f"process {identity.pid} was killed but has not ended: it hangs in a driver or file system",
                fix="see dmesg; the run can be resumed when the process has ended",
            )
        time.sleep(0.02)


def record_forced_stop(directory: RunDirectory) -> None:
    """Write a killed engine's last event, with the run locked so that no new engine writes at the same time."""
    control.clear_requests(directory)
    with lock_after_engine(directory), EventWriter(directory) as writer:
        clear_engine(directory)
        writer.write("run_finished", status="stopped", exit_code=KILLED_CODE, result=None, reason="stopped by force")


def engine_died(directory: RunDirectory, code: int, *, log_start: int = 0) -> TunedeckError:
    """The error for an engine that did not record why it ended, with its exit code and the end of the log."""
    tail = log_tail(directory, start=log_start)
    lines = "\n".join(["", f"last lines of {directory.log}:", *(f"  {line}" for line in tail)]) if tail else ""
    error = TunedeckError(
        f"the engine {killed_text(directory) or _exit_text(code)}, without recording how the run ended{lines}",
        fix=f"continue from the last checkpoint: tunedeck resume {directory.name}",
    )
    error.exit_code = KILLED_CODE if code == -signal.SIGKILL else max(code, 1)
    return error


def _exit_text(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; if this was not done by hand, the machine ran out of host memory: see dmesg)"
    if code < 0:
        return f"was terminated by signal {-code} ({signal.Signals(-code).name})"
    return f"exited with {code}"


def log_tail(directory: RunDirectory, *, start: int = 0, lines: int = LOG_LINES) -> list[str]:
    """The last lines of `engine.log` after byte `start`, within its last 64 KiB; empty without a log."""
    try:
        with directory.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-lines:]


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect INT, TERM and HUP by number instead of ending this process. INT and HUP stay ignored if they were before:
    `nohup` and a shell's `&` start a process in this way."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    earlier = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            earlier[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _sleep_until_signal_or_end(process: subprocess.Popen[bytes], received: list[int]) -> None:
    """Sleeps at most POLL_SECONDS."""
    before = len(received)
    deadline = time.monotonic() + POLL_SECONDS
    while len(received) == before and time.monotonic() < deadline:
        try:
            process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
        return
