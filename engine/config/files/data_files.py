"""Finds the files of a data source by its path, and checks their suffixes, without reading them or importing a library
for data, so that a start can be refused before a run directory exists; and reads files of prompts."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from engine.config.files.find import BUILTIN_PREFIX
from engine.config.files.machine import path_of, working_directory
from engine.config.files.text import closest_match
from engine.config.schema.data import Eval, Source
from engine.errors import DataError

LOADERS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
"""The loader of `datasets` for each suffix."""

_WITH_PANDAS = (
    "write its rows as JSON lines: python -c \"import pandas; pandas.{read}('FILE').to_json('rows.jsonl', "
    "orient='records', lines=True)\""
)
OTHER_FORMATS = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as a CSV file in UTF-8"),
    **dict.fromkeys((".pkl", ".pickle"), _WITH_PANDAS.format(read="read_pickle")),
    **dict.fromkeys((".zip", ".tar", ".7z", ".rar"), "unpack it, and use the unpacked file or folder"),
    ".feather": _WITH_PANDAS.format(read="read_feather"),
    ".orc": _WITH_PANDAS.format(read="read_orc"),
    **dict.fromkeys((".yaml", ".yml", ".xml", ".html", ".pdf", ".docx", ".db", ".sqlite"),
                    "write its rows as JSON lines, one object per line"),
}  # fmt: skip
"""What to do with a file of another format, by suffix."""

COMPRESSION_SUFFIXES = (".gz", ".xz", ".bz2", ".zst")

JSON_SPACE = re.compile(r"[ \t\r\n]*+")
"""What may be between the values of JSON."""

MOST_LOOKED_AT = 1000
"""Entries of the working directory that are searched for a file to suggest."""


def missing_data_files(key: str, sources: Sequence[Source], *, trees: bool) -> Iterator[tuple[str, DataError]]:
    """Yield the key and the error of each enabled source whose local files are missing, or of formats that are not
    read. `trees`: of those whose pattern has "**", for which whole folder trees are searched; else of all others."""
    for source in sources:
        path = source.path or BUILTIN_PREFIX
        if not source.enabled or path.startswith(BUILTIN_PREFIX) or ("**" in path) != trees:
            continue
        try:
            if not _has_a_file(path):
                find_data_files(source, key)
        except DataError as error:
            yield f"{key}.{source.name}.path", error


def _has_a_file(path: str) -> bool:
    """Whether a path is a folder with a file that is not hidden: the first that is found ends the search."""
    return os.path.isdir(path) and any(
        not name.startswith(".") for _, _, names in os.walk(path, followlinks=True) for name in names
    )


def find_data_files(source: Source, key: str = "data.sources") -> list[Path]:
    """The files that a source's path names, sorted. Raises DataError for no files, or files of different formats."""
    path = path_of(source.path or "")
    if os.path.isdir(path):  # not Path.is_dir, which raises PermissionError inside a folder that may not be read
        found = find_data_files_in(path)
        if not found:
            raise DataError(f"source {source.name}: the folder {path} has no files", fix=_other_path(source, key))
        return found
    pattern = str(path)
    names = [pattern] if os.path.exists(path) or not glob.has_magic(pattern) else glob.glob(pattern, recursive=True)
    files = sorted(Path(name) for name in names if os.path.isfile(name))
    if not files:
        raise DataError(f"source {source.name}: {_why_no_file(path)}", fix=_other_path(source, key))
    _check_suffixes(source, files)
    return files


def find_data_files_in(folder: Path) -> list[Path]:
    """All files of a folder but hidden ones, sorted."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))


def _other_path(source: Source, key: str) -> str:
    """A `--set` option with the most similar data file of the working directory, else the only one, else FILE.jsonl."""
    wanted = os.path.basename(source.path or "")
    with os.scandir(working_directory()) as entries:
        here = [entry.name for entry in islice(entries, MOST_LOOKED_AT) if suffix_of(Path(entry.name)) in LOADERS]
    data = [name for name in here if suffix_of(Path(name)) not in (".txt", ".md")]
    other = closest_match(wanted, here) or (data[0] if len(data) == 1 else "FILE.jsonl")
    option = shlex.quote(f"{key}.{source.name}.path={other}")
    yours = ", with your file for FILE.jsonl" if other == "FILE.jsonl" else ""
    return f"add --set {option}{yours}; this path is relative to the working directory"


def _why_no_file(path: Path) -> str:
    if glob.has_magic(str(path)):
        return f"no file matches {path}"
    if os.path.islink(path) and not os.path.exists(path):
        return f"{path} is a link to {os.readlink(path)}, which does not exist"
    return f"{path} is neither a file nor a folder" if os.path.exists(path) else f"{path} does not exist"


def _check_suffixes(source: Source, files: Sequence[Path]) -> None:
    kinds = {suffix_of(file) for file in files}
    for file in files:
        if suffix_of(file) not in LOADERS:
            raise DataError(
                f"source {source.name}: {file} has an unknown suffix",
                expected=f"one of {', '.join(LOADERS)}, optionally followed by {', '.join(COMPRESSION_SUFFIXES)}",
                fix=OTHER_FORMATS.get(suffix_of(file), "rename the file, if it is one of these"),
            )
    if len({(LOADERS[kind], kind == ".tsv") for kind in kinds}) > 1:
        raise DataError(
            f"source {source.name}: {source.path} matches files of several formats ({', '.join(sorted(kinds))})",
            fix="add one source for each format",
        )


def suffix_of(file: Path) -> str:
    """The suffix in lower case, without one for compression: ".jsonl" for "a.JSONL.gz"."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    while suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_prompts(path: Path, key: str) -> list[str]:
    """Return the prompts of a text file, one for each line that is not blank, or of a JSON file, which has texts or
    objects with the key "prompt". `key` says who asks for the file. Raises DataError if it cannot be read or has no
    prompts."""
    suffix, expected = path.suffix.lower(), ('a text file with one prompt per line, or JSON with {"prompt": "…"} rows')
    if suffix in COMPRESSION_SUFFIXES or LOADERS.get(suffix) in ("csv", "parquet", "arrow"):
        raise DataError(f"{key} {path}: prompts cannot be read from {suffix} files", expected=expected)
    try:
        text = path.read_text(encoding="utf-8-sig")
        if LOADERS.get(suffix) == "json":
            prompts = [row["prompt"] if isinstance(row, dict) else row for row in _json_values(text)]
        else:
            prompts = [line for line in text.split("\n") if line.strip()]  # splitlines would also split at U+2028
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise DataError(
            f"{key} {path}: {type(error).__name__}: {error}", expected=expected, fix="correct the file or its name"
        ) from error
    if not prompts or not all(isinstance(prompt, str) and prompt.strip() for prompt in prompts):
        problem = "the file has no prompts" if not prompts else "a prompt is not text"
        raise DataError(
            f"{key} {path}: {problem}", expected="at least one prompt, each as text", fix="correct the file"
        )
    return prompts


def _json_values(text: str) -> list[Any]:
    """Return the elements of a JSON list, or the values that follow one another, as in JSON Lines."""
    decoder, values, place = json.JSONDecoder(), [], 0
    while (place := _next_value(text, place)) < len(text):
        value, place = decoder.raw_decode(text, place)
        values.append(value)
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def _next_value(text: str, place: int) -> int:
    space = JSON_SPACE.match(text, place)
    return space.end() if space else place


def fixed_prompts(asked: Eval) -> list[str]:
    """The prompts of `eval.prompts`. Raises DataError as `read_prompts` does."""
    given = asked.prompts
    return read_prompts(Path(given), "eval.prompts") if isinstance(given, str) else list(given)
