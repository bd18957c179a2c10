"""A run as one file that another machine can show, compare and repeat: a ZIP of its spec, plan, events and scores, with
its weights if asked. Nothing in such a file is written outside the new run's folder, or allows code or commands."""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from engine.config.load import dump_run_spec, load_run_spec, without_destinations
from engine.errors import EnvironmentProblem, UsageError
from engine.journal.directory import RUN_TOML, RunDirectory, making_runs, settle
from engine.journal.files import held_draft, open_regular
from engine.journal.own_files import is_inside, result_files
from engine.journal.stages import STAGE_FOLDER, stage_directories

SUFFIX = ".tunedeck"
FILES = ("plan.json", "events.jsonl", "evaluations.jsonl", "assembly.json", "labels.json")
FOLDERS = ("evaluations", "experts", "oom")
WEIGHTS = ("adapter", "model")
PART = re.compile(r"[A-Za-z0-9_@+=,-][A-Za-z0-9._@+=, -]*")
"""Of a path: a part that is neither hidden nor climbs."""
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+=,-]{0,199}")
"""Of a run's folder: a word that no command takes for an option."""
LAST = "last"
"""Names no run: as an argument it means the newest."""
MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 1024
"""Of a part of a path, as file systems have it, and of a whole path in a run."""

MAX_FILES = 20_000
MAX_DIRECTORY_BYTES = 16 * 2**20
"""Of the archive's list of files, which is read as a whole."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""What export writes."""
MAX_BYTES = 2 * 2**30
"""Of everything but weights."""
MAX_RATIO = 20
"""Of the unpacked size of weights and tokenizers to the archive's: weights hardly pack, a tokenizer to a fifth."""
CHUNK = 2**20


def export_run(run: RunDirectory, target: Path, *, weights: bool) -> tuple[int, list[str]]:
    """Write the archive, without limits such as --on-finish and without the destinations of [finish]; return its size
    in bytes, and the files that are left out because they are links that leave the run's folder. Raises UsageError
    (`target` exists, or such a link among the weights), EnvironmentProblem (it cannot be written)."""
    if target.exists():
        raise UsageError(f"{target} already exists", fix="choose another file with --out, or remove it")
    left_out: list[str] = []
    try:
        with held_draft(target) as draft:
            with zipfile.ZipFile(draft, "x", zipfile.ZIP_DEFLATED) as archive:
                for part in [run, *stage_directories(run)]:
                    place = f"{run.name}/" + (f"stages/{part.name}/" if part is not run else "")
                    left_out += _pack(archive, part, run, place, weights=weights)
            if not run.exists():  # the files of a folder that is gone look like files that were never there
                raise EnvironmentProblem(
                    f"{run.path} was moved or removed while it was exported", fix="export it again from its new path"
                )
            os.link(draft, target)
    except FileExistsError as error:
        raise UsageError(f"{target} already exists", fix="choose another file with --out") from error
    except OSError as error:
        raise EnvironmentProblem(
            f"{target} cannot be written: {error.strerror or error}", fix="choose another file with --out"
        ) from error
    return target.stat().st_size, left_out


def _pack(archive: zipfile.ZipFile, part: RunDirectory, run: RunDirectory, place: str, *, weights: bool) -> list[str]:
    """Write the run, or a stage of it, into the archive's folder `place`; return the files that are left out."""
    if not is_inside(part.run_toml, run.path):
        raise UsageError(f"{part.run_toml} links to a path outside the run's folder", fix="export its target")
    archive.writestr(place + RUN_TOML, dump_run_spec(without_destinations(load_run_spec(part.run_toml))))
    for file in _files_of(part, weights=weights):
        packed = zipfile.ZIP_STORED if file.suffix == ".safetensors" else zipfile.ZIP_DEFLATED
        archive.write(file, place + file.relative_to(part.path).as_posix(), packed)
    return [path.relative_to(run.path).as_posix() for path in _links_outside(part)]


