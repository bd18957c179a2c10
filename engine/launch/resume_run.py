"""Prepares a run to be resumed: checks the changed spec and writes it into the run directory.

Starting the engine is in `engine.launch.process`; which keys may change is in `engine.launch.resume_changes`.

Try: `tunedeck resume last --set train.max_steps=200`
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from engine.journal.checkpoints_on_disk import find_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.files import write_atomically
from engine.journal.index import record_start
from engine.journal.liveness import refuse_if_claimed
from engine.journal.summary import summarise
from engine.launch.create_run import drop_untrusted_limits
from engine.launch.resume_changes import find_changes, makes_longer, notices_of, refused_changes
from engine.spec.check.devices import require_matching_devices
from engine.spec.check.unsupported import refuse_unsupported
from engine.spec.load import dump_run_spec, load_run_spec, override
from engine.spec.schema.run import RunSpec


def prepare_resume(
    directory: RunDirectory,
    overrides: Sequence[str],
    limits: dict[str, Any],
    *,
    profile: str | None = None,
    from_step: int | None = None,
) -> list[str]:
    """Check the requested changes and write the new spec into the run directory; returns notices for the user.

    `limits` holds the limits named on this command line; all others stay as they were at the last start.

    Raises:
        UsageError: `from_step` has no checkpoint, a change is not allowed, or a finished run would not get longer.
        EnvironmentProblem: an engine works on the run.
    """
    refuse_if_claimed(directory)
    _require_checkpoint(directory, from_step)
    notices = change_spec(directory, overrides, limits, profile=profile, from_step=from_step)
    warning = record_start(directory)
    return [*notices, *([warning] if warning else [])]


def _require_checkpoint(directory: RunDirectory, step: int | None) -> None:
    """Raise UsageError when `--from` names a checkpoint that does not exist."""
    if step is None or directory.checkpoint(step).is_dir():
        return
    steps = sorted(checkpoint.step for checkpoint in find_checkpoints(directory.checkpoints))
    raise UsageError(
        f"{directory.name} has no checkpoint of step {step}",
        expected=f"--from {' or '.join(map(str, steps))}" if steps else "a run that has written a checkpoint",
        fix="leave --from out to continue from the newest checkpoint",
    )


def change_spec(
    directory: RunDirectory,
    overrides: Sequence[str],
    limits: dict[str, Any],
    *,
    profile: str | None = None,
    from_step: int | None = None,
) -> list[str]:
    """Write the changed spec into the run directory, with a copy of the old one as run.N.toml; returns notices for the
    user."""
    before = load_run_spec(directory.run_toml)
    resolved = override(before, overrides, profile=profile)
    changes = find_changes(before.model_dump(by_alias=True), resolved.spec.model_dump(by_alias=True))
    if refused := refused_changes(changes):
        raise UsageError(
            "resume cannot change what the run has already learned from:\n  " + "\n  ".join(refused),
            fix="start a new run with: tunedeck train",
        )
    refuse_unsupported(resolved.spec)
    longer = makes_longer(changes)
    if not longer and from_step is None:
        _refuse_if_done(directory)
    spec, notices = _with_limits(directory, resolved.spec, limits)
    if changes:
        write_atomically(_next_backup(directory), directory.run_toml.read_text("utf-8"))
    if changes or spec.limits != load_run_spec(directory.run_toml, own=True).limits:
        write_atomically(directory.run_toml, dump_run_spec(spec))
    return [*resolved.notices, *notices, *notices_of(changes), *([_schedule_notice(spec)] if longer else [])]


def _refuse_if_done(directory: RunDirectory) -> None:
    summary = summarise(directory)
    if summary.status == "done":
        raise UsageError(
            f"run {directory.name} is done at step {summary.step}",
            expected="a run that is not finished, or more epochs or max_steps than it had",
            fix=f"tunedeck resume {directory.name} --set train.max_steps={max(1, summary.step) * 2}",
        )


def _with_limits(directory: RunDirectory, spec: RunSpec, limits: dict[str, Any]) -> tuple[RunSpec, list[str]]:
    """Return `spec` with the limits of the last start, updated by `limits`, and notices for the user."""
    notice = drop_untrusted_limits(directory)
    notices = [notice] if notice else []
    earlier = load_run_spec(directory.run_toml, own=True).limits
    if earlier.devices and "devices" not in limits:
        try:
            require_matching_devices(spec.model_copy(update={"limits": earlier}))
        except UsageError as error:
            notices.append(f"the devices of the last start are left out: {error.found}")
            earlier = earlier.model_copy(update={"devices": []})
    spec = spec.model_copy(update={"limits": earlier.model_copy(update=limits)})
    require_matching_devices(spec)
    return spec, notices


def _schedule_notice(spec: RunSpec) -> str:
    scheduler = spec.recipe.train.scheduler
    if scheduler == "constant":
        return "the run gets longer; its learning rate is constant, so there is no schedule to recompute"
    return f"the run gets longer; the {scheduler} schedule is recomputed for the new number of steps"


def _next_backup(directory: RunDirectory) -> Path:
    """The first run.N.toml that does not exist yet."""
    backups = (directory.path / f"run.{number}.toml" for number in count(1))
    return next(path for path in backups if not path.exists())
