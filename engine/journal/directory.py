"""The run directory: the paths inside it, how a new one is created, and its run.toml."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import tomli

from engine.config.files.trust import keep_limits
from engine.errors import EnvironmentProblem
from engine.journal.files import making_drafts, read_bounded, write_atomically

RUN_TOML, PLAN_JSON, IMPORTED = "run.toml", "plan.json", "imported"


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run. Creating this object touches nothing on disk."""

    path: Path

    @property
    def name(self) -> str:
        """A run is addressed by it."""
        return self.path.name

    @property
    def run_toml(self) -> Path:
        return self.path / RUN_TOML

    @property
    def plan_json(self) -> Path:
        return self.path / PLAN_JSON

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        """Everything the engine process printed, tracebacks included."""
        return self.path / "engine.log"

    @property
    def lock(self) -> Path:
        """Locked by the engine as long as it works on the run."""
        return self.path / "engine.lock"

    @property
    def engine(self) -> Path:
        """Pid, start time and host of the engine process."""
        return self.path / "engine.json"

    @property
    def launch(self) -> Path:
        """The launcher's job that works on the run, if a launcher started its ranks."""
        return self.path / "launch.json"

    @property
    def control(self) -> Path:
        """Requests to the engine, one file each."""
        return self.path / "control"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints `step-00000100`; one appears when it is complete."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @property
    def experts(self) -> Path:
        """Expert utilisation, a matrix for each evaluation of a mixture-of-experts model."""
        return self.path / "experts"

    def expert_matrix(self, step: int) -> Path:
        return self.experts / f"step-{step:08d}.json"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def kept_scores(self) -> Path:
        """Answers, losses, and the values of single samples, kept by scoring."""
        return self.path / "evaluations"

    @property
    def trackers(self) -> Path:
        """What each tracker has of the run (`NAME.json`), its files and its log."""
        return self.path / "trackers"

    @property
    def oom(self) -> Path:
        return self.path / "oom"

    @property
    def adapter(self) -> Path:
        """The result of a LoRA run."""
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        """The result of full fine-tuning."""
        return self.path / "model"

    @property
    def assembly(self) -> Path:
        """From which models a stage assembles a mixture of experts; absent elsewhere."""
        return self.path / "assembly.json"

    @property
    def merged(self) -> Path:
        """The model that a LoRA run's result was merged into."""
        return self.path / "merged"

    @property
    def imported(self) -> Path:
        """An empty folder in a run that came from an archive; its time is that of the import."""
        return self.path / IMPORTED

    @property
    def stages(self) -> Path:
        """Stages of a staged run: `01-NAME`, each a run directory."""
        return self.path / "stages"

    def exists(self) -> bool:
        """A run directory contains a run spec."""
        return self.run_toml.is_file()


class HeldFolder:
    """A folder that this process keeps open: its path follows the folder when somebody moves it. Reading the path
    raises EnvironmentProblem once the folder is removed, so that nothing is written at its old place."""

    def __init__(self, path: Path, what: str, fix: str) -> None:
        """`what` it is, and what to do when it is removed. Raises EnvironmentProblem if there is no such folder."""
        self._given, self._what, self._fix = path.absolute(), what, fix
        try:
            self._folder = os.open(self._given, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise EnvironmentProblem(
                f"{self._given} cannot be opened: {error.strerror or error}", expected=what
            ) from error
        weakref.finalize(self, os.close, self._folder)

    @property
    def path(self) -> Path:
        if _is_open_as(self._folder, self._given):
            return self._given
        link = Path(f"/proc/self/fd/{self._folder}")
        if link.is_symlink() and _is_open_as(self._folder, link.readlink()):
            return link.readlink()
        raise self.removed()

    def removed(self) -> EnvironmentProblem:
        """Return the error for a folder that was removed."""
        return EnvironmentProblem(f"{self._what} {self._given} was removed while it was in use", fix=self._fix)


class HeldRunDirectory(RunDirectory):
    """A run directory that this process keeps open, as `HeldFolder`."""

    def __init__(self, path: Path) -> None:
        """Raises EnvironmentProblem if there is no such folder."""
        fix = "start the run again; do not move a folder while its engine runs"
        object.__setattr__(self, "_held", HeldFolder(path, "the run's folder", fix))

    @property
    def path(self) -> Path:
        held: HeldFolder = vars(self)["_held"]
        return held.path


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def read_spec(directory: RunDirectory) -> dict[str, Any]:
    """The tables of `run.toml`, without the check of values that a start makes, so that a newer version's file can be
    shown, too; empty when unreadable. What has not the type in SPEC_TYPES is left out. Cached until the file changes
    (parsing takes a millisecond): the caller must not change them."""
    return read_spec_and_problems(directory)[0]


def read_spec_and_problems(directory: RunDirectory) -> tuple[dict[str, Any], list[str]]:
    """`read_spec`, and a sentence if the file or a part of it is left out."""
    try:
        found = directory.run_toml.stat()
        return _parsed_spec(directory.run_toml, found.st_mtime_ns, found.st_ino)
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"run.toml cannot be read: {_reason(error)}"]


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and _is_name(each.get("name")) for each in value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


SPEC_TYPES: dict[tuple[str, ...], Callable[[Any], bool]] = {
    ("name",): _is_name,
    ("profile",): _is_table,
    ("profile", "name"): _is_name,
    ("profile", "device"): _is_table,
    ("recipe",): _is_table,
    ("recipe", "name"): _is_name,
    ("recipe", "model"): _is_table,
    ("recipe", "model", "id"): _is_name,
    ("recipe", "checkpoint"): _is_table,
    ("recipe", "checkpoint", "best_metric"): _is_name,
    ("recipe", "stages"): _list_of_tables,
    ("provenance",): _is_table,
    ("provenance", "set"): lambda value: isinstance(value, list) and all(map(_is_name, value)),
    ("provenance", "sweep"): _is_table,
    ("provenance", "sweep", "id"): _is_name,
    ("provenance", "sweep", "point"): _is_table,
}
"""Keys of a run.toml that readers look at without the checks of a start, outer tables first."""


