"""Opens local files and hub data sets. JSON, CSV and text are read row by row; Parquet, Arrow, folders of images and
what `save_to_disk` wrote are read by the library datasets, which also says which files of a folder or of a hub data set
belong to a split."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from lzma import LZMAError
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow
import pyarrow.parquet
from datasets.arrow_reader import ReadInstruction
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from engine.config.files.caches import cache_folder
from engine.config.files.data_files import (
    COMPRESSION_SUFFIXES,
    LOADERS,
    find_data_files,
    find_data_files_in,
    suffix_of,
)
from engine.config.schema.data import Source
from engine.data.arrow_values import Shape, class_shapes, date_columns, shapes_of
from engine.data.bounds import screen
from engine.data.csv_files import separator_of
from engine.data.documents import SEPARATORS, Documents, unpacked
from engine.data.file_rows import Kind as RowKind
from engine.data.file_rows import open_file_rows
from engine.data.folders import (
    SPLIT_FOLDERS,
    data_of_folder,
    fetch_again,
    image_tables,
    is_image,
    require_whole,
    table_of_images,
)
from engine.data.hub_connection import offline_if_unreachable
from engine.data.hub_files import HubFiles, download, find_hub_files, noted_hub_files, settings_not_read
from engine.data.records import (
    UNPACKING_ERRORS,
    Origin,
    Screened,
    SourceRows,
    conversion,
    describe_source,
    find_not_utf8,
    no_rows,
    split_name,
)
from engine.data.store import hash_file, hash_files, hash_text, make_cache_folder
from engine.errors import DataError, EnvironmentProblem

READ_ERRORS = (DatasetsError, OSError, ValueError, StopIteration, EOFError, RecursionError, zlib.error, LZMAError,
               pyarrow.ArrowException)  # fmt: skip
"""What `datasets` raises for damaged or misnamed files."""

POINTER, POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
"""How a file begins that Git LFS left in place of another, and the most bytes of one."""

datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = (
    False  # it would ask a server to count each file that is read, also local ones
)


def open_data_set(source: Source, *, skip_broken: bool, version: int) -> SourceRows:
    """Does not apply the source's `limit`. `skip_broken` is `data.broken = "skip"`, `version` `RunSpec.data_version`.

    Raises DataError: missing, unreadable or empty; EnvironmentProblem: unreachable hub.
    """
    with _silent():
        make_cache_folder(cache_folder() / "datasets")
        make_cache_folder(cache_folder() / "screened")
        if source.path is None:
            return _open_hub(source, skip_broken)
        return _open_local(source, Path(source.path).expanduser(), skip_broken, version)


def _open_local(source: Source, path: Path, skip_broken: bool, version: int) -> SourceRows:
    files = find_data_files(source)
    reads = {file: file for file in files}
    try:
        if pointers := [file for file in files if _is_pointer(file)]:
            raise DataError(
                f"source {source.name}: {pointers[0]} is a Git LFS pointer, not the file itself",
                fix="fetch the files in their repository: git lfs pull",
            )
        if not path.is_dir() and split_name(source) != "train":
            raise _no_such_split(source, ["train"])
        stamps = [file.stat().st_mtime_ns for file in files]
        digests = dict(zip(files, map(hash_file, files), strict=True))
        contents = hash_files(files, list(digests.values()), path if path.is_dir() else None)
        if all(file.stat().st_size == 0 for file in files):
            raise DataError(f"source {source.name}: {path} is empty", fix="add at least one sample")
        rows = _rows_of_files(source, path, files, digests, contents, reads, skip_broken, version)
        if changed := [file for file, stamp in zip(files, stamps, strict=True) if file.stat().st_mtime_ns != stamp]:
            shutil.rmtree(_tables_folder(contents), ignore_errors=True)
            raise DataError(f"{changed[0]} was changed while it was read", fix="start again when it is complete")
        return rows
    except PermissionError as error:
        raise DataError(
            f"source {source.name}: {error.filename or path} cannot be read (permission denied)",
            fix=f"make it readable: chmod u+r {error.filename or path}",
        ) from error
    except READ_ERRORS as error:
        raise _unreadable(source, path, reads, error) from error


def _rows_of_files(
    source: Source, path: Path, files: list[Path], digests: Mapping[Path, str], contents: str, reads: dict[Path, Path],
    skip_broken: bool, version: int,
) -> SourceRows:  # fmt: skip
    """Read the files that are the source's split. `reads` gets what is read in place of each file."""
    if path.is_dir():
        require_whole(source, files)
    config = [source.config] if source.config else []
    fingerprint = hash_text(contents, source.split, *config)
    if _is_saved(path):
        shards = _saved_split(source, datasets.load_from_disk(str(path)), split_name(source))
        rows = _rows(source, shards, fingerprint, partial(_unreadable, source, path, reads))
        return _with_origin(source, rows, _saved_files(path, split_name(source)), "arrow", [])
    found, notices = _data_files(source, path, files, version)
    kinds = {LOADERS.get(suffix_of(file)) for file in found}
    if path.is_dir():
        chosen = _files_of_split(source, path, found, kinds)
    else:
        table = TABLES.get(next(iter(kinds)) or "")
        chosen = SplitFiles(found, loads=table is not None, table=table)
    if source.unit not in (None, "line") and kinds != {"text"}:
        raise _unit_of_table(source)
    if not chosen.loads:
        rows = _rows_of_texts(source, chosen, digests, fingerprint, reads, skip_broken)
        return replace(rows, notices=[*notices, *rows.notices])
    screened = _screened(source, chosen, digests, reads)
    explain = partial(_unreadable, source, path, reads)
    rows = _rows(source, _load_tables(source, path, chosen.files, contents), fingerprint, explain)
    if chosen.table is not None:
        rows = _with_origin(source, rows, chosen.files, chosen.table, [_tables_folder(contents)])
    notices += [*chosen.notices, *rows.notices]
    return replace(rows, left_out=[each for each in screened if each.dropped], notices=notices)