def _files_of(run: RunDirectory, *, weights: bool) -> Iterator[Path]:
    """Yield regular files, in a fixed order, and links to such inside the run. Raises UsageError as `result_files`
    does for weights."""
    yield from (path for name in FILES if (path := run.path / name).is_file() and is_inside(path, run.path))
    for name in FOLDERS:
        yield from (
            path for path in sorted((run.path / name).rglob("*")) if path.is_file() and is_inside(path, run.path)
        )
    for name in WEIGHTS if weights else ():
        if os.path.lexists(run.path / name):
            yield from result_files(run.path / name, run.path)


def _links_outside(run: RunDirectory) -> Iterator[Path]:
    """Yield what `_files_of` leaves out."""
    for name in (*FILES, *FOLDERS):
        top = run.path / name
        below = sorted(top.rglob("*")) if name in FOLDERS and not top.is_symlink() else []
        yield from (path for path in (top, *below) if path.is_symlink() and not is_inside(path, run.path))


def import_run(source: Path, runs_dir: Path) -> RunDirectory:
    """Unpack an archive as a new run of `runs_dir`, complete or not at all. Raises UsageError for a file that is no
    such archive or holds what a run cannot have, SpecError for its run.toml, EnvironmentProblem for the disk."""
    try:
        file = open_regular(source)
    except FileNotFoundError as error:
        raise UsageError(f"{source} does not exist", expected="a file that tunedeck export wrote") from error
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}", expected="a readable file") from error
    try:
        with file, making_runs(runs_dir):
            return _unpack_run(file, source, runs_dir)
    except OSError as error:
        raise EnvironmentProblem(
            f"{source} cannot be imported: {error.strerror or error}",
            fix="choose a folder with enough space: --runs DIR",
        ) from error


