"""What a person writes on a run: tags and a note in `labels.json` of its directory, and another name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from engine.errors import EnvironmentProblem, UsageError
from engine.journal.directory import RunDirectory, rewrite_spec
from engine.journal.files import read_table, write_atomically
from engine.journal.index import DIRECTORY_NAME
from engine.journal.liveness import refuse_if_claimed
from engine.journal.stages import stage_directories

TAG = re.compile(r"[\w.+:/-]{1,40}")
"""A tag is one word."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
"""A run's --name."""

MOST_NOTE = 500
"""Characters of a note."""

TOP_LEVEL_NAME = re.compile(r'^name = "[^"\n]*"$', re.MULTILINE)


@dataclass(frozen=True)
class Labels:
    tags: tuple[str, ...] = ()
    note: str = ""


def read_labels(directory: RunDirectory) -> Labels:
    """Without labels where there is no file, or the file is damaged. Cached until the file changes."""
    path = directory.path / "labels.json"
    try:
        found = path.stat()
    except OSError:
        return Labels()
    return _parsed(path, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=1024)
def _parsed(path: Path, _changed_ns: int, _inode: int) -> Labels:
    try:
        table = read_table(path)
    except (OSError, ValueError):
        return Labels()
    tags, note = table.get("tags"), table.get("note")
    tags = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return Labels(tuple(tags), note if isinstance(note, str) else "")


def write_labels(directory: RunDirectory, labels: Labels) -> None:
    """Raises UsageError for a tag that is not one word or a note that is too long, EnvironmentProblem if the file
    cannot be written."""
    for tag in labels.tags:
        if not TAG.fullmatch(tag):
            raise UsageError(f"{tag!r} is not a tag", expected="letters, digits and . _ - + : /, at most 40")
    if len(labels.note) > MOST_NOTE:
        raise UsageError(f"the note has {len(labels.note)} characters", expected=f"at most {MOST_NOTE}")
    table = {"tags": list(dict.fromkeys(labels.tags)), "note": labels.note}
    try:
        write_atomically(directory.path / "labels.json", json.dumps(table, indent=2) + "\n")
    except OSError as error:
        raise EnvironmentProblem(
            f"{directory.path} cannot be written: {error.strerror or error}", fix=f"see: ls -ld {directory.path}"
        ) from error


def labels_from(text: str) -> Labels:
    """Labels as they are typed on one line, such as "baseline keep; rank 8 was too low": tags, a semicolon, a note."""
    tags, _, note = text.partition(";")
    return Labels(tuple(tags.replace(",", " ").split()), note.strip())


def labels_text(labels: Labels) -> str:
    """The line that `labels_from` reads."""
    return " ".join(labels.tags) + (f"; {labels.note}" if labels.note else "")


def rename_run(directory: RunDirectory, name: str) -> RunDirectory:
    """Give a run another --name: in its directory's name, which keeps the time, and in its run.toml. Returns the new
    directory. Raises UsageError for a name that is not allowed or taken, EnvironmentProblem if an engine works on the
    run or the folder cannot be written."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid name",
            expected="letters, digits, '.', '_' and '-', starting with a letter or digit, at most 80",
        )
    stamped = DIRECTORY_NAME.match(directory.name)
    target = RunDirectory(directory.path.with_name(f"{stamped[1]}-{name}" if stamped else name))
    if target.path.exists():
        raise UsageError(f"{target.path} already exists", expected="a name that no other run has")
    try:
        refuse_if_claimed(directory)
        texts = [(run, run.run_toml.read_text("utf-8")) for run in (directory, *stage_directories(directory))]
        os.rename(directory.path, target.path)
        for run, text in texts:
            place = RunDirectory(target.path / run.path.relative_to(directory.path))
            rewrite_spec(place, _with_name(text, name))
    except OSError as error:
        raise EnvironmentProblem(
            f"{directory.path} cannot be renamed: {error.strerror or error}", fix=f"see: ls -ld {directory.path.parent}"
        ) from error
    return target


def _with_name(text: str, name: str) -> str:
    """The text of a run.toml with another name; a stage keeps what follows the slash of its own."""
    found = TOP_LEVEL_NAME.search(text)
    if found is None:
        return text
    stage = found[0].rpartition("/")[2] if "/" in found[0] else '"'
    return text[: found.start()] + f'name = "{name}' + ("/" if "/" in found[0] else "") + stage + text[found.end() :]


def referring_runs(directory: RunDirectory, runs: list[RunDirectory]) -> Iterator[str]:
    """Yield the names of `runs` whose run.toml has this run's path, such as those that start from its result."""
    path = str(directory.path)
    for run in runs:
        try:
            if run.path != directory.path and path in run.run_toml.read_text("utf-8", errors="replace"):
                yield run.name
        except OSError:
            continue
