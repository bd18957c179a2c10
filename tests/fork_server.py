"""Starts Tunedeck's processes in a tenth of a second: they are forked from a process that has imported torch and the
engine already.

A pytest process calls `install`. From then on `subprocess.Popen` forks where the command is Python with `tunedeck.py`
or torchrun; every other command is executed as ever. The process has its own pid and start time, is a child of the
process that started it, in the session that was asked for, and /proc shows its own command line and environment. What
it starts in turn is forked in the same way.

How: a server (`python fork_server.py`) is a child of the process that starts others, the owner. For each start it forks
twice and the process between ends, while the owner is the "subreaper" (prctl(2)) of all below it: so the second process
is a child of the owner. It first forks a server of its own, which has imported the same and run nothing.

A new interpreter is started all the same where the fork would differ: other variables that are read at import (all but
those of `READ_LATE`), other resource limits, another user. `fresh_interpreters` does so for whole tests.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "tunedeck.py")
SCRIPTS = (SCRIPT, str(ROOT / "engine" / "model" / "plain_loader.py"))
MODULES = ("torch.distributed.run", "benchmarks.gpu", "benchmarks.measured_run", "tests.faults.impatient")

READ_LATE = (
    "TUNEDECK_", "TORCHELASTIC_", "SLURM_", "PYTEST_", "MALLOC_", "GOMP_", "RANK", "LOCAL_RANK", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_", "MASTER_", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "PYTHONSAFEPATH", "PWD", "OLDPWD",
)  # fmt: skip
"""How the names of variables begin that no package reads at its import, or that change the speed alone, on a CPU."""

PRELOADED = (
    "peft", "safetensors.torch", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2", "transformers.generation",
    "torch.distributed.run", "torch.distributed.fsdp", "typer", "rich.console",
)  # fmt: skip
"""What processes of Tunedeck import besides all modules of `engine`."""

MESSAGE_BYTES = 2**20
LIMITS = tuple(number for name, number in vars(resource).items() if name.startswith("RLIMIT_"))
PR_SET_MM, PR_SET_MM_MAP, PR_SET_CHILD_SUBREAPER = 35, 14, 36
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Start:
    """What a forked process becomes. Its streams, working directory and other files are passed beside it."""

    arguments: list[str]
    environment: dict[str, str]
    new_session: bool
    group: int
    """Process group to join, 0 for one of its own, -1 for that of the owner."""
    files: list[int]
    """The numbers that the files passed after the first five get."""
    ignored: list[int]
    blocked: list[int]
    """Signals that the owner ignores or blocks: exec(2) leaves both as they are."""


class Server:
    """The owner's end of a server."""

    def __init__(self, connection: socket.socket, environment: dict[str, str]) -> None:
        self._connection = connection
        self._environment = _read_early(environment)
        self._limits = _limits()
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether a process with this environment may be forked from here."""
        same = _read_early(environment) == self._environment
        return same and _limits() == self._limits and os.getpid() == self._owner

    def start(self, start: Start, cwd: int, streams: Sequence[int], files: Sequence[int]) -> int:
        """Fork a process; returns its pid once it is this process's child and has its name."""
        answer, told = os.pipe()
        message = json.dumps(asdict(start)).encode("utf-8", "surrogateescape")
        with self._lock:
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [message], [told, cwd, *streams, *files])
                os.close(told)
                with open(answer, "rb") as file:
                    pid = file.read()
            finally:
                LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not pid:
            raise RuntimeError("the fork server started nothing: its error is on standard error")
        return int(pid)

    def close(self) -> None:
        self._connection.close()


@dataclass
class _Here:
    server: Server | None = None
    fresh: bool = False
    shown: bytes | ctypes.Array[ctypes.c_char] = b""
    """What the kernel reads for /proc/PID/cmdline and environ: it must not be freed."""


_here = _Here()
_execute = vars(subprocess)["_fork_exec"]  # the seam of CPython 3.11 to 3.13: raises KeyError where it is gone


def install() -> None:
    """From now on, fork the processes that this one starts. The server starts with the first of them."""
    vars(subprocess).update(_fork_exec=_start)


@contextlib.contextmanager
def fresh_interpreters() -> Iterator[None]:
    _here.fresh = True
    try:
        yield
    finally:
        _here.fresh = False


@contextlib.contextmanager
def other_server() -> Iterator[None]:
    """Inside the block, fork from another server, which starts with the variables that are set then."""
    former, _here.server = _here.server, None
    try:
        yield
    finally:
        close()
        _here.server = former


