"""Errors: what was found, what was expected, how to fix it, and the exit code.

Every failure that a user can cause or repair is one of these; any other exception is a defect and exits with 1.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
"""Numbers of the OSErrors that a full disk or an exhausted quota causes."""

BROKEN_DISK = {errno.EIO, errno.EROFS}
"""Numbers of the OSErrors of a disk that fails, or that the system has made read-only."""

NOT_ALLOWED = {errno.EACCES, errno.EPERM}
"""Numbers of the OSErrors of files and folders that this user may not change."""

KILLED_CODE = 137
"""As shells report a run that was stopped by force: 128 + SIGKILL."""


FIX = "fix: "
"""How the line of an error begins that says what to do."""


class TunedeckError(Exception):
    """A failure with a known cause: `found` says what is wrong, `expected` what would be right, `fix` what to do."""

    exit_code = 1

    def __init__(self, found: str, *, expected: str = "", fix: str = "") -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.fix = fix

    def render(self) -> str:
        lines = [self.found]
        if self.expected:
            lines.append(f"expected: {self.expected}")
        if self.fix:
            lines.append(f"{FIX}{self.fix}")
        return "\n".join(lines)


_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How Rust words a failed system call in the errors, often plain Exception, of safetensors and tokenizers."""


def as_os_error(error: Exception, path: Path) -> OSError | None:
    """The OSError that an error of safetensors or tokenizers reports in words, with `path` for its file; None for any
    other error, an OSError included."""
    found = _OS_ERROR.search(str(error))
    if found is None or isinstance(error, OSError):
        return None
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path))


def disk_problem(error: BaseException, default: str) -> EnvironmentProblem | None:
    """Words for a full, failing or read-only disk, and for missing permission; None for any other error. `default`
    stands for a file whose name the error does not have."""
    if not isinstance(error, OSError) or error.errno not in FULL_DISK | BROKEN_DISK | NOT_ALLOWED:
        return None
    verb = "written" if error.errno in {*FULL_DISK, errno.EROFS} else "read or written"
    if error.errno in FULL_DISK:
        fix = "free space on that disk"
    elif error.errno in BROKEN_DISK:
        fix = "see dmesg: the disk or its connection has failed, or is read-only"
    else:
        fix = "change its permissions so that you can read and write it; see: ls -ld"
    return EnvironmentProblem(f"{error.filename or default} cannot be {verb}: {error.strerror}", fix=fix)


def moved_problem(error: BaseException) -> EnvironmentProblem | None:
    """Words for a file whose folder was moved or removed while a command worked in it; None for any other error."""
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str | os.PathLike):
        return None
    gone = [folder for folder in Path(os.fsdecode(error.filename)).absolute().parents if not folder.exists()]
    if not gone:
        return None
    return EnvironmentProblem(
        f"{gone[-1]} was moved or removed while this command used it",
        fix="put it back or use its new path, then repeat the command",
    )


class UsageError(TunedeckError):
    """The arguments or a TOML file are wrong."""

    exit_code = 2


class SpecError(UsageError):
    """All problems of a file or of overrides at once, each rendered as `file:line: key: found; allowed`."""

    def __init__(self, problems: Sequence[str], *, fix: str = "") -> None:
        super().__init__("\n".join(problems), fix=fix)
        self.problems = list(problems)


class AdapterError(UsageError):
    """A saved adapter cannot be continued, or opened, on the model."""


class UnknownArchitectureError(UsageError):
    """The budget has no memory formula for this model family; a run learns how much memory it needs as it
    trains."""


class NotSimulatedError(UsageError):
    """The run's memory needs a simulation that has not been made yet (`engine.launch.other_processes`)."""

    def __init__(self, spec: object) -> None:
        super().__init__("this run has not been simulated yet", fix="simulate it: tunedeck plan, same arguments")
        self.spec = spec


class DoesNotFitError(TunedeckError):
    """The plan says that one sequence with every remedy exceeds the device's capacity."""

    exit_code = 3


class MemoryExhaustedError(TunedeckError):
    """The run is out of memory and every remedy is used; a checkpoint has been written."""

    exit_code = 4


class DataError(TunedeckError):
    """The data are missing, unreadable, or contain nothing to train on."""

    exit_code = 5


class EnvironmentProblem(TunedeckError):
    """A device, package, permission or network connection that the command needs is missing."""

    exit_code = 6


class ConfigNotHereError(EnvironmentProblem):
    """The config of a hub model is not on this machine, and planning does not download it."""


class DeviceBusyError(EnvironmentProblem):
    """Another process holds the device memory that the run needs."""


class DivergedError(TunedeckError):
    """The loss or the gradients are not finite, and the step was not applied."""

    exit_code = 7


class WorseError(TunedeckError):
    """A score is worse than `compare --fail-if` allows."""

    exit_code = 8


class StoppedError(TunedeckError):
    """The run was stopped or paused on request; a checkpoint has been written."""

    exit_code = 130
