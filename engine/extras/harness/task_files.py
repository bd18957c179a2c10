"""Task files of lm-evaluation-harness that come from somebody else: which of their lines make it run Python code, or
open what is not in their folder. The files are parsed, and nothing in them is constructed or imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.files.text import visible
from engine.config.schema.recipe import Recipe
from engine.errors import UsageError
from engine.journal.files import open_regular

MOST_FILES, MOST_FILE_BYTES, MOST_NODES = 5_000, 1 << 20, 100_000
"""Of a folder of tasks, of a file, and of the values in a file with its aliases written out."""

PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in (
    "str", "int", "float", "bool", "null", "map", "seq", "merge", "timestamp"
))  # fmt: skip
NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

LONGEST_NUMBER = 100
NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxXoOeE_:.]*")
"""What YAML may read as a number, of which a long one takes a parser without end."""

READERS = frozenset({"json", "csv", "text", "parquet", "arrow"})
"""Formats of `dataset_path` that datasets reads as plain data; `pandas` and others unpack Python objects."""
DATASET_OPTIONS = frozenset({
    "data_files", "data_dir", "field", "revision", "streaming", "delimiter", "sep", "column_names", "keep_linebreaks",
})  # fmt: skip
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ADDRESS = re.compile(r"://|::")
"""What makes datasets open a URL, or an archive by way of another file system."""

CODE_KEYS = {
    "class": "a task defined by a Python class",
    "use_prompt": "a prompt from another package or file",
    "unsafe_code": "a task that executes the answers as code",
}
MOST_REPEATS = 1_000
"""Answers to one prompt, and examples before it, that a task may ask for."""
COUNTS = ("repeats", "num_fewshot")

SHOWN = 5
"""Lines named in a message."""


@dataclass
class _Walk:
    """What is known of a folder while its files are read."""

    folder: Path
    problems: list[str] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)
    metrics: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class TaskFiles:
    """What the task files of a folder contain."""

    problems: tuple[str, ...]
    """Lines that run code or leave the folder: FILE:LINE: what."""
    metrics: frozenset[str]
    """Names of metrics: one that lm-evaluation-harness does not have is loaded as code from the hub."""


def read_task_files(folder: Path) -> TaskFiles:
    """Read all task files below `folder`. Raises UsageError for one that cannot be read or exceeds its bound."""
    walk = _Walk(folder.resolve())
    for count, path in enumerate(sorted(folder.rglob("*.yaml"))):
        if count >= MOST_FILES:
            raise UsageError(f"{folder} has more than {MOST_FILES:,} task files", fix="choose a smaller folder")
        _read(path.resolve(), walk)
    return TaskFiles(tuple(walk.problems), frozenset(walk.metrics))


def refuse_untrusted_tasks(folder: Path, *, trusted: bool) -> TaskFiles | None:
    """Return what the task files contain; None if they are trusted. Raises UsageError for code in them that the command
    line does not allow (`trusted`), and as `read_task_files` does."""
    if trusted:
        return None
    files = read_task_files(folder)
    if files.problems:
        raise UsageError(
            f"evaluate.harness_include: {_shown(files.problems)}",
            expected="tasks without code, with data from their own folder or the hub",
            fix="if you trust their author, add --trust-remote-code",
        )
    return files


def notes_on_tasks(recipes: Sequence[Recipe]) -> list[str]:
    """Return what --trust-remote-code has to allow before these recipes' tasks are scored, a line for each folder."""
    found = []
    for recipe in recipes:
        include = recipe.evaluate.harness_include
        if include is not None and Path(include).is_dir():
            try:
                refuse_untrusted_tasks(Path(include), trusted=False)
            except UsageError as error:
                found.append("; ".join(text for text in (error.found, error.fix) if text))
    return list(dict.fromkeys(found))


def _shown(problems: Sequence[str]) -> str:
    more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "; ".join(problems[:SHOWN]) + more


def _read(path: Path, walk: _Walk) -> None:
    if path in walk.seen:
        return
    walk.seen.add(path)
    import yaml  # only for task files

    try:
        with open_regular(path) as file:
            data = file.read(MOST_FILE_BYTES + 1)
        if len(data) > MOST_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MOST_FILE_BYTES >> 20} MiB", expected="a task file")
        node = yaml.compose(data.decode("utf-8"), yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", fix="remove it from the folder") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} is not YAML: {visible(first)[:100]}", fix="correct it") from error
    if _size(node, {}, path) > MOST_NODES:
        raise UsageError(f"{path} has more than {MOST_NODES:,} values with its aliases", fix="shorten it")
    _check(node, path, walk, set())