def _screened(
    source: Source, chosen: SplitFiles, digests: Mapping[Path, str], reads: dict[Path, Path]
) -> list[Screened]:
    """Leave out what is beyond the bounds. `reads` gets what is read in place of each file."""
    screened = screen(chosen.files, [digests[file] for file in chosen.files])
    reads |= {each.file: each.reads for each in screened}
    if any(each.dropped for each in screened) and not any(each.kept for each in screened):
        raise _nothing_left(source, screened)
    return screened


def _rows_of_texts(
    source: Source, chosen: SplitFiles, digests: Mapping[Path, str], fingerprint: str, reads: dict[Path, Path],
    skip_broken: bool,
) -> SourceRows:  # fmt: skip
    """Read JSON, CSV or text files row by row."""
    if {LOADERS.get(suffix_of(file)) for file in chosen.files} == {"csv"}:
        fingerprint = hash_text(fingerprint, "cells are text")
    screened = _screened(source, chosen, digests, reads)
    kept = [digests[file] for file in chosen.files]
    rows = _rows_one_by_one(source, screened, kept, fingerprint, chosen, skip_broken)
    notices = [*chosen.notices, *rows.notices]
    return replace(rows, left_out=[each for each in screened if each.dropped], notices=notices)


def _is_pointer(file: Path) -> bool:
    if file.stat().st_size > POINTER_BYTES:
        return False
    with file.open("rb") as stream:
        return stream.read(len(POINTER)) == POINTER


def _data_files(source: Source, path: Path, files: list[Path], version: int) -> tuple[list[Path], list[str]]:
    """The files that hold the data, and what is said of the others."""
    if not path.is_dir() or _is_saved(path) or version < 3:
        return files, []
    found = data_of_folder(source, files)
    named = image_tables(files)
    beside = [file for file in found.beside if not (named and is_image(file))]
    if not found.data or not beside:
        return found.data if named else files, []
    listed = _listed([str(file.relative_to(path)) for file in beside])
    return found.data, [f"source {source.name}: not read, because these files have no rows of the data: {listed}"]


def _with_origin(
    source: Source, rows: SourceRows, files: Sequence[Path], kind: Literal["parquet", "arrow"], kept: Sequence[Path]
) -> SourceRows:
    """Note the files of a table, and how many rows they have; the table may be a slice of them."""
    count = sum(map(_rows_in_parquet if kind == "parquet" else _rows_in_arrow, files))
    first, _ = absolute_slice(source, count)
    return replace(rows, origin=Origin(files, kind, first=first, kept=kept), in_files=count)


def _rows_in_parquet(file: Path) -> int:
    return int(pyarrow.parquet.read_metadata(file).num_rows)


def _rows_in_arrow(file: Path) -> int:
    return len(datasets.Dataset.from_file(str(file)))


TABLES: dict[str, Literal["parquet", "arrow"]] = {"parquet": "parquet", "arrow": "arrow"}
"""Loaders of `datasets` that read tables."""


