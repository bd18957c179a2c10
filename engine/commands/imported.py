"""`tunedeck recipes import` of another tool's configuration: what was mapped, what was left out, what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands.shared import print_line
from engine.config.files.text import quoted, visible

if TYPE_CHECKING:
    from engine.extras.imports.draft import Draft

USUAL_PROFILE = "24gb"
"""For a plan by a user who has described no hardware of his own."""


def import_configuration_file(
    file: Path, *, devices: int | None, name: str | None, to: Path | None, force: bool
) -> None:
    from engine.checks.machine import own_profile
    from engine.extras.imports.convert import draft_of, write_recipe
    from engine.extras.imports.import_names import keep_matching_names

    draft = draft_of(file, devices=devices or 1)
    keep_matching_names(draft)
    target = write_recipe(draft, file, name=name, to=to, force=force)
    for line in account(draft, devices):
        print_line(line)
    print_line(f"imported {target.stem}: {target}")
    profile = own_profile() or USUAL_PROFILE
    for line in checked(profile, target):
        print_line(line)
    recipe = shlex.quote(target.stem if to is None else str(target))
    if draft.blanks:
        print_line(f"next: fill in what is listed above in {target}, then tunedeck recipes check {recipe}")
    else:
        print_line(f"next: tunedeck plan -p {shlex.quote(profile)} -r {recipe}")


def checked(profile: str, recipe: Path) -> list[str]:
    """Return what `recipes check` and `plan` say of an imported recipe, in lines."""
    from engine.budget.advise.plan import make_plan
    from engine.checks.run import ANY_PROFILE, CHECK, check_run, problems_of_run
    from engine.commands.plan_text import summary_lines
    from engine.config.load import resolve
    from engine.errors import TunedeckError

    try:
        spec = resolve(profile, str(recipe)).spec
        problems = problems_of_run(spec.model_copy(update={"profile": ANY_PROFILE}))
        lines = [f"check: {problem}" for problem in problems] or ["check: no problem"]
        if not problems:
            run = check_run(spec, CHECK)
            plan = make_plan(run.spec, facts=run.facts.of(run.spec.recipe.model))
            lines += [f"plan on {profile}: {line}" for line in summary_lines(plan, run.spec)[:2]]
    except TunedeckError as error:
        return [f"check: {line}" for line in error.render().splitlines()]
    return [visible(line) for line in lines]


def account(draft: Draft, devices: int | None) -> list[str]:
    """One line for each key of that file, grouped by what became of it."""
    lines = [f"{draft.tool}'s configuration, mapped:"]
    for ours, theirs in draft.origin.items():
        table, _, key = ours.partition(".")
        value = draft.recipe.get(table, {}).get(key)
        if value is not None:
            lines.append(_line(f"{ours} = {_shown(value)}", theirs))
    if draft.with_others:
        lines.append(visible(f"  also used for these: {', '.join(draft.with_others)}"))
    if draft.left_out:
        lines += ["left out:", *(_line(key, reason) for key, reason in draft.left_out.items())]
    if draft.empty:
        lines += ["keys without a value in that file:", visible(f"  {', '.join(draft.empty)}")]
    if draft.blanks:
        lines += ["to fill in:", *(_line(key, reason) for key, reason in draft.blanks.items())]
    notes = list(draft.notes)
    if devices is None and "devices" in draft.origin.get("train.batch_size", ""):
        notes.append("train.batch_size assumes one device: add --devices N if that configuration ran on N devices")
    return [*lines, *(f"note: {visible(note)}" for note in notes)]


def _shown(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict) and "name" in value[0]:
        return ", ".join(str(source.get("hub") or source.get("path")) for source in value)
    return quoted(value)


def _line(what: str, why: str) -> str:
    return visible(f"  {what}  ({why})")
