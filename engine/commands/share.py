"""`tunedeck export` and `tunedeck import`: a run as one file. `tunedeck report`: what a bug report needs, as text to
paste, without rows of data, answers, prompts, folders, names of data files and machines, or values of the
environment."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.completion import run_names
from engine.commands.shared import RunArgument, RunsOption, find_run, print_line, print_notices, runs_folder
from engine.config.files.secrets import without_secrets
from engine.errors import EnvironmentProblem, TunedeckError, UsageError

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory


OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Output file; by default RUN.tunedeck in this folder.")
]


def export(
    run: RunArgument,
    weights: Annotated[bool, typer.Option("--weights", help="Include the result's weights.")] = False,
    out: OutOption = None,
    runs: RunsOption = None,
) -> None:
    """Write a run into one file, for another machine. There it can be shown, compared and repeated."""
    from engine.journal.archive import SUFFIX, export_run
    from engine.journal.event_text import clean, format_bytes

    directory = find_run(run, runs)
    target = (out or Path(f"{directory.name}{SUFFIX}")).expanduser().absolute()
    size_bytes, left_out = export_run(directory, target, weights=weights)
    print_notices(f"{clean(name)} is left out: a link to a path outside the run's folder" for name in left_out)
    print_line(f"{target} ({format_bytes(size_bytes)}); on the other machine: tunedeck import {target.name}")


def import_archive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by export.", show_default=False)],
    runs: RunsOption = None,
) -> None:
    """Add an exported run to the folder of runs."""
    from engine.journal.archive import import_run

    made = import_run(file.expanduser(), runs_folder(runs))
    print_line(f"{made.path}; to repeat it: tunedeck train --run-spec {made.run_toml}")
    print_notices(["an imported run has neither --on-finish nor --trust-remote-code; add them when you repeat it"])


TOLD = (
    "run_started", "stage_started", "backoff", "remedy_lifted", "proof", "warning", "stage_finished", "run_finished",
)  # fmt: skip
"""Kinds of events that are quoted; the others are counted."""
LEFT_OUT = ("host", "pid", "path", "samples", "report", "result", "device_processes", "from", "seq", "time")
"""Fields of events that name places, people or data, or say nothing."""
LAST_EVENTS, LOG_LINES, LONGEST_LINE = 25, 60, 1000
TRACEBACK = "Traceback (most recent call last):"
OF_DATA = re.compile(r'^((?:path|hub|image_root|prompts|system) = )(?!"builtin:).*|(\.(?:path|hub|image_root)=)[^"]*')
"""A line of run.toml, or a part of its `set`, that names data or quotes a prompt."""
PLACE = re.compile(r"(?<![\w.])~?(?:/[\w.@+ -]+){2,}")
"""A path of at least two parts; of it the last part is kept."""


def report(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", autocompletion=run_names, help="A run to include.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write to a file.")] = None,
    runs: RunsOption = None,
) -> None:
    """Print what a bug report needs, without data or paths."""
    text = "\n".join(_lines(find_run(run, runs) if run else None, runs_folder(runs)))
    if out is None:
        print_line(text)
    elif out.exists():
        raise UsageError(f"{out} already exists", fix="choose another file with --out")
    else:
        try:
            out.write_text(text + "\n", "utf-8")
        except OSError as error:
            raise EnvironmentProblem(
                f"{out} cannot be written: {error.strerror or error}", fix="choose another file with --out"
            ) from error
    print_notices([f"read {out or 'it'} before you send it: an error message may quote your training data"])


def _lines(run: RunDirectory | None, runs: Path) -> Iterator[str]:
    from engine.commands.doctor import examine

    yield from ("## What happened", "", "(what you did, what you expected, what happened instead)", "")
    yield from ("## This machine", "")
    for finding in examine(runs, ask_hub=False):
        if finding.topic != "hub token":
            yield shortened(f"- {finding.topic}: {finding.text.partition(', held by')[0]}")
    if run is not None:
        yield from ("", f"## Run {run.name}", "")
        yield from _of_run(run)


def _of_run(run: RunDirectory) -> Iterator[str]:
    from engine.journal.events import EventTail

    yield from ("```toml", *_spec_lines(run), "```", "")
    events = EventTail(run.events).poll()
    yield "Events: " + ", ".join(f"{count} {kind}" for kind, count in Counter(e["kind"] for e in events).items())
    yield from ("", "```json")
    for event in [event for event in events if event["kind"] in TOLD][-LAST_EVENTS:]:
        yield shortened(json.dumps({key: value for key, value in event.items() if key not in LEFT_OUT}))
    yield "```"
    if lines := _last_traceback(run.log):
        yield from ("", "The last traceback in engine.log:", "", "```", *map(shortened, lines), "```")


def _spec_lines(run: RunDirectory) -> list[str]:
    """The run's spec without its limits, and without what its data are."""
    from engine.config.load import dump_run_spec, load_run_spec, without_destinations

    try:
        spec = load_run_spec(run.run_toml)
    except TunedeckError as error:
        return [shortened(f"# run.toml cannot be read: {error.found}")]
    lines = dump_run_spec(without_destinations(spec)).splitlines()
    return [shortened(OF_DATA.sub(r"\1\2(left out)", line)) for line in lines]


def _last_traceback(log: Path) -> list[str]:
    try:
        lines = log.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    starts = [number for number, line in enumerate(lines) if TRACEBACK in line]
    return lines[starts[-1] :][-LOG_LINES:] if starts else []


def shortened(line: str) -> str:
    """`line` without control characters and secrets, its paths by their last part alone, at most LONGEST_LINE long."""
    from engine.journal.event_text import clean

    line = without_secrets(clean(line))
    return PLACE.sub(lambda found: ".../" + found.group().rpartition("/")[2], line)[:LONGEST_LINE]