@dataclass(frozen=True)
class SplitFiles:
    """The files of a source's split, and what a README says of them."""

    files: list[Path]
    loads: bool = False
    """Whether `datasets` reads them as a whole: Parquet and Arrow, and folders of images."""
    table: Literal["parquet", "arrow"] | None = None
    """What they are if their rows are those of tables alone."""
    separator: str | None = None
    """Of CSV files, if the README names one."""
    classes: Mapping[str, Shape] = field(default_factory=dict)
    """Columns whose numbers are those of classes."""
    notices: list[str] = field(default_factory=list)


def _files_of_split(source: Source, folder: Path, found: list[Path], kinds: set[str | None]) -> SplitFiles:
    """Return the files of a folder that its README, or its own and its files' names, give to the source's split. Raises
    DataError for a split or a configuration that it does not have."""
    base = split_name(source)
    if metadata := table_of_images(source, find_data_files_in(folder)):
        return SplitFiles([metadata])
    if kinds == {"text"} and base == "train" and not _has_split_folders(folder) and not _is_data_set_card(folder):
        return SplitFiles(found)
    read_from = _folder_to_read(folder, found)
    builder = _builder(source, folder, read_from)
    splits = {str(name): [Path(file) for file in files] for name, files in (builder.config.data_files or {}).items()}
    if base not in splits:
        raise _no_such_split(source, list(splits))
    originals = {read_from / file.relative_to(folder): file for file in find_data_files_in(folder)}
    of_split = {name: [originals[file] for file in files if file in originals] for name, files in splits.items()}
    if builder.name not in ("json", "csv", "text"):
        table = TABLES.get(builder.name)
        return SplitFiles([file for file in of_split[base] if file in set(found)], loads=True, table=table)
    if settings := settings_not_read(builder.config):
        raise _settings_of_readme(source, builder, settings)
    separator = getattr(builder.config, "sep", ",")
    features = builder.config.features or builder.info.features
    chosen = [file for file in of_split[base] if file in set(found)]
    return SplitFiles(
        chosen,
        separator=separator if separator != "," else None,
        classes=class_shapes(features),
        notices=_files_of_no_split(source, folder, found, of_split, builder.config.name),
    )


def _has_split_folders(folder: Path) -> bool:
    return any(each.is_dir() and each.name.lower() in SPLIT_FOLDERS for each in folder.iterdir())


def _is_data_set_card(folder: Path) -> bool:
    """Return whether the README of a folder says which files its data are."""
    card = folder / "README.md"
    if not card.is_file():
        return False
    header = card.read_text(encoding="utf-8", errors="replace")[:MOST_HEADER]
    return header.startswith("---") and "data_files:" in header.partition("\n---")[0]


MOST_HEADER = 1 << 20
"""Characters of a README in which its settings are looked for."""


def _files_of_no_split(
    source: Source, folder: Path, found: list[Path], splits: Mapping[str, list[Path]], config: str
) -> list[str]:
    """Return what is said of data files that no split has; those of other configurations may be among them."""
    used = {file for files in splits.values() for file in files}
    names = [str(file.relative_to(folder)) for file in found if file not in used]
    if not names:
        return []
    where = f"configuration {config}" if source.config else "folder"
    return [f"source {source.name}: not read, because no split of the {where} contains them: {_listed(names)}"]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _builder(source: Source, folder: Path, read_from: Path) -> Any:
    """Return the builder of `datasets` for a folder, which knows its splits and reads nothing yet. Raises DataError if
    the folder has several configurations and the source names none, or another."""
    try:
        configs = datasets.get_dataset_config_names(str(read_from))
    except TypeError as error:
        raise DataError(
            f"source {source.name}: {folder / 'README.md'} has a configuration whose name is not text",
            fix="write its config_name in quotes; YAML reads no and on as false and true",
        ) from error
    if source.config is None and len(configs) > 1 and "default" not in configs:
        raise DataError(
            f"source {source.name}: the folder {folder} has {len(configs)} configurations ({_listed(configs)})",
            fix=f"add --set {shlex.quote(f'data.sources.{source.name}.config={configs[0]}')}",
        )
    if source.config is not None and source.config not in configs:
        raise DataError(
            f"source {source.name}: the folder {folder} has no configuration {source.config}",
            expected=f"one of {', '.join(configs)}",
            fix=f"add --set {shlex.quote(f'data.sources.{source.name}.config={configs[0]}')}",
        )
    return datasets.load_dataset_builder(str(read_from), source.config, cache_dir=str(cache_folder() / "datasets"))


