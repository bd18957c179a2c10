"""Resolves `model.id` and `model.adapter`: built-in, folder, hub id, or an earlier run's weights. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.architecture.model_folder import ADAPTER_CONFIG
from engine.config.files.find import RUN_PREFIX, split_run_reference
from engine.config.files.machine import path_of
from engine.config.load import load_run_spec
from engine.config.schema.recipe import Model
from engine.errors import UsageError
from engine.journal.checkpoints_on_disk import removed_checkpoints
from engine.journal.directory import RUN_TOML, RunDirectory
from engine.journal.files import read_table
from engine.journal.index import resolve_run
from engine.journal.own_files import result_files, run_around
from engine.journal.stages import result_run, stage_name

BASE_FOLDER = "base"
"""Folder inside an adapter's folder, with a base model that exists nowhere else (built-in, or random weights)."""


@dataclass(frozen=True)
class StartingWeights:
    """The weights that a run starts from."""

    base: str
    """Hub id, absolute folder, or builtin:NAME."""
    revision: str | None
    adapter: str | None
    """Hub id or absolute folder of the adapter to train further."""

    @property
    def folder(self) -> Path | None:
        """None unless the base is a local folder."""
        path = Path(self.base)
        return path if path.is_dir() else None


def find_starting_weights(model: Model) -> StartingWeights:
    """Resolve a recipe's [model]; if model.id refers to an adapter, that adapter and its base. UsageError: no such run,
    step or folder, or two adapters at once."""
    adapter = _local(model.adapter) if model.adapter else None
    place = _local(model.id)
    if not (Path(place) / ADAPTER_CONFIG).is_file():
        return StartingWeights(place, model.revision, adapter)
    if adapter is not None:
        raise UsageError(
            f"model.id = {model.id!r} is an adapter, and model.adapter is a second one",
            fix="remove one of the two, or merge the first into its base",
        )
    if model.init == "random":
        raise UsageError(
            f'model.id = {model.id!r} is an adapter, and model.init = "random" would put it on an untrained base',
            fix='set model.init = "pretrained"',
        )
    base, revision = base_of_adapter(Path(place))
    return StartingWeights(base, revision, place)


def base_of_adapter(folder: Path) -> tuple[str, str | None]:
    """(base, revision) of a saved adapter: the base saved in its folder, else the one that its config names, else, if
    that is a folder which is not there any more, the one that the run of the adapter started from."""
    if (folder / BASE_FOLDER / "config.json").is_file():
        return str((folder / BASE_FOLDER).resolve()), None
    config = _adapter_config(folder / ADAPTER_CONFIG)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    run = next((place for place in folder.resolve().parents[:3] if (place / RUN_TOML).is_file()), None)
    moved = base and str(base).startswith("/") and not Path(str(base)).is_dir()
    if base and not (moved and run is not None):
        return str(base), None if revision is None else str(revision)
    if run is None:
        raise UsageError(
            f"{folder / ADAPTER_CONFIG} does not name a base model",
            expected="a hub id there, or the adapter in the folder of its run",
            fix=f"set model.id to the base, and model.adapter to {folder}",
        )
    start = find_starting_weights(load_run_spec(run / RUN_TOML, own=True).recipe.model)
    return start.base, start.revision


def _adapter_config(path: Path) -> dict[str, Any]:
    try:
        return read_table(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path} cannot be read: {reason}", expected="the config of an adapter", fix="copy the adapter again"
        ) from error


def find_run_weights(text: str) -> Path:
    """The folder of "run:RUN" (its result), "run:RUN@STEP" or "run:RUN@best". UsageError: there is none, or a link in
    it leaves the run's folder."""
    name, which = split_run_reference(text)
    run = result_run(resolve_run(name, None))
    if which:
        refuse_removed(run, which, text)
    folder = _result(run, text) if not which else _checkpoint(run, which, text)
    if not folder.is_dir():
        raise UsageError(
            f"{text}: {folder} does not exist",
            expected=f"a step in {run.checkpoints}, or best",
            fix=f"choose one of: {', '.join(_steps(run)) or 'none left'}",
        )
    result_files(folder, run.path)
    return folder


def refuse_removed(run: RunDirectory, which: str, text: str) -> None:
    """Raise UsageError if checkpoint `which` ("best" or a step) of the stage was deleted when the staged run was done;
    `text` is the reference as typed."""
    removed = removed_checkpoints(run.checkpoints)
    if removed is None or which not in map(str, [*removed.steps, *(["best"] if removed.best is not None else [])]):
        return
    name = stage_name(run)
    raise UsageError(
        f"{text}: {removed.explain(name)}",
        expected=f"the stage's result: {text.rpartition('@')[0] or name}",
        fix=f"leave out the step; to keep checkpoints next time: --set stages.{name}.checkpoint.keep=2",
    )


def _local(text: str) -> str:
    """The absolute folder of a path or "run:..."; a hub id unchanged. UsageError: no such run or folder."""
    if text.startswith(RUN_PREFIX):
        return str(find_run_weights(text).resolve())
    folder = path_of(text)
    if folder.is_dir():
        if (run := run_around(folder)) is not None:
            result_files(folder, run)
        return str(folder.resolve())
    if text.startswith(("/", "./", "../", "~")):
        raise UsageError(
            f"there is no folder {text}", expected="a model folder, hub id or builtin:tiny", fix="correct the path"
        )
    return text


def _result(run: RunDirectory, text: str) -> Path:
    for folder in (run.adapter, run.model):
        if folder.is_dir():
            return folder
    raise UsageError(
        f"{text}: this run has no result yet",
        expected="a finished run, or one of its checkpoints",
        fix=f"add one, such as {text}@{(_steps(run) or ['best'])[-1]}",
    )


def _checkpoint(run: RunDirectory, which: str, text: str) -> Path:
    if which == "best":
        try:
            which = str(int(read_table(run.checkpoints / "best")["step"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{text}: this run has no best checkpoint", fix="add a step, or leave out @best"
            ) from error
    if not which.isdecimal():
        raise UsageError(f"{text}: {which!r} is not a step", expected="a step number or best", fix="correct it")
    return run.checkpoint(int(which)) / "weights"


def _steps(run: RunDirectory) -> list[str]:
    return [
        str(int(path.name.removeprefix("step-")))
        for path in sorted(run.checkpoints.glob("step-*"))
        if path.name.removeprefix("step-").isdecimal()
    ]
