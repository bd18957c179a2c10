"""What the Launch screen is about, as pure values: a choice, what it comes to, and the command that does the same.

A `Choice` is what the user has chosen and typed; `work_out` turns it into a run spec, a plan and the problems of each
field, in about a millisecond. Nothing here draws, and nothing writes a file.

Try: `python -c "from tui.launch.choice import *; print(work_out(Choice('demo', 'demo')).plan.verdict)"`
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from engine.budget.advise.plan import Plan, make_plan
from engine.errors import ConfigNotHereError, SpecError, TunedeckError, UnknownArchitectureError, UsageError
from engine.launch.create_run import require_launcher
from engine.spec.check.devices import parse_device_indices, require_matching_devices
from engine.spec.check.unsupported import refuse_unsupported
from engine.spec.files.find import KIND_FOLDERS, SHIPPED_FOLDER, SpecKind
from engine.spec.files.working_directory import working_directory
from engine.spec.load import resolve
from engine.spec.schema.run import Limits, RunSpec
from tui.launch.fields import DEVICES, NAME, SOURCES, overrides_of, source_of

BUILTIN = "builtin:"
NO_FILE = "no such file: "


@dataclass(frozen=True)
class Choice:
    """What was chosen: names or paths of both files, and what was typed over them."""

    profile: str
    recipe: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Dotted key = text, as after --set."""
    devices: str = ""
    name: str = ""

    @property
    def sets(self) -> list[str]:
        """The overrides as --set takes them."""
        return [f"{key}={text}" for key, text in self.overrides.items()]

    @property
    def options(self) -> dict[str, str]:
        """The rows that are not keys of a file."""
        return {DEVICES: self.devices, NAME: self.name}

    def put(self, row: str, text: str) -> Choice:
        """The choice with this text in a row."""
        if row == DEVICES:
            return replace(self, devices=text)
        if row == NAME:
            return replace(self, name=text)
        return replace(self, overrides={**self.without(row).overrides, **overrides_of(row, text)})

    def without(self, row: str) -> Choice:
        """The choice with a row as the file has it."""
        if row in (DEVICES, NAME):
            return self.put(row, "")
        kept = {key: text for key, text in self.overrides.items() if key != row and source_of(key) != row}
        return replace(self, overrides=kept)


class Trouble(NamedTuple):
    """Something that keeps a run from being started; `row` is empty where it belongs to no field."""

    row: str
    text: str

    @property
    def sentence(self) -> str:
        """With the row's key before it, where the text does not begin with it."""
        return self.text if not self.row or self.text.startswith(self.row) else f"{self.row}: {self.text}"


@dataclass(frozen=True)
class Outcome:
    """What a choice comes to."""

    spec: RunSpec | None = None
    plan: Plan | None = None
    troubles: tuple[Trouble, ...] = ()
    unplanned: str = ""
    """Why there is no plan although a run may be started."""
    notices: tuple[str, ...] = ()

    def trouble_of(self, row: str) -> str:
        """What is wrong with a row, in one text."""
        return "; ".join(trouble.text for trouble in self.troubles if trouble.row == row)


def refusal(outcome: Outcome, action: str) -> str | None:
    """Why a run cannot be started ("start"), started although too large ("force"), or queued ("queue"); None when it
    can. Data may still be on its way while a run waits in the queue."""
    serious = [trouble for trouble in outcome.troubles if action != "queue" or not trouble.text.startswith(NO_FILE)]
    if serious:
        return f"cannot start: {serious[0].sentence}"
    too_large = outcome.plan is not None and outcome.plan.verdict == "does_not_fit"
    if too_large and action != "force":
        return "it does not fit: a applies the first fix, S starts it anyway"
    return "nothing to force: s starts it" if action == "force" and not too_large else None


def work_out(choice: Choice, cwd: Path | None = None) -> Outcome:
    """Resolve, check and plan a choice. Never raises for what a user can type."""
    here = (cwd or working_directory()).absolute()
    try:
        limits = Limits(devices=parse_device_indices(choice.devices or None))
        resolved = resolve(
            choice.profile, choice.recipe, choice.sets, name=choice.name or None, limits=limits, cwd=here
        )
        require_matching_devices(resolved.spec)
    except SpecError as error:
        return Outcome(troubles=tuple(map(_placed, error.problems)))
    except UsageError as error:
        return Outcome(troubles=(Trouble(DEVICES, _sentence(error)),))
    troubles = [*_unbuilt(resolved.spec), *_missing_data(resolved.spec)]
    plan, unplanned = None, ""
    try:
        plan = make_plan(resolved.spec)
    except (UnknownArchitectureError, ConfigNotHereError) as unknown:
        unplanned = unknown.found
    except TunedeckError as error:
        troubles.append(Trouble("model.id", _sentence(error)))
    return Outcome(resolved.spec, plan, tuple(troubles), unplanned, tuple(resolved.notices))


def _sentence(error: TunedeckError) -> str:
    return "; ".join(part for part in (error.found, error.expected) if part)


