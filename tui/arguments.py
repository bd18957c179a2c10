"""What the console is opened with: the flags after `tunedeck` where no command follows, and what the terminal can show.

Standard library only: `tunedeck.py` reads this before every command, to know whether one was given at all.

Try: `tunedeck --ascii --theme light`, `tunedeck -p demo -r demo`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VALUED = {"--runs": "runs", "--theme": "theme", "-p": "profile", "--profile": "profile", "-r": "recipe",
          "--recipe": "recipe"}  # fmt: skip
"""Flags that take a value, and the field it goes to."""

SWITCHES = {"--ascii": "ascii"}
"""Flags that are there or not."""

THEMES = ("dark", "light", "ansi")


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags as they were given; empty where they were not."""

    runs: str = ""
    theme: str = ""
    profile: str = ""
    recipe: str = ""
    ascii: bool = False


def parse(arguments: Sequence[str]) -> Flags | None:
    """The console's flags; None where there is anything else among the arguments, which is the command line's affair.

    A flag whose value is missing is left to the command line, too: it knows how to complain.
    """
    found: dict[str, str | bool] = {}
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag in SWITCHES and not equals:
            found[SWITCHES[flag]] = True
        elif flag in VALUED and (equals or rest):
            found[VALUED[flag]] = value if equals else rest.pop(0)
        else:
            return None
    return Flags(**found)  # type: ignore[arg-type]


def on_a_terminal() -> bool:
    """Whether keys can be read and a screen drawn. Textual draws on stderr; a piped stdout means a script reads.

    Served to a browser (textual-serve), the pipes are the screen: Textual is told by a variable.
    """
    served = bool(os.environ.get("TEXTUAL_DRIVER"))
    return served or all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def theme_name(flags: Flags, environment: Mapping[str, str]) -> str:
    """The theme asked for, else `ansi` where the terminal says that it has no more than its sixteen colours."""
    if flags.theme:
        return flags.theme
    many = environment.get("COLORTERM") or "256color" in environment.get("TERM", "") or environment.get("TMUX")
    return "dark" if many else "ansi"


def ascii_only(flags: Flags, environment: Mapping[str, str]) -> bool:
    """Whether to draw with ASCII alone: asked for, no UTF-8, or Linux's own console with its small font."""
    encoding = (getattr(sys.__stderr__, "encoding", None) or "ascii").lower().replace("-", "")
    return flags.ascii or encoding != "utf8" or environment.get("TERM") == "linux"