def _size(node: Any, known: dict[int, int], path: Path) -> int:
    """Return how many values a node of PyYAML stands for, its aliases written out."""
    if id(node) in known:
        if known[id(node)] < 0:
            raise UsageError(f"{path} has an alias inside its own value", fix="write out the value")
        return known[id(node)]
    known[id(node)] = -1
    children = node.value if node is not None and isinstance(node.value, list) else []
    parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
    known[id(node)] = 1 + sum(_size(part, known, path) for part in parts)
    return known[id(node)]


def _check(node: Any, path: Path, walk: _Walk, done: set[int]) -> None:
    """Add the problems of a node and of what is below it."""
    if node is None or id(node) in done:
        return
    done.add(id(node))
    line = f"{visible(_name(path, walk))}:{node.start_mark.line + 1}"
    if node.tag not in PLAIN_TAGS:
        walk.problems.append(f"{line}: the tag {visible(node.tag)[:60]} runs code")
    if isinstance(node.value, str):
        is_number = node.tag in NUMBER_TAGS or (node.style is None and NUMBER.fullmatch(node.value))
        if len(node.value) > LONGEST_NUMBER and is_number:
            raise UsageError(f"{line}: a number of {len(node.value)} characters", fix="correct it")
        return
    for child in node.value:
        if isinstance(child, tuple):
            _check_pair(str(child[0].value), child[1], path, walk)
        for part in child if isinstance(child, tuple) else (child,):
            _check(part, path, walk, done)


def _name(path: Path, walk: _Walk) -> str:
    return path.relative_to(walk.folder).as_posix() if path.is_relative_to(walk.folder) else str(path)


def _check_pair(key: str, value: Any, path: Path, walk: _Walk) -> None:
    """Add the problems of a key with its value."""
    where = f"{visible(_name(path, walk))}:{value.start_mark.line + 1}: {visible(key)[:60]}"
    if key in CODE_KEYS:
        walk.problems.append(f"{where}: {CODE_KEYS[key]}")
    elif key == "hf_evaluate":
        walk.problems.append(f"{where}: a metric that runs code from the hub")
    elif key in COUNTS and value.tag in NUMBER_TAGS and len(value.value) <= LONGEST_NUMBER:
        if not _is_count(value):
            walk.problems.append(f"{where}: {visible(value.value)} is not a number from 0 to {MOST_REPEATS:,}")
    elif key == "metric" and isinstance(value.value, str):
        walk.metrics.add(value.value)
    elif key == "include":
        for text in _texts(value):
            target = (path.parent / text).resolve()
            if not target.is_relative_to(walk.folder):
                walk.problems.append(f"{where}: {visible(text)[:100]} is outside the tasks' folder")
            else:
                _read(target, walk)
    elif key == "dataset_path":
        text = str(value.value)
        if text not in READERS and (not HUB_ID.fullmatch(text) or Path(text).exists()):
            walk.problems.append(f"{where}: {visible(text)[:100]} is neither one of {', '.join(sorted(READERS))} nor a "
                                 "data set of the hub")  # fmt: skip
    elif key in ("dataset_kwargs", "dataset_name"):
        options = [str(pair[0].value) for pair in value.value if isinstance(pair, tuple)]
        odd = [option for option in options if key == "dataset_kwargs" and option not in DATASET_OPTIONS]
        walk.problems += [f"{where}: the option {visible(option)[:60]} of datasets" for option in odd]
        addresses = [text for text in _texts(value) if ADDRESS.search(text)]
        walk.problems += [f"{where}: {visible(text)[:100]} is a URL" for text in addresses]


def _is_count(node: Any) -> bool:
    """Return whether a node that is a number is one of the counts that a task may have."""
    from yaml.constructor import SafeConstructor

    try:
        count = SafeConstructor().construct_yaml_int(node)
    except (ValueError, IndexError):
        return False
    return bool(0 <= count <= MOST_REPEATS)


def _texts(node: Any) -> Iterator[str]:
    """Yield the texts of a node and of what is below it."""
    if isinstance(node.value, str):
        yield node.value
    else:
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                yield from _texts(part)
