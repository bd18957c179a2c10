"""One error hierarchy: what was found, what was expected, the fix, and the exit code of the process.

Every failure a user can cause or mend is raised as one of these. The command line prints `render()` on stderr and exits
with `exit_code`; `engine.log` keeps the traceback. Anything else that escapes is a defect and exits with 1.
"""

from __future__ import annotations

from collections.abc import Sequence


class TunedeckError(Exception):
    """A failure with a name: `found` says what is wrong, `expected` what would be right, `fix` what to do now."""

    exit_code = 1

    def __init__(self, found: str, *, expected: str = "", fix: str = "") -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.fix = fix

    def render(self) -> str:
        """The block shown to a user: one line each for what was found, what was expected and the fix."""
        lines = [self.found]
        if self.expected:
            lines.append(f"expected: {self.expected}")
        if self.fix:
            lines.append(f"fix: {self.fix}")
        return "\n".join(lines)


class UsageError(TunedeckError):
    """Bad arguments or a bad TOML file."""

    exit_code = 2


class SpecError(UsageError):
    """All problems of a file or a set of overrides at once, each rendered as `file:line: key: found; allowed`."""

    def __init__(self, problems: Sequence[str], *, fix: str = "") -> None:
        super().__init__("\n".join(problems), fix=fix)
        self.problems = list(problems)


class UnknownArchitectureError(UsageError):
    """The budget has no closed form for this model family; training learns its memory as it goes."""


class DoesNotFitError(TunedeckError):
    """The plan says that one sequence with every remedy exceeds the device's capacity."""

    exit_code = 3


class MemoryExhaustedError(TunedeckError):
    """Out of memory with every remedy used; a checkpoint has been written."""

    exit_code = 4


class DataError(TunedeckError):
    """Data missing, unreadable, or with nothing to train on."""

    exit_code = 5


class EnvironmentProblem(TunedeckError):
    """No such device, device busy, hub unreachable, a package or permission that is missing."""

    exit_code = 6


class ConfigNotHereError(EnvironmentProblem):
    """A hub model whose config is not on this machine yet: loading it will fetch it, planning cannot."""


class DeviceBusyError(EnvironmentProblem):
    """The device exists, and another process holds the memory that the run needs."""


class DivergedError(TunedeckError):
    """The loss or the gradients are not finite, and the step was not applied."""

    exit_code = 7


class StoppedError(TunedeckError):
    """Stopped or paused on request, checkpoint written."""

    exit_code = 130
