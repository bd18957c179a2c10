"""Checks a run as every command does: finds the facts of its models, decides what is "auto", and runs the rules whose
needs are known.

Try: `tunedeck recipes check demo`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from engine.architecture.lookup import ModelFacts, bring_config, find_facts
from engine.budget.advise.continued_adapter import settle_continued
from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.staged_plan import RunFacts, find_run_facts, planning_specs
from engine.checks import machine
from engine.checks.rule import Finding, Known, Level, Need, Rule, Subject, one_error
from engine.checks.rules import RULES
from engine.config.schema.run import Device, Limits, Profile, RunSpec
from engine.config.sweep import sweep_points
from engine.errors import ConfigNotHereError, NotSimulatedError, TunedeckError


class Command(NamedTuple):
    """What a command knows of the runs that it checks, and what it refuses; all else that is found is a notice."""

    needs: frozenset[Need]
    refuses: frozenset[Level]
    asks_hub: bool = False
    """Whether it fetches the config of a model that is not on this machine."""


_FILES: frozenset[Need] = frozenset({"recipe", "config", "files", "trees", "weights", "machine"})
_PLANS: frozenset[Need] = _FILES | {"plan"}
_STARTS: frozenset[Need] = _PLANS | {"processes", "hub"}
_ALL: frozenset[Level] = frozenset({"error", "permission", "start", "later"})

CHECK = Command(_FILES, frozenset({"error"}))
"""`recipes check`: whether a recipe is right, wherever it will be trained."""
PLAN = Command(_PLANS, frozenset({"error", "permission"}), asks_hub=True)
"""`plan` and `advise`."""
JOB = Command(_PLANS, frozenset({"error", "permission"}))
"""`launch`: another machine will start the run."""
DATA = Command(_FILES, frozenset({"error", "later"}))
"""`data`, which reads the files."""
QUEUE = Command(_STARTS, frozenset({"error", "permission", "start"}), asks_hub=True)
START = Command(_STARTS | {"devices"}, _ALL, asks_hub=True)
LAUNCHED = Command(START.needs - {"processes"}, _ALL, asks_hub=True)
"""A start in which a launcher has started the processes."""
SCREEN = Command(_FILES - {"trees"} | {"processes"}, _ALL)
"""The Launch screen, which checks at every key."""
RESUME = Command(_FILES - {"weights"} | {"processes"}, _ALL)
RESUME_LAUNCHED = Command(RESUME.needs - {"processes"}, _ALL)
ENGINE = Command(frozenset({"recipe", "config"}), _ALL)
"""The engine, once it has read the model's own config and the data."""
ENGINE_FILES = Command(frozenset({"recipe", "files", "trees"}), frozenset({"error", "later"}))
"""The engine, before it fetches anything."""
MODEL = Command(frozenset({"config", "files"}), _ALL)
"""A model that is scored or answers: its recipe trains nothing."""


@dataclass(frozen=True)
class CheckedRun:
    """A run after its check."""

    spec: RunSpec
    """With "auto" in [parallel] decided."""
    facts: RunFacts
    notices: list[str]
    """What was fetched and decided."""
    findings: list[Finding]
    command: Command
    unreachable: ConfigNotHereError | None = None
    """The model's config is not here, and the hub was asked and did not answer."""

    @property
    def refused(self) -> list[Finding]:
        """Return the findings that are errors for the command."""
        return [finding for finding in self.findings if finding.rule.level in self.command.refuses]

    @property
    def reported(self) -> list[str]:
        """Return all other findings, a line for each problem."""
        refused = self.refused
        return [line for finding in self.findings if finding not in refused for line in finding.lines()]

    def require(self, further: TunedeckError | None = None) -> CheckedRun:
        """Raise all that was found, except warnings, if the command refuses a part of it; `further`, which the command
        found itself, is a part that it refuses, and comes first."""
        require_all([self], further)
        return self


def require_all(runs: Iterable[CheckedRun], further: TunedeckError | None = None) -> None:
    """Do what `CheckedRun.require` does for several runs, each error once."""
    checked = list(runs)
    found = [finding for run in checked for finding in run.findings if finding.rule.level != "warning"]
    errors = {error.render(): error for error in [*([further] if further else []), *(each.error for each in found)]}
    refuses = further is not None or any(run.refused for run in checked)
    if refuses and (error := one_error(errors.values())) is not None:
        raise error


