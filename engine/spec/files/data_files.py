"""Finds the files of a data source by its path, and checks their suffixes, without reading them.

Needs no library for data, so that a start can be refused before a run directory exists.

Try: `tunedeck train -p demo -r lora`, which names a file that is not there.
"""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from engine.errors import DataError
from engine.spec.files.text import closest_match
from engine.spec.files.working_directory import working_directory
from engine.spec.schema.data import Source
from engine.spec.schema.recipe import Recipe

LOADERS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".arrow": "arrow", ".txt": "text", ".md": "text",
}
"""The loader of `datasets` for each file suffix. Text files hold one sample per line."""

COMPRESSION_SUFFIXES = (".gz", ".xz", ".bz2", ".zst")
"""Suffixes that may follow the file suffix."""

MOST_LOOKED_AT = 1000
"""Entries of the working directory that are searched for a file to suggest."""


def require_data_files(recipe: Recipe) -> None:
    """Raise DataError when local files of an enabled source of training or validation are missing. Reads none of
    them."""
    for key, sources in (("data.sources", recipe.data.sources), ("data.validation", recipe.data.validation)):
        for source in sources:
            if source.enabled and source.path is not None and not source.path.startswith("builtin:"):
                find_data_files(source, key)


def find_data_files(source: Source, key: str = "data.sources") -> list[Path]:
    """The files that a source's path names, sorted. `key` is the list that the source belongs to, for messages.

    Raises DataError for no files, or files of different formats.
    """
    path = Path(source.path or "").expanduser()
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")]
        if not found:
            raise DataError(f"source {source.name}: the folder {path} holds no files", fix=_other_path(source, key))
        return sorted(found)
    pattern = str(path)
    names = [pattern] if path.exists() or not glob.has_magic(pattern) else glob.glob(pattern, recursive=True)
    files = sorted(Path(name) for name in names if Path(name).is_file())
    if not files:
        raise DataError(f"source {source.name}: {_why_no_file(path)}", fix=_other_path(source, key))
    _check_suffixes(source, files)
    return files


def _other_path(source: Source, key: str) -> str:
    """The fix for a missing file of `source`, as a sentence: a `--set` option for the source's path. It names the data
    file of the working directory whose name is similar, else the only data file there, else FILE.jsonl. `key`: the
    dotted key of the list of sources, such as "data.sources"."""
    wanted = os.path.basename(source.path or "")
    with os.scandir(working_directory()) as entries:
        here = [entry.name for entry in islice(entries, MOST_LOOKED_AT) if suffix_of(Path(entry.name)) in LOADERS]
    data = [name for name in here if suffix_of(Path(name)) not in (".txt", ".md")]
    other = closest_match(wanted, here) or (data[0] if len(data) == 1 else "FILE.jsonl")
    option = shlex.quote(f"{key}.{source.name}.path={other}")
    yours = ", with your file for FILE.jsonl" if other == "FILE.jsonl" else ""
    return f"add --set {option}{yours}; such a path starts from the working directory"


def _why_no_file(path: Path) -> str:
    if glob.has_magic(str(path)):
        return f"no file matches {path}"
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {os.readlink(path)}, which does not exist"
    return f"{path} is neither a file nor a folder" if path.exists() else f"{path} does not exist"


def _check_suffixes(source: Source, files: Sequence[Path]) -> None:
    kinds = {suffix_of(file) for file in files}
    for file in files:
        if suffix_of(file) not in LOADERS:
            raise DataError(
                f"source {source.name}: {file} has a suffix of no known format",
                expected=f"one of {', '.join(LOADERS)}, each also followed by {', '.join(COMPRESSION_SUFFIXES)}",
                fix="rename the file",
            )
    if len({(LOADERS[kind], kind == ".tsv") for kind in kinds}) > 1:
        raise DataError(
            f"source {source.name}: {source.path} matches files of several formats ({', '.join(sorted(kinds))})",
            fix="make one source of each format",
        )


def suffix_of(file: Path) -> str:
    """The suffix of a file in lower case, without one for compression: ".jsonl" for "a.JSONL.gz"."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    while suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""
