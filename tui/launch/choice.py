"""A choice on the Launch screen: profile, recipe and overrides, and the headless command that means the same.

Pure values; nothing here reads a file. `tui.launch.evaluate` turns a choice into a run spec and a memory plan.

Try: `python -c "from tui.launch.choice import *; print(shell_lines(train_command(Choice('demo', 'demo'))))"`
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.config.files.find import KIND_FOLDERS, SHIPPED_FOLDER, SpecKind
from tui.launch.fields import DEVICES, NAME, ON_FINISH, overrides_from, row_of_key


@dataclass(frozen=True)
class Choice:
    """The chosen profile and recipe, as names or paths, and the values that the user typed to override those in the
    files."""

    profile: str
    recipe: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Maps a dotted key to the text of its value, as typed after --set."""
    devices: str = ""
    """Device indices as typed after --devices, such as "0,2"; empty: as the profile says."""
    name: str = ""
    """The run's name as typed after --name; empty: the recipe's."""
    on_finish: str = ""
    """The shell command as typed after --on-finish; empty: none."""

    @property
    def set_arguments(self) -> list[str]:
        """The overrides as --set takes them: KEY=VALUE."""
        return [f"{key}={text}" for key, text in self.overrides.items()]

    @property
    def options(self) -> dict[str, str]:
        """The values of the fields that are command-line flags and not keys of a file (--devices, --name and
        --on-finish), by row key."""
        return {DEVICES: self.devices, NAME: self.name, ON_FINISH: self.on_finish}

    def with_field(self, row: str, text: str) -> Choice:
        """Return a copy of this choice in which the field with the key `row` (a key of a file, or a command-line flag)
        has the value `text`."""
        if row == DEVICES:
            return replace(self, devices=text)
        if row == NAME:
            return replace(self, name=text)
        if row == ON_FINISH:
            return replace(self, on_finish=text)
        return replace(self, overrides={**self.without_field(row).overrides, **overrides_from(row, text)})

    def without_field(self, row: str) -> Choice:
        """Return a copy of this choice without an override for the field with the key `row`, so that the value in the
        file applies."""
        if row in self.options:
            return self.with_field(row, "")
        kept = {key: text for key, text in self.overrides.items() if key != row and row_of_key(key) != row}
        return replace(self, overrides=kept)


def train_command(choice: Choice, *, runs: str = "") -> list[str]:
    """Return the words of the `tunedeck train` command that starts the same run without the console. `runs` is the
    folder for --runs; empty leaves the flag out."""
    words = ["tunedeck", "train", *data_arguments(choice)]
    for flag, value in (*choice.options.items(), ("--runs", runs)):
        words += [flag, value] if value else []
    return [*words, "--detach"]


def data_arguments(choice: Choice) -> list[str]:
    """Return the command-line arguments with which `tunedeck data` reads the data of this choice."""
    sets = [word for text in choice.set_arguments for word in ("--set", text)]
    return ["-p", choice.profile, "-r", choice.recipe, *sets]


def shell_lines(words: Sequence[str]) -> list[str]:
    """Format a train command for a shell: the first line has program, profile and recipe, each further line one
    flag."""
    lines = [" ".join(map(shlex.quote, words[:6]))]
    rest = list(words[6:])
    while rest:
        flag = rest.pop(0)
        has_value = rest and flag in ("--set", DEVICES, NAME, ON_FINISH, "--runs")
        lines.append("  " + flag + (f" {shlex.quote(rest.pop(0))}" if has_value else ""))
    return [line + (" \\" if line is not lines[-1] else "") for line in lines]


def choice_from_settings(settings: object, default: Choice) -> Choice:
    """A choice from a dict of profile, recipe and overrides, such as the provenance of an earlier run.

    Overrides are a dict or a list of KEY=VALUE. A missing profile or recipe is taken from `default`.
    """
    if not isinstance(settings, Mapping):
        return default
    overrides = settings.get("overrides") or {}
    if not isinstance(overrides, Mapping):
        overrides = {text.partition("=")[0].strip(): text.partition("=")[2].strip() for text in overrides}
    return Choice(
        profile=_shipped_path(str(settings.get("profile") or default.profile), "profile"),
        recipe=_shipped_path(str(settings.get("recipe") or default.recipe), "recipe"),
        overrides={str(key): str(text) for key, text in overrides.items()},
        devices=str(settings.get("devices") or ""),
        name=str(settings.get("name") or ""),
        on_finish=str(settings.get("on_finish") or ""),
    )


def _shipped_path(text: str, kind: SpecKind) -> str:
    """The path of the shipped file for "shipped:NAME", so that a file of the same name in the project is not used
    instead; any other text is returned unchanged."""
    if not text.startswith("shipped:"):
        return text
    return str(SHIPPED_FOLDER / KIND_FOLDERS[kind] / f"{text.removeprefix('shipped:')}.toml")
