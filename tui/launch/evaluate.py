"""Evaluate a choice of the Launch screen: its run spec, its memory plan, and the problems of its fields.

`evaluate_choice` takes a few milliseconds, so the screen calls it after every key. The module reads profile and recipe
files; it neither draws nor writes.

Try: `python -c "from tui.launch.evaluate import *; print(evaluate_choice(Choice('demo', 'demo')).plan.verdict)"`
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from engine.budget.advise.plan import Plan, Verdict, make_plan
from engine.budget.advise.staged_plan import StagedPlan, StagePlan, make_staged_plan
from engine.checks.rule import Finding
from engine.checks.run import SCREEN, check_run
from engine.config.check.hardware_rules import parse_device_indices
from engine.config.load import resolve
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Limits, Profile, RunSpec
from engine.errors import (
    ConfigNotHereError,
    NotSimulatedError,
    SpecError,
    TunedeckError,
    UnknownArchitectureError,
    UsageError,
)
from engine.journal.event_text import describe_verdict
from tui.launch.choice import Choice
from tui.launch.fields import DEVICES, NAME, row_of_key, stage_row
from tui.launch.needs import needed_disk

SIMULATING = "simulating…"


class FieldProblem(NamedTuple):
    """A reason why a run cannot be started. `row` is the row of the field that causes it; empty if no single field
    does."""

    row: str
    text: str
    may_wait: bool = False
    """The run may be queued all the same: its data may be added before it starts."""

    @property
    def in_form(self) -> str:
        """The text as a form tells it, which has fields and no command line: "set KEY=VALUE" for "add --set
        KEY=VALUE"."""
        return self.text.replace("add --set ", "set ").replace("--set ", "set ")

    @property
    def sentence(self) -> str:
        """The problem as a sentence: its text, preceded by the field's key unless the text already begins with
        the key."""
        text = self.in_form
        return text if not self.row or text.startswith(self.row) else f"{self.row}: {text}"


class StageVerdict(NamedTuple):
    """One stage of a staged recipe as the Launch screen shows it."""

    name: str
    kind: str
    verdict: Verdict | None
    """None for a stage that is switched off, and where nothing can be predicted."""
    text: str
    """The verdict in words, with the memory at the peak."""