def run_checks(spec: RunSpec, known: Known, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """Run the rules whose needs are known on a run, or on each of its training stages; returns what they found, each
    problem once."""
    found: dict[tuple[str, str], Finding] = {}
    stages = planning_specs(spec)
    for rule in rules:
        if rule.needs <= known.needs:
            for part in [spec] if rule.of_run else stages:
                stage = part.name.partition("/")[2] if rule.level == "warning" and len(stages) > 1 else ""
                for key, error in _errors(rule, Subject(part, known)):
                    found.setdefault((stage, error.render()), Finding(rule, key, error, stage))
    return list(found.values())


def _errors(rule: Rule, subject: Subject) -> Iterator[tuple[str, TunedeckError]]:
    try:
        yield from rule.test(subject) or ()
    except NotSimulatedError:
        raise
    except TunedeckError as error:
        yield next(iter(rule.keys), ""), error


def check_run(
    spec: RunSpec, command: Command, *, folder: Path | None = None, hub_answers: Callable[[], bool] | None = None
) -> CheckedRun:
    """Check a run, which would be kept in `folder`, as `command` does. Raises NotSimulatedError where "auto" in
    [parallel] needs a simulation that was not made."""
    notices: list[str] = []
    unreachable: ConfigNotHereError | None = None
    unfetched: TunedeckError | None = None
    undecided: TunedeckError | None = None
    if command.asks_hub:
        try:
            notices += bring_config(spec)
        except ConfigNotHereError as error:
            unreachable = error
        except TunedeckError as error:
            unfetched = error
    facts = find_run_facts(spec)
    try:
        spec, decided = settle_parallel(spec, facts)
        notices += decided
    except NotSimulatedError:
        raise
    except TunedeckError as error:
        undecided = error
    answers = hub_answers or machine.hub_answers
    known = Known(
        command.needs,
        facts,
        hub_answers=answers if unreachable is None else lambda: False,
        undecided=undecided,
        unfetched=unfetched,
        runs_folder=folder,
    )
    findings = run_checks(spec, known, (rule for rule in RULES if rule.level != "warning"))
    checked = CheckedRun(spec, facts, notices, findings, command, unreachable)
    if checked.refused:
        return checked
    spec, continued = settle_continued(spec, facts)
    findings += run_checks(spec, known, (rule for rule in RULES if rule.level == "warning"))
    return replace(checked, spec=spec, notices=[*notices, *continued])


def check_runs(spec: RunSpec, command: Command, *, folder: Path | None = None) -> list[CheckedRun]:
    """Check a run, or of a sweep every point. The hub is asked once at most."""
    points = sweep_points(spec, force=True) if spec.recipe.sweep else [spec]
    answers = cache(machine.hub_answers)
    return [check_run(point, command, folder=folder, hub_answers=answers) for point in points]


def check_model(spec: RunSpec, facts: ModelFacts | None = None, *, command: Command = MODEL,
                has_images: bool | None = None) -> None:  # fmt: skip
    """Raise what `command` refuses of a run without stages. `facts`: of its model, if they were found before."""
    model = spec.recipe.model
    known = Known(
        command.needs, RunFacts({(model.id, model.revision): facts or find_facts(model)}), has_images=has_images
    )
    CheckedRun(spec, known.facts, [], run_checks(spec, known), command).require()


ANY_PROFILE = Profile(schema=1, name="any", device=Device(kind="cuda", memory_gib=1.0))
"""Hardware for a check of a recipe that names no profile: no rule speaks against it."""


def problems_of_run(spec: RunSpec) -> list[str]:
    """Why a run, or a point of a sweep, cannot be started wherever it is trained, a line for each reason."""
    trusting = spec.model_copy(update={"limits": Limits(trust_remote_code=True)})
    runs = check_runs(trusting, CHECK)
    return list(dict.fromkeys(line for run in runs for finding in run.refused for line in finding.lines()))
