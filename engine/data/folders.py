"""Which files of a folder are its data, and which only lie beside them: a README, the settings of another program."""

from __future__ import annotations

import mimetypes
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.config.files.data_files import COMPRESSION_SUFFIXES, LOADERS, suffix_of
from engine.config.files.machine import path_of
from engine.config.schema.data import Source
from engine.data.json_rows import is_single_object, keys_of
from engine.data.records import split_name
from engine.errors import DataError

ABOUT = ("readme", "license", "licence", "notice", "changelog", "citation", "contributing")
"""Stems of text files that are about the data beside them; read as data where no other text is there."""

SETTINGS_BYTES = 1 << 16
"""A larger file without keys is no settings of another program."""

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Tables that name images beside them in a column `file_name` (the layout `imagefolder` of `datasets`)."""


class FolderFiles(NamedTuple):
    """The files of a folder that hold its data, and those beside them."""

    data: list[Path]
    beside: list[Path]


def data_of_folder(source: Source, files: Sequence[Path]) -> FolderFiles:
    """Raises DataError where tables of several formats lie in it, of which one alone would be read."""
    texts = [file for file in files if LOADERS.get(suffix_of(file)) == "text"]
    tables = [file for file in files if LOADERS.get(suffix_of(file)) not in (None, "text")]
    if not tables:
        about = [file for file in texts if file.stem.lower().split(".")[0] in ABOUT]
        data = [file for file in texts if file not in about] or texts
        return FolderFiles(data, [file for file in files if file not in data])
    strays = _stray_objects(tables)
    data = [file for file in tables if file not in strays]
    kinds = sorted({suffix_of(file) for file in data}, key=lambda suffix: LOADERS[suffix])
    if len({LOADERS[kind] for kind in kinds}) > 1:
        raise DataError(
            f"source {source.name}: the folder {source.path} has tables of several formats ({', '.join(kinds)})",
            fix=f'add one source for each, such as path = "{source.path}/**/*{kinds[0]}"',
        )
    return FolderFiles(data, [file for file in files if file not in data])


def require_whole(source: Source, files: Sequence[Path]) -> None:
    """Raise DataError if a folder lacks some of the numbered files that its others name, or a download into it was not
    finished."""
    folder = path_of(source.path or "")
    unfinished = sorted((folder / ".cache" / "huggingface").rglob("*.incomplete"))
    there = {file.relative_to(folder).as_posix() for file in files}
    wanted = {name for each in there for name in _numbered_beside(each)}
    if missing := sorted(wanted - there):
        raise DataError(
            f"source {source.name}: the folder {source.path} has only some of its files; {len(missing)} are missing, "
            f"such as {missing[0]}",
            fix=fetch_again(source),
        )
    if unfinished:
        raise DataError(
            f"source {source.name}: the download into the folder {source.path} is incomplete "
            f"({len(unfinished)} files in .cache/huggingface end with .incomplete)",
            fix=fetch_again(source),
        )


def fetch_again(source: Source) -> str:
    """Return what completes a folder that was downloaded from the hub."""
    return (
        "fetch the rest: hf download --repo-type dataset OWNER/NAME --local-dir "
        f"{shlex.quote(source.path or '')}; or select files in path with a pattern"
    )


SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\D.*)?", re.DOTALL)
"""A name such as train-00000-of-00003.parquet."""

MOST_SHARDS = 20_000


def _numbered_beside(name: str) -> list[str]:
    """Return the names of all files of which a numbered one is there."""
    shard = SHARD.fullmatch(name)
    if shard is None or int(shard[3]) > MOST_SHARDS:
        return []
    return [f"{shard[1]}{number:05}-of-{shard[3]}{shard[4] or ''}" for number in range(int(shard[3]))]


def image_tables(files: Sequence[Path]) -> list[Path]:
    """The tables of METADATA among `files`; none where there are no images."""
    return [file for file in files if file.name in METADATA] if any(map(is_image, files)) else []


def is_image(file: Path) -> bool:
    """By its suffix."""
    return (mimetypes.guess_type(file.name)[0] or "").startswith("image/")


def table_of_images(source: Source, files: Sequence[Path]) -> Path | None:
    """Return the CSV or JSON file of a folder of images that names those of the source's split; None if a table of
    another kind names them, or one with several columns of images, or none. Raises DataError for several: the paths of
    each start from its own folder."""
    found = [file for file in image_tables(files) if file.suffix != ".parquet"]
    if not found or source.config is not None or any(_names_several_images(file) for file in found):
        return None
    split = split_name(source)
    of_split = [file for file in found if SPLIT_FOLDERS.get(file.parent.name.lower(), "train") == split]
    if len(of_split) > 1:
        raise DataError(
            f"source {source.name}: the folder {source.path} has {len(of_split)} files named {of_split[0].name}",
            fix=f'add one source for each, such as path = "{of_split[0]}"',
        )
    return of_split[0] if of_split else None


SPLIT_FOLDERS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Names of folders whose files are of one split, and that split."""


def _names_several_images(table: Path) -> bool:
    return table.suffix == ".jsonl" and any(key.endswith(("_file_name", "_file_names")) for key in keys_of(table))


def _stray_objects(tables: Sequence[Path]) -> list[Path]:
    """JSON files of a single object that has no key of the other tables' rows, or of nothing."""
    objects = [file for file in tables if suffix_of(file) == ".json" and _is_plain(file) and _is_one_object(file)]
    rows = [file for file in tables if file not in objects]
    if not rows:
        return []
    first = rows[0]
    known = keys_of(first) if LOADERS[suffix_of(first)] == "json" and _is_plain(first) else set()
    return [file for file in objects if not known & keys_of(file)]


def _is_one_object(file: Path) -> bool:
    return is_single_object(file) or (file.stat().st_size < SETTINGS_BYTES and not keys_of(file))


def _is_plain(file: Path) -> bool:
    return file.suffix.lower() not in COMPRESSION_SUFFIXES