def _no_such_split(source: Source, splits: Sequence[str]) -> DataError:
    if splits == ["train"] and source.path is not None and not Path(source.path).expanduser().is_dir():
        return DataError(
            f"source {source.name}: {source.path} has no splits, but split = {source.split!r}",
            expected="the whole file (train), or a slice of it such as train[:1000] and train[90%:]",
            fix=f"add --set data.sources.{source.name}.split=train; or set path to the file of that split",
        )
    return DataError(
        f"source {source.name}: {source.path or source.hub} has no split {split_name(source)}",
        expected=f"one of {', '.join(splits)}",
        fix=f"add --set {shlex.quote(f'data.sources.{source.name}.split={splits[0]}')}"
        if splits
        else "check the folder",
    )


def _settings_of_readme(source: Source, builder: Any, settings: Sequence[str]) -> DataError:
    if settings == ["field"]:
        name = builder.config.field
        return DataError(
            f"source {source.name}: according to the README of {source.path}, the rows are in the field {name} of its "
            "files",
            fix=f"write them as lines: jq -c '.{name}[]' FILE.json > rows.jsonl",
        )
    return DataError(
        f"source {source.name}: the README of {source.path} sets {', '.join(settings)} for its {builder.name.upper()} "
        "files, which is not read",
        expected="CSV in UTF-8 with column names in the first line and double quotes, or JSON Lines",
        fix="convert the files, and remove these settings from the README",
    )


def _rows_one_by_one(
    source: Source, screened: Sequence[Screened], digests: Sequence[str], fingerprint: str, chosen: SplitFiles,
    skip_broken: bool,
) -> SourceRows:  # fmt: skip
    """Read documents of text files, or rows of JSON and CSV files and lines of text."""
    (kind,) = {LOADERS[suffix_of(each.file)] for each in screened}
    files = [unpacked(each.reads, digest) for each, digest in zip(screened, digests, strict=True)]
    if kind == "text" and source.unit != "line":
        unit = source.unit or "file"
        found = Documents(files, unit)
        if found.unseparated and unit not in SEPARATORS:
            raise DataError(
                f"source {source.name}: unit = {unit!r} is nowhere in its files",
                expected="the text that ends each document there",
                fix=f"add --set data.sources.{source.name}.unit=",
            )
        documents = _part_of(source, found)
        return SourceRows(["text"], len(documents), hash_text(fingerprint, unit), documents)
    kinds: dict[str, RowKind] = {"json": "json", "csv": "csv", "text": "line"}
    separators = [chosen.separator or separator_of(each.file) for each in screened] if kind == "csv" else []
    try:
        table = open_file_rows(screened, files, digests, kinds[kind], skip=skip_broken, separators=separators)
    except DataError as error:
        raise DataError(f"source {source.name}: {error.found}", expected=error.expected, fix=error.fix) from None
    if not len(table) and any(each.dropped for each in screened):
        raise _nothing_left(source, screened)
    part = _part_of(source, table)
    kept = [kept for file in table.parts for kept in (file.spans, file.spans.with_suffix(".json"))]
    origin = Origin([each.file for each in screened], kinds[kind], separators, part.first, kept)
    return SourceRows(
        table.columns, len(part), fingerprint, part, shapes=chosen.classes, origin=origin, in_files=len(table)
    )


def _part_of(source: Source, table: Any) -> Any:
    if source.split == split_name(source):
        return table
    return table.section(*absolute_slice(source, len(table)))


def _unit_of_table(source: Source) -> DataError:
    return DataError(
        f"source {source.name}: unit = {source.unit!r}, but the files are tables",
        expected="text files (.txt, .md): each row of a table is one document",
        fix=f"add --set data.sources.{source.name}.unit=",
    )


