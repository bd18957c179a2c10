"""The run directory: the paths inside it, and how a new one is created.

The console, the command line and the engine share nothing but this folder. Events are read and written elsewhere.

Try: `ls runs/*/`
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from engine.errors import EnvironmentProblem
from engine.journal.files import write_atomically


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run. Creating this object touches nothing on disk."""

    path: Path

    @property
    def name(self) -> str:
        """The directory's name, which is how a run is addressed."""
        return self.path.name

    @property
    def run_toml(self) -> Path:
        """The file with the resolved run spec."""
        return self.path / "run.toml"

    @property
    def plan_json(self) -> Path:
        """The file with the plan, the prediction of memory that was made before the start."""
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        """The journal of the run, one JSON object per line."""
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        """The file with everything the engine process printed, tracebacks included."""
        return self.path / "engine.log"

    @property
    def lock(self) -> Path:
        """The lock file, which the engine locks as long as it works on the run."""
        return self.path / "engine.lock"

    @property
    def engine(self) -> Path:
        """The file with the identity of the engine process: pid, start time, host."""
        return self.path / "engine.json"

    @property
    def launch(self) -> Path:
        """The file that names the launcher's job that works on the run, if a launcher started its ranks."""
        return self.path / "launch.json"

    @property
    def control(self) -> Path:
        """The folder of requests to the engine, one file each."""
        return self.path / "control"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints `step-00000100`; a checkpoint appears there when it is complete."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of one step, whether it exists or not."""
        return self.checkpoints / f"step-{step:08d}"

    @property
    def experts(self) -> Path:
        """The folder of expert utilisation matrices, one for each evaluation of a mixture-of-experts model."""
        return self.path / "experts"

    def expert_matrix(self, step: int) -> Path:
        """The file with the expert utilisation matrix of the evaluation after one step."""
        return self.experts / f"step-{step:08d}.json"

    @property
    def evaluations(self) -> Path:
        """The file with the scores of checkpoints, one JSON object per line."""
        return self.path / "evaluations.jsonl"

    @property
    def kept_scores(self) -> Path:
        """The folder of what scoring keeps: answers, losses, and the values of single samples."""
        return self.path / "evaluations"

    @property
    def trackers(self) -> Path:
        """The folder of experiment trackers: what each has of the run (`NAME.json`), its files and its log."""
        return self.path / "trackers"

    @property
    def oom(self) -> Path:
        """The folder of out-of-memory reports."""
        return self.path / "oom"

    @property
    def adapter(self) -> Path:
        """The folder of the trained adapter, which is the result of a LoRA run."""
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        """The folder of the model that a full fine-tuning produces."""
        return self.path / "model"

    @property
    def assembly(self) -> Path:
        """The file that says from which models a stage assembles a mixture of experts; absent in other stages and
        runs."""
        return self.path / "assembly.json"

    @property
    def merged(self) -> Path:
        """The folder of the model that a LoRA run's result was merged into."""
        return self.path / "merged"

    @property
    def stages(self) -> Path:
        """The folder of a staged run's stages: `01-NAME`, each a run directory."""
        return self.path / "stages"

    def exists(self) -> bool:
        """Whether this is a run directory: it contains a run spec."""
        return self.run_toml.is_file()


def create_run_directory(runs_dir: Path, name: str, run_toml_text: str, plan: dict[str, Any]) -> RunDirectory:
    """Create the run directory `TIMESTAMP-NAME` (with `-2` and so on if the name is taken), with `run.toml` and
    `plan.json`; the directory appears complete or not at all.

    Raises EnvironmentProblem where `runs_dir` cannot be written.
    """
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
    """Create the run directory of a stage, inside its run, with `run.toml` and `plan.json`; the directory appears
    complete or not at all. `assembly` is the content of `assembly.json`, for a stage that assembles a mixture of
    experts; None for others. Raises OSError."""
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
    """Rename the draft to `wanted`, or to `wanted-2` and so on if the name is taken; returns the new directory.

    Raises OSError, after deleting the draft, if it cannot be renamed.
    """
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
