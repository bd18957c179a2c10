"""Prints for all commands: JSON documents and tables on standard output, notices on standard error.

rich is imported inside the functions, so that `tunedeck --help` does not wait for the import.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_line(text: str) -> None:
    """Print `text` and a newline on standard output."""
    sys.stdout.write(text + "\n")


def print_json(document: object, *, indent: int | None = 2) -> None:
    """Print one JSON document on standard output, in ASCII."""
    sys.stdout.write(json.dumps(document, indent=indent) + "\n")


def print_progress(text: str) -> None:
    """Print on standard error what a command is doing."""
    sys.stderr.write(text + "\n")


def print_notices(notices: Iterable[str]) -> None:
    """Print notices for the user on standard error: standard output is for results."""
    for notice in notices:
        sys.stderr.write(f"tunedeck: {notice}\n")


ENDLESS = 4096
"""Columns of a table in a pipe or file: no cell is wrapped or cut, because a script reads it."""


def make_console(*, soft_wrap: bool = False) -> Console:
    """Make a rich console on standard output that reads no markup, raises BrokenPipeError if the pipe is closed, and
    wraps no line in a pipe; with `soft_wrap` none on a terminal, either."""
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            """Raise BrokenPipeError, where rich would end the process: a command that follows a run has to detach
            first."""
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    width = None if sys.stdout.isatty() else ENDLESS
    return PipeConsole(markup=False, emoji=False, highlight=False, soft_wrap=soft_wrap, width=width)


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Print names and values in two columns: wrapped on a terminal, else one line per row, so that paths are not
    broken."""
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in rows)
        sys.stdout.write("".join(f"{name:<{width}}  {value}".rstrip() + "\n" for name, value in rows))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    make_console().print(table)