def close() -> None:
    if _here.server is not None:
        _here.server.close()
        _here.server = None


def _start(
    arguments: Sequence[Any], executables: Sequence[bytes], close_fds: bool, keep: Sequence[int], cwd: Any,
    environment: Sequence[bytes] | None, stdin: int, stdin_write: int, out_read: int, out: int, err_read: int, err: int,
    error_read: int, error_write: int, restore_signals: bool, new_session: bool, group: int, *identity: Any,
) -> int:  # fmt: skip
    """`_posixsubprocess.fork_exec`, with its arguments."""
    words = [*map(os.fsdecode, arguments)]
    own = os.environ if environment is None else dict(os.fsdecode(entry).split("=", 1) for entry in environment)
    # gid, gids, uid, umask, preexec_fn
    plain = identity[:5] in ((None, None, None, -1, None), (-1, None, -1, -1, None))
    known = executables[0] == os.fsencode(sys.executable) and program(words) is not None
    may_fork = not _here.fresh and known and plain and close_fds and restore_signals
    if may_fork and (server := _server_for(dict(own))) is not None:
        folder = os.open(cwd or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            streams = [given if given != -1 else number for number, given in enumerate((stdin, out, err))]
            files = [number for number in keep if number != error_write]
            ignored = [int(each) for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN]
            blocked = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
            return server.start(
                Start(words, dict(own), bool(new_session), group, files, ignored, blocked), folder, streams, files
            )
        finally:
            os.close(folder)
    return int(
        _execute(
            arguments, executables, close_fds, keep, cwd, environment, stdin, stdin_write, out_read, out, err_read, err,
            error_read, error_write, restore_signals, new_session, group, *identity,
        )
    )  # fmt: skip


def program(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """(a script of SCRIPTS, or `-m` and a module; the words after it), None for what is not started by forking."""
    rest = list(words[1:])
    while rest and rest[0] in ("-P", "-u"):
        del rest[0]
    if rest and rest[0] in SCRIPTS:
        return rest[0], rest[1:]
    return (f"-m {rest[1]}", rest[2:]) if rest[:1] == ["-m"] and rest[1] in MODULES else None


def _server_for(environment: dict[str, str]) -> Server | None:
    """The server, started if there is none; None if a process with this environment cannot be forked from it."""
    if _here.server is None:
        _here.server = _start_server()
    return _here.server if _here.server.fits(environment) else None


def _start_server() -> Server:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Read at a process's start. The thresholds are those of `engine_environment`; pyarrow's jemalloc has a thread.
    settings = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31), "GOMP_SPINCOUNT": "30000"}
    settings |= {"JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTHONUNBUFFERED": "1"}
    subprocess.Popen(
        [sys.executable, "-P", __file__, str(there.fileno())], pass_fds=[there.fileno()], stdin=subprocess.DEVNULL,
        env={**os.environ, **settings}, cwd=Path(__file__).parent,  # a test may have removed its own folder
    )  # fmt: skip
    there.close()
    if not here.recv(1):
        raise RuntimeError("the fork server did not start: its error is on standard error")
    return Server(here, dict(os.environ))


def _read_early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(number) for number in LIMITS]


def preload() -> None:
    """Import what processes of Tunedeck import, without a change of the import path."""
    path = list(sys.path)
    sys.path.insert(0, str(ROOT))
    import engine

    for name in (*PRELOADED, *(found.name for found in pkgutil.walk_packages(engine.__path__, "engine."))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:  # of an extra that is not installed here
            if missing.name is None or missing.name.startswith("engine"):
                raise
    sys.path[:] = path
    gc.collect()
    gc.freeze()  # what a fork collects, it copies


def serve(owner: socket.socket) -> Start:
    """Fork a process for each message of the owner, until the owner ends; returns in each of those processes."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a process that has threads must not fork"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the owner, in whose group this one is
        signal.signal(number, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(owner, MESSAGE_BYTES, 64)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                os.sched_yield()
            owner.close()
            return _become(Start(**json.loads(message.decode("utf-8", "surrogateescape"))), files)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def _become(start: Start, received: list[int]) -> Start:
    """Make this process what exec(2) and the start of Python would. Returns what it, or its own server's, shall run."""
    if start.new_session:
        os.setsid()
    elif start.group >= 0:
        os.setpgid(0, start.group)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        here.close()
        for file in received:
            os.close(file)
        return serve(there)
    there.close()
    numbers = [0, 1, 2, *start.files]
    connection = fcntl.fcntl(here.detach(), fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1)
    answer = _take_files(received, numbers)
    _here.server = Server(socket.socket(fileno=connection), start.environment)
    _take_signals(start)
    os.environ.clear()
    os.environ.update(start.environment)
    _take_streams(start)
    _show_in_proc(start)
    install()
    os.write(answer, str(os.getpid()).encode())
    os.close(answer)
    return start


def _take_files(received: list[int], numbers: Sequence[int]) -> int:
    """Change to the folder, and give each of the other files its number. Returns the descriptor of the answer."""
    above = max(numbers) + 1
    answer, folder, *files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in received]
    for file in received:
        os.close(file)
    os.fchdir(folder)
    os.close(folder)
    for file, number in zip(files, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    return answer


def _take_signals(start: Start) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for ignored in start.ignored:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked)