@dataclass(frozen=True)
class EvaluatedChoice:
    """The result of `evaluate_choice`: run spec, memory plan, problems and notices."""

    spec: RunSpec | None = None
    """The resolved run spec; None where a file or an override is wrong."""
    plan: Plan | None = None
    """Of a staged run, the plan of the stage with the least memory left."""
    planned: RunSpec | None = None
    """The run spec that `plan` belongs to: the run's own, or that of the stage."""
    problems: tuple[FieldProblem, ...] = ()
    unplanned: str = ""
    """Why there is no plan although a run may be started."""
    lacks_config: bool = False
    """The model's config is not on this machine, so whether the run can be started is for the hub to say."""
    to_simulate: RunSpec | None = None
    """The run spec that has to be simulated before there is a plan."""
    notices: tuple[str, ...] = ()
    stages: tuple[StageVerdict, ...] = ()
    """All stages of a staged recipe, in order."""
    stages_disk_bytes: int | None = None
    """Of a staged recipe, most bytes of disk that its stages take together."""

    def problem_of(self, row: str) -> str:
        """Return the problems of the field with the key `row`, joined into one text; empty if there are none."""
        return "; ".join(problem.in_form for problem in self.problems if problem.row == row)

    def start_refusal(self, action: str) -> str | None:
        """Why the run cannot be started (action "start"), started although it does not fit ("force"), or queued
        ("queue"); None if it can. Missing data files do not prevent queueing, because they may be added before the run
        starts."""
        serious = [problem for problem in self.problems if action != "queue" or not problem.may_wait]
        if serious:
            return f"cannot start: {serious[0].sentence}"
        if self.to_simulate is not None:
            return "simulating its memory for the plan"
        too_large = self.plan is not None and self.plan.verdict == "does_not_fit"
        if too_large and action != "force":
            return "it does not fit: a applies the first fix, S starts it anyway"
        return "nothing to force: s starts it" if action == "force" and not too_large else None

    @property
    def disk_bytes(self) -> int | None:
        """Most bytes of disk that checkpoints and results of the run take, of a staged run those of all stages; None if
        that is unknown."""
        return self.stages_disk_bytes if self.stages or self.planned is None else needed_disk(self.planned)

    @property
    def batch_split(self) -> BatchSplit | None:
        """How the effective batch is divided into micro-batches; None without a plan."""
        if self.planned is None or self.plan is None:
            return None
        recipe, devices = self.planned.recipe, self.planned.profile.device.count
        batch = recipe.sequences_per_step
        accumulation = -(-batch // (self.plan.micro_batch * devices))
        return BatchSplit(batch, self.plan.micro_batch, accumulation, devices, recipe.learns_pairs)


class BatchSplit(NamedTuple):
    """The effective batch divided as micro-batch x accumulation x devices. If the product exceeds the batch, the last
    micro-batches of a step are smaller."""

    batch: int
    micro_batch: int
    accumulation: int
    devices: int
    pairs: bool = False
    """Whether the sequences are pairs of a chosen and a rejected one."""

    @property
    def formula(self) -> str:
        """The division as a formula, such as "8 × 4 accumulated × 1 device = 32", the sequences of a step."""
        of = f", {self.batch // 2} pairs" if self.pairs else ""
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        return f"{self.micro_batch} × {self.accumulation} accumulated × {devices} {self._equals} {self.batch}{of}"

    @property
    def sentence(self) -> str:
        """The division as a sentence, such as "micro-batch 8, 4 of them for a step of 32 of the longest
        sequences": shorter ones are cut otherwise."""
        each = f" on each of {self.devices} devices" if self.devices > 1 else ""
        steps = f"{self.accumulation} of them" if self.accumulation > 1 else "one"
        return f"micro-batch {self.micro_batch}{each}, {steps} for a step of {self._step}"

    @property
    def _step(self) -> str:
        longest = "of the longest pairs" if self.pairs else "of the longest sequences"
        return f"{self.batch // 2 if self.pairs else self.batch} {longest}"

    @property
    def _equals(self) -> str:
        return "=" if self.micro_batch * self.accumulation * self.devices == self.batch else "≥"


def evaluate_choice(choice: Choice) -> EvaluatedChoice:
    """Resolve and check a choice, and plan its memory. No input of the user makes this raise: errors are returned as
    problems."""
    try:
        limits = Limits(devices=parse_device_indices(choice.devices or None), on_finish=choice.on_finish or None)
        resolved = resolve(choice.profile, choice.recipe, choice.set_arguments, name=choice.name or None, limits=limits)
    except SpecError as error:
        return EvaluatedChoice(problems=tuple(map(_field_problem, error.problems)))
    except UsageError as error:
        return EvaluatedChoice(problems=(FieldProblem(DEVICES, _sentence(error)),))
    spec, notices = resolved.spec, resolved.notices
    problems: list[FieldProblem] = []
    plan, planned, unplanned, lacks_config, to_simulate = None, spec, "", False, None
    stages: tuple[StageVerdict, ...] = ()
    disk: int | None = None
    try:
        checked = check_run(spec, SCREEN)
        planned, notices = checked.spec, [*notices, *checked.notices, *checked.reported]
        problems += [problem for finding in checked.refused for problem in _problems_of(finding)]
        if spec.recipe.stages:
            staged = make_staged_plan(planned, checked.facts)
            stages, disk = _stage_verdicts(planned, staged), staged.disk_bytes
            plan, planned = (staged.worst.plan, staged.worst.spec) if staged.worst else (None, planned)
            notices = [*_shown_stage(staged), *notices]
            problems += _stages_that_do_not_fit(staged)
        else:
            plan = make_plan(planned, facts=checked.facts.of(planned.recipe.model))
    except NotSimulatedError as missing:
        unplanned = SIMULATING
        to_simulate = missing.spec if isinstance(missing.spec, RunSpec) and not problems else None
    except UnknownArchitectureError as unknown:
        unplanned = unknown.found
    except ConfigNotHereError as absent:
        unplanned, lacks_config = absent.found, True
    except TunedeckError as error:
        if not problems:  # else a rule has reported it
            problems.append(FieldProblem("model.id", _sentence(error)))
    return EvaluatedChoice(
        spec, plan, planned, tuple(problems), unplanned, lacks_config, to_simulate, tuple(notices), stages, disk
    )


def _shown_stage(staged: StagedPlan) -> list[str]:
    """At most one notice: the name of the stage whose memory the bar shows. Empty for a run with fewer than two
    stages."""
    if staged.worst is None or len(staged.stages) < 2:
        return []
    return [f"{len(staged.stages)} stages; the bar shows {staged.worst.name}, which has the least memory left"]


def _stages_that_do_not_fit(staged: StagedPlan) -> list[FieldProblem]:
    """A problem for each assembly stage whose hidden states do not fit into memory. Training stages are left out,
    because their plans report this."""
    return [
        FieldProblem(stage_row(stage.name), f'{stage.name} does not fit: router = "hidden" runs the recipe\'s model')
        for stage in staged.stages
        if stage.plan is None and stage.verdict == "does_not_fit"
    ]


def _stage_verdicts(spec: RunSpec, staged: StagedPlan) -> tuple[StageVerdict, ...]:
    planned = {stage.name: stage for stage in staged.stages}
    return tuple(
        StageVerdict(stage.name, stage.kind, planned[stage.name].verdict, _verdict_text(planned[stage.name]))
        if stage.name in planned
        else StageVerdict(stage.name, stage.kind, None, "off")
        for stage in spec.recipe.stages
    )


def _verdict_text(stage: StagePlan) -> str:
    """The verdict of a stage in words, short enough for half of 80 columns beside a name."""
    if stage.verdict is None:
        return "no plan"
    plan = stage.plan
    if plan is None:
        return f"{stage.verdict.replace('_', ' ')}, on host"
    words = describe_verdict(plan.verdict, remedies=plan.remedies)
    used = plan.prediction.device_bytes
    return f"{words}, {used / 2**30:.1f} GiB" if used >= 2**30 else f"{words}, {used / 2**20:.0f} MiB"


def _sentence(error: TunedeckError) -> str:
    return "; ".join(part for part in (error.found, error.expected) if part)


_WITH_PLACE = re.compile(r"(?:--set |(?P<file>.*?:\d+): )(?P<key>[\w.\"-]+?): (?P<text>.*)", re.DOTALL)
"""Parses a message of the checker: the override, or the file and line; then the key, then the text."""

_LEADING_KEY = re.compile(rf"(?P<key>(?:{'|'.join([*Recipe.model_fields, *Profile.model_fields])})(?:\.[\w-]+)+)\b")
"""Parses the key that a message of a rule begins with."""


def _field_problem(problem: str) -> FieldProblem:
    """Parse a message of the checker and assign it to the row of the field that it is about."""
    if problem.startswith("--name "):
        return FieldProblem(NAME, problem.removeprefix("--name "))
    match = _WITH_PLACE.fullmatch(problem)
    if match is None:
        return FieldProblem("", problem)
    file_and_line = f" ({os.path.basename(match['file'])})" if match["file"] else ""
    return FieldProblem(row_of_key(match["key"]), match["text"] + file_and_line)


def _problems_of(finding: Finding) -> list[FieldProblem]:
    """A problem for each line of a finding, at the key that the line begins with, else at the rule's own."""
    error, may_wait = finding.error, finding.rule.level == "later"
    found = []
    what = "; ".join(text for text in (error.found, error.fix) if text)
    one = what if finding.rule.level == "start" else _sentence(error)
    for text in error.problems if isinstance(error, SpecError) else [one]:
        match = _LEADING_KEY.match(text)
        found.append(FieldProblem(row_of_key(match["key"] if match else finding.key), text, may_wait))
    return found