def _is_saved(path: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote this folder."""
    return path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _tables_folder(contents: str) -> Path:
    """Return where `datasets` keeps the tables that it has read. It knows files by their paths and times of change, so
    each content has its own folder."""
    return cache_folder() / "datasets" / contents


def _load_tables(source: Source, path: Path, files: Sequence[Path], contents: str) -> Any:
    folder = _tables_folder(contents)
    make_cache_folder(folder)
    options: dict[str, Any] = {"split": source.split, "cache_dir": str(folder)}
    if path.is_dir():
        return datasets.load_dataset(str(_folder_to_read(path, files)), source.config, **options)
    return datasets.load_dataset(
        LOADERS[suffix_of(files[0])], data_files={split_name(source): [str(file) for file in files]}, **options
    )


def _folder_to_read(folder: Path, found: Sequence[Path]) -> Path:
    """Return `folder`, or a folder of links to its files without tables and texts that are none of its data. The same
    files give the same folder."""
    strays = {file for file in find_data_files_in(folder) if suffix_of(file) in LOADERS} - set(found)
    strays -= {folder / "README.md"}  # says which files belong to which split
    if not strays or any(map(is_image, find_data_files_in(folder))):
        return folder
    linked = [file for file in find_data_files_in(folder) if file not in strays]
    copy = cache_folder() / "screened" / hash_text(*map(str, linked)) / folder.name
    if copy.exists():
        return copy
    with tempfile.TemporaryDirectory(dir=cache_folder() / "screened") as draft:
        for file in linked:
            link = Path(draft, file.relative_to(folder))
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.absolute())
        copy.parent.mkdir(exist_ok=True)
        os.rename(draft, copy)
        Path(draft).mkdir()
    return copy


def _nothing_left(source: Source, left_out: Sequence[Screened]) -> DataError:
    found = [f"{count:,} x {reason} ({each.places(reason)[0]})"
             for each in left_out for reason, count in each.dropped.items()]  # fmt: skip
    return DataError(
        f"source {source.name}: no rows are left; dropped: {', '.join(found)}",
        fix="correct the files; docs/data.md lists the limits",
    )


def _saved_split(source: Source, saved: Any, base: str) -> Any:
    """`saved` is what `save_to_disk` wrote: one data set or several splits."""
    if isinstance(saved, datasets.DatasetDict):
        if base not in saved:
            raise _no_such_split(source, sorted(saved))
        saved = saved[base]
    elif base not in ("train", str(saved.split)):
        raise _no_such_split(source, [str(saved.split or "train")])
    start, stop = absolute_slice(source, len(saved))
    return saved.select(range(start, stop))


def _saved_files(path: Path, base: str) -> list[Path]:
    folder = path / base if (path / "dataset_dict.json").is_file() else path
    state = json.loads((folder / "state.json").read_text())
    return [folder / each["filename"] for each in state["_data_files"]]


def _open_hub(source: Source, skip_broken: bool) -> SourceRows:
    name = source.hub or ""
    try:
        with offline_if_unreachable():
            data = _on_hub(source)
            if isinstance(data, HubFiles):
                return _rows_of_hub_files(source, data, skip_broken)
    except DatasetNotFoundError as error:
        raise DataError(
            f"source {source.name}: the hub has no data set {name}, or you have no access to it",
            fix="check the name; for a gated data set, accept its terms and run: hf auth login",
        ) from error
    except (ConnectionError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise EnvironmentProblem(
            f"source {source.name}: the hub cannot be reached for {name}: {_short(error)}",
            expected="a connection to the hub, or the data set in the cache",
            fix=f"connect to the network, or download it elsewhere (hf download --repo-type dataset {name} "
            f"--local-dir data) and add --set data.sources.{source.name}.path=data",
        ) from error
    except READ_ERRORS as error:
        raise DataError(
            f"source {source.name}: {describe_source(source)} cannot be read: {_short(error)}",
            fix="compare config and split with the data set's page",
        ) from error
    # The builder's fingerprint covers name, config, version, split and the hub commit the files came from.
    fingerprint = hash_text(name, source.config or "", source.split, data._fingerprint)
    rows = _rows(source, data, fingerprint, partial(_unreadable, source, Path(name), {}))
    require_texts(source, rows, data.info.builder_name)
    return rows


def _on_hub(source: Source) -> Any:
    """Return the files of a hub data set that are read row by row, else its table."""
    name, cache = source.hub or "", str(cache_folder() / "datasets")
    if constants.HF_HUB_OFFLINE:
        noted = noted_hub_files(source)
        return noted or datasets.load_dataset(name, source.config, split=source.split, cache_dir=cache)
    builder = datasets.load_dataset_builder(name, source.config, cache_dir=cache)
    if found := find_hub_files(source, builder):
        return found
    builder.download_and_prepare()
    return builder.as_dataset(split=source.split)


def _rows_of_hub_files(source: Source, found: HubFiles, skip_broken: bool) -> SourceRows:
    base = split_name(source)
    if base not in found.splits:
        raise _no_such_split(source, list(found.splits))
    files = download(source, found, base)
    digests = dict(zip(files, map(hash_file, files), strict=True))
    config = [source.config] if source.config else []
    fingerprint = hash_text(hash_files(files, list(digests.values())), source.split, *config)
    features = datasets.Features.from_dict(found.features) if found.features else None
    chosen = SplitFiles(files, separator=found.separator, classes=class_shapes(features))
    reads = {file: file for file in files}
    try:
        return _rows_of_texts(source, chosen, digests, fingerprint, reads, skip_broken)
    except READ_ERRORS as error:
        raise _unreadable(source, Path(source.hub or ""), reads, error) from error


def require_texts(source: Source, rows: SourceRows, builder: str | None) -> None:
    """Raise DataError if texts of JSON or CSV files of the hub, which `datasets` reads into one table, became dates."""
    if builder in ("json", "csv") and (dates := date_columns(rows.shapes)):
        raise DataError(
            f"source {source.name}: {source.hub} has {builder.upper()} files, and the datasets library "
            f"converts texts in them to dates: {_listed(dates)}",
            expected="texts as written in the files, which only local files provide",
            fix=f"download it (hf download --repo-type dataset {source.hub} --local-dir data) and add "
            f"--set data.sources.{source.name}.path=data",
        )


def _rows(source: Source, data: Any, fingerprint: str, explain: Callable[[BaseException], DataError]) -> SourceRows:
    if not isinstance(data, datasets.Dataset):
        raise ValueError(f"expected a split, not {type(data).__name__}")
    for name, feature in data.features.items():
        if (as_files := _undecoded(feature)) is not feature:
            data = data.cast_column(name, as_files)
    images = [name for name, feature in data.features.items() if _is_image(feature)]
    shapes = shapes_of(data.features, data.data)
    dates = date_columns(shapes)
    notices = [f"source {source.name}: dates, times and decimals are read as text: {', '.join(dates)}"] if dates else []
    return SourceRows(
        data.column_names, len(data), fingerprint, data, explain, image_columns=images, shapes=shapes, notices=notices
    )


def _is_image(feature: Any) -> bool:
    inner = feature.feature if isinstance(feature, datasets.List) else feature
    return isinstance(inner, datasets.Image)


def _undecoded(feature: Any) -> Any:
    """Images are read as bytes or paths of their files instead of pixels."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
        return datasets.List(datasets.Image(decode=False))
    return feature


def absolute_slice(source: Source, count: int) -> tuple[int, int]:
    """Start and end (exclusive) of the rows that a slice such as train[:1000] selects."""
    base = split_name(source)
    try:
        (part,) = ReadInstruction.from_spec(source.split).to_absolute({base: count})
    except ValueError as error:
        raise DataError(f"source {source.name}: split {source.split!r}: {_short(error)}") from error
    start, stop, _ = slice(part.from_, part.to).indices(count)
    return start, max(start, stop)


TEXT_LOADERS = ("json", "csv", "text")


def _unreadable(source: Source, path: Path, files: Mapping[Path, Path], error: BaseException) -> DataError:
    """The error to show; for JSON that does not parse it names file and line."""
    odd = find_not_utf8({file: reads for file, reads in files.items() if LOADERS.get(suffix_of(file)) in TEXT_LOADERS})
    if isinstance(error, UNPACKING_ERRORS) and any(file.suffix.lower() in COMPRESSION_SUFFIXES for file in files):
        return DataError(
            f"source {source.name}: {path} cannot be unpacked: {_short(error)}",
            fix="copy it again if it is truncated; if it is not compressed, remove the compression suffix from its "
            "name",
        )
    if odd is not None:
        return DataError(f"source {source.name}: {odd[0]}:{odd[1]}: not UTF-8 text", fix=conversion(odd[0]))
    cause = error.__cause__ if isinstance(error, DatasetsError) and error.__cause__ else error
    if "corresponds to no data" in str(error) or "BatchSize must be greater than 0" in str(cause):
        return no_rows(source)
    if isinstance(error, FileNotFoundError) and path.is_dir():
        return DataError(f"source {source.name}: {path}: {_short(error)}", fix=fetch_again(source))
    return DataError(
        f"source {source.name}: {path} cannot be read: {_short(cause)}",
        fix="check that the file is complete, that its suffix matches its format, and the split",
    )


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " …"


@contextmanager
def _silent() -> Iterator[None]:
    """No progress bars and log lines of `datasets` and of the hub's library inside the block."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels, bars = [logger.level for logger in loggers], datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not bars and not os.environ.get("HF_DATASETS_DISABLE_PROGRESS_BARS"):
            datasets.enable_progress_bars()
