"""The run directory: the paths inside it, how a new one is created, and small files that are written whole or not at
all."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from engine.errors import EnvironmentProblem


def write_atomically(path: Path, text: str) -> None:
    """Write `text` whole or not at all: a reader, or a crash, finds the old content or the new. Raises OSError; no
    temporary file is left."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except BaseException:  # an interrupt, too, leaves no temporary file
        os.unlink(temporary)
        raise


@contextmanager
def locked(path: Path, *, timeout_seconds: float = -1.0) -> Iterator[None]:
    """Hold the lock file `path` inside the block; a negative timeout waits without a limit. The kernel releases the
    lock when the process ends for any reason; forked children do not hold it. Raises TimeoutError, or other OSErrors if
    the file cannot be locked."""
    from filelock import FileLock  # imported here: it takes longer than most commands that never lock

    with FileLock(path, timeout=timeout_seconds, poll_interval=0.05, mode=0o644, thread_local=False):
        yield


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
        return self.path / "run.toml"

    @property
    def plan_json(self) -> Path:
        return self.path / "plan.json"

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
    def stages(self) -> Path:
        """Stages of a staged run: `01-NAME`, each a run directory."""
        return self.path / "stages"

    def exists(self) -> bool:
        """A run directory contains a run spec."""
        return self.run_toml.is_file()


def create_run_directory(runs_dir: Path, name: str, run_toml_text: str, plan: dict[str, Any]) -> RunDirectory:
    """Create `TIMESTAMP-NAME` (`-2` and so on if taken) with `run.toml` and `plan.json`, complete or not at all. Raises
    EnvironmentProblem where `runs_dir` cannot be written."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        draft = RunDirectory(runs_dir / f".new-{secrets.token_hex(6)}")
        _fill(draft, run_toml_text, plan)
        return _settle(draft, runs_dir / f"{stamp}-{name}")
    except OSError as error:
        raise EnvironmentProblem(
            f"no run directory can be created in {runs_dir}: {error.strerror or error}",
            expected="a writable folder on a disk with room",
            fix="choose another with --runs DIR or $TUNEDECK_RUNS",
        ) from error


def create_stage_directory(
    stage: RunDirectory, run_toml_text: str, plan: dict[str, Any], assembly: dict[str, Any] | None = None
) -> None:
    """Create a stage's run directory inside its run, complete or not at all. `assembly` is the content of
    `assembly.json`, for a stage that assembles a mixture of experts. Raises OSError."""
    stage.path.parent.mkdir(exist_ok=True)
    draft = RunDirectory(stage.path.with_name(f".new-{secrets.token_hex(6)}"))
    _fill(draft, run_toml_text, plan)
    if assembly is not None:
        write_atomically(draft.assembly, json.dumps(assembly, indent=2) + "\n")
    os.rename(draft.path, stage.path)


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


def _settle(draft: RunDirectory, wanted: Path) -> RunDirectory:
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
