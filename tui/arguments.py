"""The console's command-line flags, and what the terminal can display.

Imports the standard library only: `tunedeck.py` imports this before every command, to find out whether the console or
a command is meant.

Try: `tunedeck --ascii --theme light`, `tunedeck -p demo -r demo --set train.max_steps=50`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VALUED = {"--runs": "runs", "--theme": "theme", "-p": "profile", "--profile": "profile", "-r": "recipe",
          "--recipe": "recipe"}  # fmt: skip
"""Flags with a value, and the field of `Flags` for it."""

THEMES = ("dark", "light", "ansi")


@dataclass(frozen=True, slots=True)
class Flags:
    """The console's command-line flags; a flag that was not given is empty."""

    runs: str = ""
    theme: str = ""
    profile: str = ""
    recipe: str = ""
    overrides: tuple[str, ...] = ()
    """KEY=VALUE of each --set."""
    ascii: bool = False


def parse(arguments: Sequence[str]) -> Flags | None:
    """Parse the console's flags. Returns None if the arguments contain anything else, which means that a command was
    called.

    Also returns None if the value of a flag is missing: the parser of the commands then prints the error.
    """
    values: dict[str, str] = {}
    overrides: list[str] = []
    ascii_flag = False
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag == "--ascii" and not equals:
            ascii_flag = True
        elif flag in VALUED and (equals or rest):
            values[VALUED[flag]] = value if equals else rest.pop(0)
        elif flag == "--set" and (equals or rest):
            overrides.append(value if equals else rest.pop(0))
        else:
            return None
    return Flags(ascii=ascii_flag, overrides=tuple(overrides), **values)


def without_flags(arguments: Sequence[str]) -> list[str]:
    """Only `--help` or `--version` where it stands behind flags of the console, else the arguments as they are."""
    asked = list(arguments[-1:])
    return asked if asked in (["--help"], ["--version"]) and parse(arguments[:-1]) is not None else list(arguments)


def on_a_terminal() -> bool:
    """Whether standard input, output and error are all a terminal. Textual draws on stderr, but a piped stdout means
    that a script reads the output. Also true when the console is served to a browser (textual-serve sets
    TEXTUAL_DRIVER), where pipes replace the terminal."""
    served = bool(os.environ.get("TEXTUAL_DRIVER"))
    return served or all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def theme_name(flags: Flags, environment: Mapping[str, str]) -> str:
    """Return the theme given with --theme; without the flag, `ansi` if Textual will draw at most sixteen colours, as it
    does in a tmux whose TERM is `screen`, else `dark`."""
    if flags.theme:
        return flags.theme
    many = environment.get("COLORTERM") or "256color" in environment.get("TERM", "")
    return "dark" if many else "ansi"


def ascii_only(flags: Flags, environment: Mapping[str, str]) -> bool:
    """Whether to draw with ASCII only: with --ascii, if the encoding of standard error is not UTF-8, or on the Linux
    console (TERM=linux) with its small font."""
    encoding = (getattr(sys.__stderr__, "encoding", None) or "ascii").lower().replace("-", "")
    return flags.ascii or encoding != "utf8" or environment.get("TERM") == "linux"