def _unpack_run(file: BinaryIO, source: Path, runs_dir: Path) -> RunDirectory:
    draft = runs_dir / f".new-{secrets.token_hex(6)}"
    try:
        with _damage_is_refused(source):
            archive = _BoundedArchive(_BoundedFile(file, source))
            name, members = _checked(archive, source)
        draft.mkdir()
        for path, member in members:
            for above in reversed(path.parents):  # not mkdir(parents=True): a draft that was moved is not made again
                if above != PurePosixPath("."):
                    (draft / above).mkdir(exist_ok=True)
            _unpack(archive, member, draft / path, source)
        for spec_file in [draft / RUN_TOML, *sorted(draft.glob(f"stages/*/{RUN_TOML}"))]:
            # Read as a stranger's: commands, trust in code and other limits are not taken over.
            spec_file.write_text(dump_run_spec(without_destinations(load_run_spec(spec_file))), "utf-8")
            for folder in ("control", "checkpoints"):
                spec_file.with_name(folder).mkdir()
        RunDirectory(draft).imported.mkdir()
        return settle(RunDirectory(draft), runs_dir / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _damage_is_refused(source: Path) -> Iterator[None]:
    """Inside the block, what zipfile raises for a damaged archive becomes a UsageError."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _refusal(source, str(error)) from error
    except (ValueError, OverflowError) as error:  # a name that is no text, an offset before the file
        raise _refusal(source, f"its list of files is damaged ({error})") from error


class _BoundedFile(io.RawIOBase):
    """The archive, of which zipfile reads no list of files that would fill memory. An OSError of reading is an error
    of the archive, not of the folder of runs."""

    def __init__(self, file: BinaryIO, source: Path) -> None:
        super().__init__()
        self._file, self._source = file, source

    def read(self, size: int = -1) -> bytes:
        """Raise UsageError for more than MAX_DIRECTORY_BYTES at once."""
        try:
            found = self._file.read(min(size, MAX_DIRECTORY_BYTES + 1) if size >= 0 else MAX_DIRECTORY_BYTES + 1)
        except OSError as error:
            raise UsageError(f"{self._source} cannot be read: {error.strerror}", fix="copy the file again") from error
        if len(found) > MAX_DIRECTORY_BYTES:
            raise _refusal(self._source, f"its list of files is larger than {MAX_DIRECTORY_BYTES >> 20} MiB")
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        """Raise ValueError for a place before the file."""
        try:
            return self._file.seek(offset, whence)
        except OSError as error:
            raise ValueError(f"offset {offset} is outside the file") from error

    def tell(self) -> int:
        return self._file.tell()


class _Entries(list[zipfile.ZipInfo]):
    """The entries of an archive; ends the reading of its list at MAX_FILES, because each takes half a kilobyte."""

    def append(self, member: zipfile.ZipInfo) -> None:
        if len(self) >= MAX_FILES:
            raise zipfile.BadZipFile(f"more than {MAX_FILES:,} files")
        super().append(member)


class _BoundedArchive(zipfile.ZipFile):
    """A ZipFile whose list of files ends at MAX_FILES while it is read."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, _Entries() if name == "filelist" else value)


def _checked(archive: zipfile.ZipFile, source: Path) -> tuple[str, list[tuple[PurePosixPath, zipfile.ZipInfo]]]:
    """The run's name, and each member with its path in the run."""
    members = [member for member in archive.infolist() if not member.filename.endswith("/")]  # is_dir() needs a name
    names = {member.filename.partition("/")[0] for member in members}
    if len(names) != 1:
        raise _refusal(source, "it does not contain exactly one run")
    name = names.pop()
    if not RUN_NAME.fullmatch(name) or name == LAST:
        raise _refusal(source, f"{name!r} is not the name of a run")
    if any(member.compress_type not in METHODS for member in members):
        raise _refusal(source, "a file in it uses a compression that export does not use")
    found = [(_path_in_run(member, source), member) for member in members]
    paths = [str(path).casefold() for path, _ in found]
    folders = {str(parent).casefold() for path, _ in found for parent in path.parents}
    if len(set(paths)) < len(paths) or RUN_TOML not in paths:
        raise _refusal(source, "it contains a file twice" if RUN_TOML in paths else "it has no run.toml")
    if both := folders.intersection(paths):
        raise _refusal(source, f"{min(both)!r} is both a file and a folder")
    size = sum(member.file_size for path, member in found if not _is_weight(path))
    if size > MAX_BYTES:
        raise _refusal(source, f"{size / 2**30:.1f} GiB without weights, more than {MAX_BYTES / 2**30:g}")
    size = sum(member.file_size for _, member in found)
    if size > MAX_BYTES + MAX_RATIO * source.stat().st_size:
        raise _refusal(source, f"it unpacks to {size / 2**30:.0f} GiB")
    return name, found


def _path_in_run(member: zipfile.ZipInfo, source: Path) -> PurePosixPath:
    parts = member.filename.split("/")[1:]
    own = parts[2:] if parts[:1] == ["stages"] and len(parts) > 2 and STAGE_FOLDER.match(parts[1]) else parts
    known = (own[0] in (RUN_TOML, *FILES)) if len(own) == 1 else bool(own) and own[0] in (*FOLDERS, *WEIGHTS)
    mode = stat.S_IFMT(member.external_attr >> 16)
    sizes = [len(part.encode()) for part in parts]
    too_long = max(sizes, default=0) > MOST_NAME_BYTES or sum(sizes) + len(sizes) > MOST_PATH_BYTES
    if not known or too_long or not all(map(PART.fullmatch, parts)) or mode not in (0, stat.S_IFREG):
        raise _refusal(source, f"{member.filename[:200]!r} does not belong to a run")
    return PurePosixPath(*parts)


def _is_weight(path: PurePosixPath) -> bool:
    return any(part in WEIGHTS for part in path.parts[:3])


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, source: Path) -> None:
    """Write one member. zipfile reads no more than its stated size, which was checked, and compares its checksum."""
    with _damage_is_refused(source):
        packed = archive.open(member)
    with packed, target.open("xb") as file:
        while True:
            with _damage_is_refused(source):
                chunk = packed.read(CHUNK)
            if not chunk:
                return
            file.write(chunk)


def _refusal(source: Path, why: str) -> UsageError:
    return UsageError(
        f"{source} is not an exported run: {why}",
        expected="a file that tunedeck export wrote",
        fix="export the run again",
    )
