"""`tunedeck recipes import` of another tool's configuration: what was mapped, what was left out, what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands.shared import print_line
from engine.config.files.text import quoted, visible

if TYPE_CHECKING:
    from engine.config.imports.draft import Draft

USUAL_PROFILE = "24gb"
"""For a plan by a user who has described no hardware of his own."""


def import_configuration_file(file: Path, *, devices: int | None, force: bool) -> None:
    from engine.config.imports.convert import import_configuration
    from engine.launch.requirements import own_profile

    draft, target = import_configuration(file, devices=devices or 1, force=force)
    for line in account(draft, devices):
        print_line(line)
    print_line(f"imported {target.stem}: {target}")
    name = shlex.quote(target.stem)
    if draft.blanks:
        print_line(f"next: fill in what is listed above in {target}, then tunedeck recipes check {name}")
    else:
        print_line(f"next: tunedeck plan -p {shlex.quote(own_profile() or USUAL_PROFILE)} -r {name}")


def account(draft: Draft, devices: int | None) -> list[str]:
    """One line for each key of that file, grouped by what became of it."""
    lines = [f"{draft.tool}'s configuration, mapped:"]
    for ours, theirs in draft.origin.items():
        table, _, key = ours.partition(".")
        value = draft.recipe.get(table, {}).get(key)
        if value is not None:
            lines.append(_line(f"{ours} = {_shown(value)}", theirs))
    if draft.with_others:
        lines.append(visible(f"  read for these, too: {', '.join(draft.with_others)}"))
    if draft.left_out:
        lines += ["left out:", *(_line(key, reason) for key, reason in draft.left_out.items())]
    if draft.empty:
        lines += ["empty in that file:", visible(f"  {', '.join(draft.empty)}")]
    if draft.blanks:
        lines += ["to fill in:", *(_line(key, reason) for key, reason in draft.blanks.items())]
    notes = list(draft.notes)
    if devices is None and "devices" in draft.origin.get("train.batch_size", ""):
        notes.append("train.batch_size is for one device: add --devices N if that configuration ran on N")
    return [*lines, *(f"note: {visible(note)}" for note in notes)]


def _shown(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join(str(source.get("hub") or source.get("path")) for source in value)
    return quoted(value)


def _line(what: str, why: str) -> str:
    return visible(f"  {what}  ({why})")