@lru_cache(maxsize=64)
def _parsed_spec(path: Path, _changed_ns: int, _inode: int) -> tuple[dict[str, Any], list[str]]:
    spec = tomli.loads(read_bounded(path).decode("utf-8"))
    wrong = []
    for keys, holds in SPEC_TYPES.items():
        table = nested(spec, *keys[:-1])
        if isinstance(table, dict) and keys[-1] in table and not holds(table[keys[-1]]):
            del table[keys[-1]]
            wrong.append(".".join(keys))
    return spec, [f"run.toml has values of a wrong type: {', '.join(wrong)}"] if wrong else []


def enabled_stages(spec: dict[str, Any]) -> list[str]:
    """The names of the stages in the tables of a run.toml; empty for a run without stages."""
    return [str(stage["name"]) for stage in nested(spec, "recipe", "stages") or [] if stage.get("enabled", True)]


def nested(table: Any, *keys: str) -> Any:
    """The value under nested keys of a table; an empty text if there is none."""
    for key in keys:
        table = table.get(key, "") if isinstance(table, dict) else ""
    return table


def names_held_out_data(directory: RunDirectory) -> bool:
    """Whether the recipe of a run, or of one of its stages, names held-out data or a share of them."""
    spec = read_spec(directory)
    recipes = [nested(spec, "recipe"), *(nested(spec, "recipe", "stages") or ())]
    keys = ("data", "validation"), ("data", "valid_fraction"), ("evaluate", "sources")
    return any(nested(recipe, *key) for recipe in recipes for key in keys)


OLD_DRAFT_SECONDS = 24 * 3600
"""Age of a run directory in the making whose process must be gone, on file systems where a folder cannot be locked."""


def _remove_old_drafts(folder: Path, seconds: float) -> None:
    """Remove what killed processes left of run directories in the making, if nobody has written there for so long."""
    for draft in folder.glob(".new-*"):
        with suppress(OSError):
            if time.time() - draft.stat().st_mtime > seconds:
                shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def making_runs(runs_dir: Path) -> Iterator[None]:
    """Create the folder `runs_dir`, and remove what killed processes left of run directories in the making there.
    Inside the block, no other process removes those of this one. Raises OSError."""

    def remove(alone: bool) -> None:
        _remove_old_drafts(runs_dir, -1.0 if alone else OLD_DRAFT_SECONDS)

    with making_drafts(runs_dir, remove):
        yield


def create_run_directory(runs_dir: Path, name: str, run_toml_text: str, plan: dict[str, Any]) -> RunDirectory:
    """Create `TIMESTAMP-NAME` (`-2` and so on if taken) with `run.toml` and `plan.json`, complete or not at all. Raises
    EnvironmentProblem where `runs_dir` cannot be written."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    try:
        with making_runs(runs_dir):
            draft = RunDirectory(runs_dir / f".new-{secrets.token_hex(6)}")
            _fill(draft, run_toml_text, plan)
            made = settle(draft, runs_dir / f"{stamp}-{name}")
    except OSError as error:
        raise EnvironmentProblem(
            f"no run directory can be created in {runs_dir}: {error.strerror or error}",
            expected="a writable folder on a disk with enough space",
            fix="choose another folder with --runs DIR or $TUNEDECK_RUNS",
        ) from error
    keep_limits(made.run_toml, run_toml_text)
    return made


def create_stage_directory(
    stage: RunDirectory, run_toml_text: str, plan: dict[str, Any], assembly: dict[str, Any] | None = None
) -> None:
    """Create a stage's run directory inside its run, complete or not at all. `assembly` is the content of
    `assembly.json`, for a stage that assembles a mixture of experts. Raises OSError."""
    stage.path.parent.mkdir(exist_ok=True)
    _remove_old_drafts(stage.path.parent, -1.0)  # one conductor works on a run
    draft = RunDirectory(stage.path.with_name(f".new-{secrets.token_hex(6)}"))
    _fill(draft, run_toml_text, plan)
    if assembly is not None:
        write_atomically(draft.assembly, json.dumps(assembly, indent=2) + "\n")
    os.rename(draft.path, stage.path)
    keep_limits(stage.run_toml, run_toml_text)


def rewrite_spec(directory: RunDirectory, text: str) -> None:
    """Replace run.toml by what this user asks for. Raises OSError; EnvironmentProblem as `keep_limits` does."""
    keep_limits(directory.run_toml, text)
    write_atomically(directory.run_toml, text)


def _fill(draft: RunDirectory, run_toml_text: str, plan: dict[str, Any]) -> None:
    draft.path.mkdir()
    try:
        write_atomically(draft.run_toml, run_toml_text)
        write_atomically(draft.plan_json, json.dumps(plan, indent=2) + "\n")
        draft.control.mkdir()
        draft.checkpoints.mkdir()
    except OSError:
        shutil.rmtree(draft.path, ignore_errors=True)
        raise


def settle(draft: RunDirectory, wanted: Path) -> RunDirectory:
    """Rename the draft to `wanted`, `wanted-2` and so on. Raises OSError, after deleting it, if that fails."""
    for number in count(1):
        final = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            os.rename(draft.path, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                shutil.rmtree(draft.path, ignore_errors=True)
                raise
        else:
            return RunDirectory(final.absolute())
    raise AssertionError("count() never ends")
