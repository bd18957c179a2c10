"""A run as one file that another machine can show, compare and repeat: a ZIP of its spec, plan, events and scores, with
its weights if asked. Nothing in such a file is written outside the new run's folder, or allows code or commands."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from engine.config.load import dump_run_spec, load_run_spec, without_destinations
from engine.errors import EnvironmentProblem, UsageError
from engine.journal.directory import RUN_TOML, RunDirectory, settle
from engine.journal.stages import STAGE_FOLDER, stage_directories

SUFFIX = ".tunedeck"
FILES = ("plan.json", "events.jsonl", "evaluations.jsonl", "assembly.json", "labels.json")
FOLDERS = ("evaluations", "experts", "oom")
WEIGHTS = ("adapter", "model")
PART = re.compile(r"[A-Za-z0-9_@+=,-][A-Za-z0-9._@+=, -]*")
"""Of a path: a part that is neither hidden nor climbs."""

MAX_FILES = 20_000
MAX_BYTES = 2 * 2**30
"""Of everything but weights."""
MAX_RATIO = 20
"""Of the unpacked size of weights and tokenizers to the archive's: weights hardly pack, a tokenizer to a fifth."""
CHUNK = 2**20


def export_run(run: RunDirectory, target: Path, *, weights: bool) -> int:
    """Write the archive, without limits such as --on-finish and without the destinations of [finish]; returns its size
    in bytes. Raises UsageError (`target` exists), EnvironmentProblem (it cannot be written)."""
    if target.exists():
        raise UsageError(f"{target} exists already", fix="name another file with --out, or remove it")
    draft = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(draft, "x", zipfile.ZIP_DEFLATED) as archive:
            for part in [run, *stage_directories(run)]:
                place = f"{run.name}/" + (f"stages/{part.name}/" if part is not run else "")
                archive.writestr(place + RUN_TOML, dump_run_spec(without_destinations(load_run_spec(part.run_toml))))
                for file in _files_of(part, weights=weights):
                    packed = zipfile.ZIP_STORED if file.suffix == ".safetensors" else zipfile.ZIP_DEFLATED
                    archive.write(file, place + file.relative_to(part.path).as_posix(), packed)
        os.link(draft, target)
    except FileExistsError as error:
        raise UsageError(f"{target} exists already", fix="name another file with --out") from error
    except OSError as error:
        raise EnvironmentProblem(
            f"{target} cannot be written: {error.strerror or error}", fix="name another file with --out"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return target.stat().st_size


def _files_of(run: RunDirectory, *, weights: bool) -> Iterator[Path]:
    """Regular files, in a fixed order; links are left out."""
    yield from (path for name in FILES if _is_regular(path := run.path / name))
    for name in (*FOLDERS, *(WEIGHTS if weights else ())):
        if not (run.path / name).is_symlink():
            yield from (path for path in sorted((run.path / name).rglob("*")) if _is_regular(path))


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def import_run(source: Path, runs_dir: Path) -> RunDirectory:
    """Unpack an archive as a new run of `runs_dir`, complete or not at all. Raises UsageError for a file that is no
    such archive or holds what a run cannot have, SpecError for its run.toml, EnvironmentProblem for the disk."""
    if not source.is_file():
        raise UsageError(f"there is no file {source}", expected="a file that tunedeck export wrote")
    draft = runs_dir / f".new-{secrets.token_hex(6)}"
    try:
        with zipfile.ZipFile(source) as archive:
            name, members = _checked(archive, source)
            draft.mkdir(parents=True)
            for path, member in members:
                _unpack(archive, member, draft / path)
        for spec_file in [draft / RUN_TOML, *sorted(draft.glob(f"stages/*/{RUN_TOML}"))]:
            # Read as a stranger's: commands, trust in code and other limits are not taken over.
            spec_file.write_text(dump_run_spec(without_destinations(load_run_spec(spec_file))), "utf-8")
            for folder in ("control", "checkpoints"):
                spec_file.with_name(folder).mkdir()
        return settle(RunDirectory(draft), runs_dir / name)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _refusal(source, str(error)) from error
    except OSError as error:
        raise EnvironmentProblem(
            f"{source} cannot be imported: {error.strerror or error}", fix="choose a folder with room: --runs DIR"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _checked(archive: zipfile.ZipFile, source: Path) -> tuple[str, list[tuple[PurePosixPath, zipfile.ZipInfo]]]:
    """The run's name, and each member with its path in the run."""
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) > MAX_FILES:
        raise _refusal(source, f"{len(members):,} files, more than {MAX_FILES:,}")
    names = {member.filename.partition("/")[0] for member in members}
    if len(names) != 1 or not PART.fullmatch(name := names.pop()):
        raise _refusal(source, "not one run's folder")
    found = [(_path_in_run(member, name, source), member) for member in members]
    paths = [str(path).casefold() for path, _ in found]
    if len(set(paths)) < len(paths) or RUN_TOML not in paths:
        raise _refusal(source, "a file twice" if RUN_TOML in paths else "no run.toml")
    size = sum(member.file_size for path, member in found if not _is_weight(path))
    if size > MAX_BYTES:
        raise _refusal(source, f"{size / 2**30:.1f} GiB beside weights, more than {MAX_BYTES / 2**30:g}")
    size = sum(member.file_size for _, member in found)
    if size > MAX_BYTES + MAX_RATIO * source.stat().st_size:
        raise _refusal(source, f"it unpacks to {size / 2**30:.0f} GiB")
    return name, found


def _path_in_run(member: zipfile.ZipInfo, name: str, source: Path) -> PurePosixPath:
    parts = member.filename.split("/")[1:]
    own = parts[2:] if parts[:1] == ["stages"] and len(parts) > 2 and STAGE_FOLDER.match(parts[1]) else parts
    known = (own[0] in (RUN_TOML, *FILES)) if len(own) == 1 else bool(own) and own[0] in (*FOLDERS, *WEIGHTS)
    mode = stat.S_IFMT(member.external_attr >> 16)
    if not known or not all(map(PART.fullmatch, parts)) or mode not in (0, stat.S_IFREG):
        raise _refusal(source, f"{member.filename!r} is no file of a run")
    return PurePosixPath(*parts)


def _is_weight(path: PurePosixPath) -> bool:
    return any(part in WEIGHTS for part in path.parts[:3])


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    """zipfile reads no more than the member's stated size, which was checked, and compares its checksum."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as packed, target.open("xb") as file:
        shutil.copyfileobj(packed, file, CHUNK)


def _refusal(source: Path, why: str) -> UsageError:
    return UsageError(
        f"{source} is no exported run: {why}", expected="a file that tunedeck export wrote", fix="export the run again"
    )