_PLACED = re.compile(r"(?:--set |(?P<file>.*?:\d+): )(?P<key>[\w.\"-]+?): (?P<text>.*)", re.DOTALL)
_NAMED = re.compile(r"(?P<key>[a-z]+(?:\.[\w-]+)+|--devices|--name)\b")


def _placed(problem: str) -> Trouble:
    """A problem of the checker beside the row it is about."""
    if problem.startswith("--name "):
        return Trouble(NAME, problem.removeprefix("--name "))
    match = _PLACED.fullmatch(problem)
    if match is None:
        return Trouble("", problem)
    where = f" ({os.path.basename(match['file'])})" if match["file"] else ""
    return Trouble(source_of(match["key"]), match["text"] + where)


def _unbuilt(spec: RunSpec) -> list[Trouble]:
    try:
        refuse_unsupported(spec)
    except SpecError as error:
        return [Trouble(match["key"] if (match := _NAMED.match(text)) else "", text) for text in error.problems]
    try:
        require_launcher(spec)
    except UsageError as error:
        return [Trouble("", f"{error.found}: tunedeck launch writes a script for all of them")]
    return []


def _missing_data(spec: RunSpec) -> list[Trouble]:
    """Files that are not there: the engine would find out only after it has loaded the model."""
    paths = [(source.name, source.path) for source in spec.recipe.data.sources if source.enabled and source.path]
    return [Trouble(SOURCES + name, f"{NO_FILE}{path}") for name, path in paths if not _may_be_there(path)]


def _may_be_there(path: str) -> bool:
    return path.startswith(BUILTIN) or "://" in path or glob.has_magic(path) or os.path.exists(path)


class Split(NamedTuple):
    """How the effective batch is cut."""

    batch: int
    micro: int
    accumulation: int
    devices: int

    @property
    def short(self) -> str:
        """For a row."""
        return f"{self.micro} × {self.accumulation} × {self.devices} {self._equals} {self.batch}"

    @property
    def sentence(self) -> str:
        """In words."""
        return (
            f"{self.micro} micro-batch × {self.accumulation} accumulation × {self.devices} device"
            f"{'s' * (self.devices > 1)} {self._equals} {self.batch} sequences per step"
        )

    @property
    def _equals(self) -> str:
        return "=" if self.micro * self.accumulation * self.devices == self.batch else "≥"


def split_of(spec: RunSpec, plan: Plan) -> Split:
    """The effective batch as micro-batch x accumulation x devices; the last round may not be full."""
    batch, devices = spec.recipe.train.batch_size, spec.profile.device.count
    return Split(batch, plan.micro_batch, -(-batch // (plan.micro_batch * devices)), devices)


def command(choice: Choice, *, runs: str = "", force: bool = False) -> list[str]:
    """The command line that starts the same run without the console."""
    words = ["tunedeck", "train", "-p", choice.profile, "-r", choice.recipe]
    for text in choice.sets:
        words += ["--set", text]
    for flag, value in ((DEVICES, choice.devices), (NAME, choice.name), ("--runs", runs)):
        words += [flag, value] if value else []
    return [*words, *(["--force"] if force else []), "--detach"]


def data_arguments(choice: Choice) -> list[str]:
    """What `tunedeck data` needs to read this choice's data."""
    return ["-p", choice.profile, "-r", choice.recipe, *(word for text in choice.sets for word in ("--set", text))]


def command_lines(words: Sequence[str]) -> list[str]:
    """The command for a shell, a flag with its value on each line after the first."""
    lines = [" ".join(map(shlex.quote, words[:6]))]
    rest = list(words[6:])
    while rest:
        flag = rest.pop(0)
        valued = rest and flag in ("--set", DEVICES, NAME, "--runs")
        lines.append("  " + flag + (f" {shlex.quote(rest.pop(0))}" if valued else ""))
    return [line + (" \\" if line is not lines[-1] else "") for line in lines]


def from_settings(settings: object, default: Choice) -> Choice:
    """The choice that a dict of profile, recipe and overrides stands for, such as an earlier run's provenance.

    Overrides are a dict, or a list of KEY=VALUE. What is not given stays as in `default`.
    """
    if not isinstance(settings, Mapping):
        return default
    overrides = settings.get("overrides") or {}
    if not isinstance(overrides, Mapping):
        overrides = {text.partition("=")[0].strip(): text.partition("=")[2].strip() for text in overrides}
    return Choice(
        profile=_plain(str(settings.get("profile") or default.profile), "profile"),
        recipe=_plain(str(settings.get("recipe") or default.recipe), "recipe"),
        overrides={str(key): str(text) for key, text in overrides.items()},
        devices=str(settings.get("devices") or ""),
        name=str(settings.get("name") or ""),
    )


def _plain(text: str, kind: SpecKind) -> str:
    """Provenance's "shipped:NAME" as the shipped file's path, which no file of the same name can hide."""
    if not text.startswith("shipped:"):
        return text
    return str(SHIPPED_FOLDER / KIND_FOLDERS[kind] / f"{text.removeprefix('shipped:')}.toml")