def _take_streams(start: Start) -> None:
    """Open standard input and output anew. Standard error stays the same object, because handlers of logging have kept
    it, but looks anew at what it writes to: a file and a pipe are not the same to it."""
    unbuffered = bool(start.environment.get("PYTHONUNBUFFERED")) or "-u" in start.arguments[:3]
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    input_bytes, output_bytes = io.FileIO(0, closefd=False), io.FileIO(1, "w", closefd=False)
    system: Any = sys  # its streams are declared final
    errors_bytes = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    system.stderr.__init__(errors_bytes, encoding=sys.stderr.encoding, errors=sys.stderr.errors, line_buffering=True)
    system.stdin = system.__stdin__ = io.TextIOWrapper(io.BufferedReader(input_bytes), encoding=encoding, errors=errors)
    written: Any = output_bytes if unbuffered else io.BufferedWriter(output_bytes)
    system.stdout = system.__stdout__ = io.TextIOWrapper(
        written, encoding=encoding, errors=errors, line_buffering=os.isatty(1), write_through=unbuffered
    )


def _show_in_proc(start: Start) -> None:
    """Let /proc show the process's own command line and environment."""
    words = b"".join(os.fsencode(word) + b"\0" for word in start.arguments)
    entries = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in start.environment.items())
    _here.shown = shown = ctypes.create_string_buffer(words + entries, len(words) + len(entries))
    at = ctypes.addressof(shown)
    after_words, end = at + len(words), at + len(words) + len(entries)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    fields = [0, 0, 0, 0, *map(int, stat[1:])]  # numbered as in proc(5)
    LIBC.sbrk.restype = ctypes.c_void_p
    numbers = [*fields[26:28], *fields[45:48], LIBC.sbrk(0), fields[28], at, after_words, after_words, end]
    found = struct.pack("12Q2I", *numbers, 0, 0, 2**32 - 1)  # struct prctl_mm_map of linux/prctl.h
    if LIBC.prctl(PR_SET_MM, PR_SET_MM_MAP, found, len(found), 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP), which needs a kernel with CONFIG_CHECKPOINT_RESTORE")


def run(start: Start, path: list[str]) -> None:
    """Run the program as `python` does, with the import path that it would have."""
    found = program(start.arguments)
    assert found is not None
    name, rest = found
    sys.orig_argv[:] = start.arguments
    sys.argv[:] = [name, *rest]
    safe = start.environment.get("PYTHONSAFEPATH") or "-P" in start.arguments[:3]
    first = os.path.dirname(name) if name in SCRIPTS else os.getcwd()
    sys.path[:] = path if safe else [first, *path]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if name not in SCRIPTS:
        vars(runpy)["_run_module_as_main"](name.removeprefix("-m "))
        return
    vars(module).update(__file__=name, __builtins__=builtins)
    exec(compile(Path(name).read_bytes(), name, "exec"), vars(module))


def leave(ending: SystemExit) -> NoReturn:
    """End as Python does, without freeing objects: that would copy all pages shared with the server, and takes six
    times as long as all else of a short command."""
    vars(threading)["_shutdown"]()
    vars(atexit)["_run_exitfuncs"]()
    code = 0 if ending.code is None else ending.code
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(code, int):
            os._exit(code & 0xFF)
    raise ending  # Python prints the text, or what it cannot write


if __name__ == "__main__":
    PATH = list(sys.path)
    CONNECTION = socket.socket(fileno=int(sys.argv[1]))
    CONNECTION.set_inheritable(False)
    preload()
    CONNECTION.send(b".")
    ending = SystemExit(0)
    try:
        run(serve(CONNECTION), PATH)
    except SystemExit as raised:
        ending = raised
    leave(ending)
