"""What a rule is: the keys it is about, what has to be known to test it, how serious it is, and the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.architecture.lookup import ModelFacts
from engine.budget.advise.staged_plan import RunFacts
from engine.checks import machine
from engine.config.schema.run import RunSpec
from engine.errors import SpecError, TunedeckError

Need = Literal["recipe", "config", "files", "trees", "weights", "machine", "processes", "devices", "hub", "plan"]
"""What a rule has to know: profile and recipe; the configs of the run's models; single files and folders; whole folder
trees, which take longer to search; what a new run begins with and a resumed one has; packages of this machine; that
the run's processes start here; the devices of this machine; what the hub answers; plans of its memory, and the first
rows of its data."""

Level = Literal["error", "permission", "start", "later", "warning"]
"""How serious it is. "error": the recipe has to be changed. "permission": the command line has to allow it. "start":
this machine lacks something, so no run is created on it. "later": no run is started; one that waits in a queue may get
it before its turn. "warning": nothing is refused."""


@dataclass(frozen=True)
class Known:
    """What a command knows of a run."""

    needs: frozenset[Need]
    facts: RunFacts
    has_images: bool | None = None
    """Whether any sample has an image; None: only the recipe's keys tell."""
    hub_answers: Callable[[], bool] = machine.hub_answers
    undecided: TunedeckError | None = None
    """Why "auto" in [parallel] is not decided."""
    unfetched: TunedeckError | None = None
    """How the hub refused the model's config."""
    runs_folder: Path | None = None
    """Where the run will be kept, if that is known."""


@dataclass(frozen=True)
class Subject:
    """What a test looks at: a run, or one of its training stages, and what is known of it."""

    spec: RunSpec
    known: Known

    @property
    def model(self) -> ModelFacts:
        """Return the facts of the model that the run or the stage starts from."""
        return self.known.facts.of(self.spec.recipe.model)


Test = Callable[[Subject], "Iterable[tuple[str, TunedeckError]] | None"]
"""Raises a TunedeckError, or returns pairs of the key and the error. The error has the message and the fix."""


@dataclass(frozen=True)
class Rule:
    """A reason why a run cannot start, or for a warning."""

    keys: tuple[str, ...]
    """What the rule is about; the first is where a form shows it. Empty where only the test tells which."""
    needs: frozenset[Need]
    level: Level
    test: Test
    of_run: bool = False
    """The test looks at the run as a whole; others look at each training stage."""


@dataclass(frozen=True)
class Finding:
    """What a rule found in a run."""

    rule: Rule
    key: str
    error: TunedeckError
    stage: str = ""
    """The name of the stage that a warning is about, if the run has several."""

    def lines(self) -> list[str]:
        """Return a line for each problem: what is wrong; the fix."""
        whats = self.error.problems if isinstance(self.error, SpecError) else [self.error.found]
        before = f"stage {self.stage}: " if self.stage else ""
        return [before + "; ".join(text for text in (what, self.error.fix) if text) for what in whats]


class SeveralProblems(TunedeckError):
    """Several errors at once; the exit code is that of the first."""

    def __init__(self, errors: Iterable[TunedeckError]) -> None:
        self.errors = list(errors)
        super().__init__("\n".join(error.found for error in self.errors))
        self.exit_code = self.errors[0].exit_code

    def render(self) -> str:
        """Join the blocks of the errors."""
        return "\n".join(error.render() for error in self.errors)


def one_error(errors: Iterable[TunedeckError]) -> TunedeckError | None:
    """Return the error itself if there is one, all together if there are several; None if there is none."""
    found = list(errors)
    return SeveralProblems(found) if len(found) > 1 else next(iter(found), None)
