"""Opens files and hub data sets with the library datasets."""

from __future__ import annotations

import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from lzma import LZMAError
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from datasets.arrow_reader import ReadInstruction
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from huggingface_hub.errors import HfHubHTTPError

from engine.config.files.caches import cache_folder
from engine.config.files.data_files import (
    COMPRESSION_SUFFIXES,
    LOADERS,
    find_data_files,
    find_data_files_in,
    suffix_of,
)
from engine.config.schema.data import Source
from engine.data.bounds import screen
from engine.data.csv_files import csv_options, separator_of, without_long_records
from engine.data.documents import Documents, unpacked
from engine.data.folders import csv_of_images, data_of_folder, image_tables, is_image
from engine.data.hub_connection import offline_if_unreachable
from engine.data.json_rows import NO_OBJECT_FIX, SKIP_FIX, JsonRows
from engine.data.records import (
    UNPACKING_ERRORS,
    Screened,
    SourceRows,
    conversion,
    describe_source,
    find_json_error,
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
            return _open_hub(source)
        return _open_local(source, Path(source.path).expanduser(), skip_broken, version)


def _open_local(source: Source, path: Path, skip_broken: bool, version: int) -> SourceRows:
    files = find_data_files(source)
    reads = {file: file for file in files}
    try:
        if pointers := [file for file in files if _is_pointer(file)]:
            raise DataError(
                f"source {source.name}: {pointers[0]} is a pointer of Git LFS, not the file itself",
                fix="fetch the files in the repository that they lie in: git lfs pull",
            )
        digests = [hash_file(file) for file in files]
        fingerprint = hash_text(hash_files(files, digests, path if path.is_dir() else None), source.split)
        if all(file.stat().st_size == 0 for file in files):
            raise DataError(f"source {source.name}: {path} is empty", fix="put at least one sample in it")
        found, notices = _data_files(source, path, files, version)
        if version > 3 and {LOADERS.get(suffix_of(file)) for file in found} == {"csv"}:
            fingerprint = hash_text(fingerprint, "cells are text")
        kept = [digest for file, digest in zip(files, digests, strict=True) if file in set(found)]
        screened = screen(found, kept)
        if (left_out := [each for each in screened if each.dropped]) and not any(each.kept for each in screened):
            raise _nothing_left(source, left_out)
        reads = {each.file: each.reads for each in screened}
        rows = _rows_of(source, path, screened, kept, fingerprint, skip_broken, version)
        left_out = [each for each in screened if each.dropped]
        return replace(rows, left_out=left_out, notices=[*notices, *rows.notices])
    except PermissionError as error:
        raise DataError(
            f"source {source.name}: {error.filename or path} cannot be read (permission denied)",
            fix=f"give yourself the right to read it: chmod u+r {error.filename or path}",
        ) from error
    except READ_ERRORS as error:
        raise _unreadable(source, path, reads, error) from error


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
    names = [str(file.relative_to(path)) for file in beside]
    listed = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return found.data, [f"source {source.name}: not read, as it holds no rows of the data: {listed}"]


def _rows_of(
    source: Source,
    path: Path,
    screened: list[Screened],
    digests: Sequence[str],
    fingerprint: str,
    skip_broken: bool,
    version: int,
) -> SourceRows:
    """Of text, documents; else a table, or rows read one by one where Arrow has no table for them."""
    unit, base = source.unit or "file", split_name(source)
    kinds = {LOADERS.get(suffix_of(each.file)) for each in screened}
    if kinds == {"text"} and unit != "line":
        files = [unpacked(each.reads, digest) for each, digest in zip(screened, digests, strict=True)]
        documents = _part_of(source, Documents(files, unit))
        return SourceRows(["text"], len(documents), hash_text(fingerprint, unit), documents)
    if source.unit not in (None, "line"):
        raise _unit_of_table(source)
    reads = {each.file: each.reads for each in screened}
    explain = partial(_unreadable, source, path, reads)
    odd = next((f"{each.file}{each.odd_row}" for each in screened if each.odd_row), None)
    if odd is not None and (path.is_dir() or not skip_broken):
        raise DataError(f"source {source.name}: {odd}", fix=NO_OBJECT_FIX)
    if odd is not None:
        return _row_by_row(source, screened, digests, fingerprint, skip_broken)
    try:
        rows = _rows(_load_local(source, path, screened, base, version), fingerprint, explain)
    except READ_ERRORS:
        if kinds == {"csv"} and skip_broken:
            _leave_out_long_records(screened, digests)
            return _rows(_load_local(source, path, screened, base, version), fingerprint, explain)
        if kinds != {"json"} or path.is_dir() or (find_json_error(reads) is not None and not skip_broken):
            raise
        return _row_by_row(source, screened, digests, fingerprint, skip_broken)
    has_lines = not path.is_dir() and source.split == base and LOADERS[suffix_of(screened[0].file)] == "json"
    return replace(rows, line_files=reads) if has_lines else rows


def _row_by_row(
    source: Source, screened: Sequence[Screened], digests: Sequence[str], fingerprint: str, skip_broken: bool
) -> SourceRows:
    """Rows of JSON that make no table of Arrow's."""
    files = [unpacked(each.reads, digest) for each, digest in zip(screened, digests, strict=True)]
    table = JsonRows(screened, files, skip=skip_broken)
    if not len(table) and any(each.dropped for each in screened):
        raise _nothing_left(source, screened) from None
    part = _part_of(source, table)
    return SourceRows(table.columns, len(part), fingerprint, part)


def _part_of(source: Source, table: Any) -> Any:
    if source.split == split_name(source):
        return table
    return table[slice(*absolute_slice(source, len(table)))]


def _leave_out_long_records(screened: Sequence[Screened], digests: Sequence[str]) -> None:
    for each, digest in zip(screened, digests, strict=True):
        copy = cache_folder() / "screened" / f"{digest}-fields.csv"
        with tempfile.TemporaryDirectory(dir=copy.parent) as folder:
            draft = Path(folder, copy.name)
            for line, reason in without_long_records(each.reads, separator_of(each.reads), draft).items():
                each.leave_out(reason, line)
            draft.replace(copy)
        each.reads = copy


def _unit_of_table(source: Source) -> DataError:
    return DataError(
        f"source {source.name}: unit = {source.unit!r} with rows of a table",
        expected="text files (.txt, .md): each row of a table is one document",
        fix=f"add --set data.sources.{source.name}.unit=",
    )


def _is_saved(path: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote this folder."""
    return path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _load_local(source: Source, path: Path, screened: Sequence[Screened], base: str, version: int) -> Any:
    if _is_saved(path):
        return _saved_split(source, datasets.load_from_disk(str(path)), base)
    options: dict[str, Any] = {"split": source.split, "cache_dir": str(cache_folder() / "datasets")}
    suffix = suffix_of(screened[0].file)
    if {LOADERS.get(suffix_of(each.file)) for each in screened} == {"csv"}:
        options |= csv_options(screened[0].reads, as_text=version > 3)
    table = csv_of_images(source, find_data_files_in(path)) if path.is_dir() else None
    if path.is_dir() and table is None:
        if options.get("sep") == ",":
            del options["sep"]
        return datasets.load_dataset(str(_folder_to_read(path, screened)), **options)
    if LOADERS[suffix] == "csv" and (longest := max(each.longest for each in screened)) > CSV_BYTES // CSV_ROWS:
        options["chunksize"] = CSV_BYTES // longest
    files = {base: [str(each.reads) for each in screened]}
    return datasets.load_dataset(LOADERS[suffix], data_files=files, **options)


def _folder_to_read(path: Path, screened: Sequence[Screened]) -> Path:
    """`path`, or a folder of links with the same names, to the screened copies where there are some. The same contents
    give the same folder, as `datasets` keeps what it has read under its name."""
    beside = {file for file in find_data_files_in(path) if file not in {each.file for each in screened}}
    strays = any(LOADERS.get(suffix_of(file)) not in (None, "text") for file in beside)
    if not any(each.dropped for each in screened) and not strays:
        return path
    key = hash_text(*(f"{each.file} {each.reads} {each.reads.stat().st_mtime_ns}" for each in screened))
    folder = cache_folder() / "screened" / key / path.name
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=cache_folder() / "screened") as draft:
        for each in screened:
            name = each.file.relative_to(path)
            while each.dropped and name.suffix.lower() in COMPRESSION_SUFFIXES:
                name = name.with_suffix("")
            Path(draft, name).parent.mkdir(parents=True, exist_ok=True)
            Path(draft, name).symlink_to(each.reads.absolute())
        if (path / "README.md").is_file() and strays:  # may say which files belong to which split
            Path(draft, "README.md").symlink_to((path / "README.md").absolute())
        folder.parent.mkdir(exist_ok=True)
        os.rename(draft, folder)
    return folder


CSV_BYTES, CSV_ROWS = 64 << 20, 10_000
"""`datasets` reads CSV_ROWS rows of a CSV file at once; fewer, where they may have more than CSV_BYTES."""


def _nothing_left(source: Source, left_out: Sequence[Screened]) -> DataError:
    found = [f"{count:,} x {reason} ({each.places(reason)[0]})"
             for each in left_out for reason, count in each.dropped.items()]  # fmt: skip
    return DataError(
        f"source {source.name}: no row is left; dropped: {', '.join(found)}",
        fix="mend the files; docs/data.md has the bounds of what is read",
    )


def _saved_split(source: Source, saved: Any, base: str) -> Any:
    """`saved` is what `save_to_disk` wrote: one data set or several splits."""
    if isinstance(saved, datasets.DatasetDict):
        if base not in saved:
            raise ValueError(f"it has the splits {', '.join(sorted(saved))}, not {base}")
        saved = saved[base]
    start, stop = absolute_slice(source, len(saved))
    return saved.select(range(start, stop))


def _open_hub(source: Source) -> SourceRows:
    name = source.hub or ""
    try:
        with offline_if_unreachable():
            data = datasets.load_dataset(
                name, source.config, split=source.split, cache_dir=str(cache_folder() / "datasets")
            )
    except DatasetNotFoundError as error:
        raise DataError(
            f"source {source.name}: the hub has no data set {name} that you may read",
            fix="check the name; for a gated data set, accept its terms and run: hf auth login",
        ) from error
    except (ConnectionError, HfHubHTTPError) as error:
        raise EnvironmentProblem(
            f"source {source.name}: the hub cannot be reached for {name}: {_short(error)}",
            expected="a connection to the hub, or the data set in the cache already",
            fix=f"connect, or download it elsewhere (hf download --repo-type dataset {name} --local-dir data) and add "
            f"--set data.sources.{source.name}.path=data",
        ) from error
    except READ_ERRORS as error:
        raise DataError(
            f"source {source.name}: {describe_source(source)} cannot be read: {_short(error)}",
            fix="check config and split against the data set's page",
        ) from error
    # The builder's fingerprint covers name, config, version, split and the hub commit the files came from.
    fingerprint = hash_text(name, source.config or "", source.split, data._fingerprint)
    return _rows(data, fingerprint, partial(_unreadable, source, Path(name), {}))


def _rows(data: Any, fingerprint: str, explain: Callable[[BaseException], DataError]) -> SourceRows:
    if not isinstance(data, datasets.Dataset):
        raise ValueError(f"a split was expected, {type(data).__name__} was found")
    for name, feature in data.features.items():
        if (as_files := _undecoded(feature)) is not feature:
            data = data.cast_column(name, as_files)
    images = [name for name, feature in data.features.items() if _is_image(feature)]
    return SourceRows(data.column_names, len(data), fingerprint, data, explain, image_columns=images)


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
    broken = find_json_error({file: reads for file, reads in files.items() if LOADERS.get(suffix_of(file)) == "json"})
    odd = find_not_utf8({file: reads for file, reads in files.items() if LOADERS.get(suffix_of(file)) in TEXT_LOADERS})
    if isinstance(error, UNPACKING_ERRORS) and any(file.suffix.lower() in COMPRESSION_SUFFIXES for file in files):
        return DataError(
            f"source {source.name}: {path} cannot be unpacked: {_short(error)}",
            fix="copy it again if it is cut; if it was never packed, take the ending of packing off its name",
        )
    if broken is not None:
        return DataError(
            f"source {source.name}: {broken}", fix=f"{conversion(odd[0])}; or {SKIP_FIX}" if odd else SKIP_FIX
        )
    if odd is not None:
        return DataError(f"source {source.name}: {odd[0]}:{odd[1]}: not UTF-8 text", fix=conversion(odd[0]))
    cause = error.__cause__ if isinstance(error, DatasetsError) and error.__cause__ else error
    if "corresponds to no data" in str(error) or "BatchSize must be greater than 0" in str(cause):
        return no_rows(source)
    if "Expected" in str(cause) and "fields in line" in str(cause):
        return DataError(f"source {source.name}: {path}: {_short(cause)}", fix=SKIP_FIX)
    return DataError(
        f"source {source.name}: {path} cannot be read: {_short(cause)}",
        fix="check that the file is whole, that its suffix names its format, and the split",
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
