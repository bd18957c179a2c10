"""Prepares a run to be resumed: checks the changed spec and writes it into the run directory.

Starting the engine is in `engine.launch.process`; which keys may change is in `engine.launch.resume_changes`.

Try: `tunedeck resume last --set train.max_steps=200`
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from engine.budget.advise.strategy import settle_parallel
from engine.errors import UsageError
from engine.journal.checkpoints_on_disk import find_checkpoints, removed_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.files import write_atomically
from engine.journal.index import record_start
from engine.journal.liveness import refuse_if_claimed
from engine.journal.stages import stage_directories, stage_name
from engine.journal.summary import summarise
from engine.launch.create_run import drop_untrusted_limits
from engine.launch.resume_changes import (
    STAGES_KEY,
    UNFELT_KEYS,
    Changes,
    comparable,
    enables_stage,
    find_changes,
    makes_longer,
    notices_of,
    refused_changes,
)
from engine.spec.check.devices import require_matching_devices
from engine.spec.check.unsupported import refuse_unsupported
from engine.spec.load import Resolved, dump_run_spec, load_run_spec, override
from engine.spec.schema.run import RunSpec
from engine.spec.stages import dependants
from engine.trackers.packages import require_trackers


def prepare_resume(
    directory: RunDirectory,
    overrides: Sequence[str],
    limits: dict[str, Any],
    *,
    profile: str | None = None,
    from_step: int | None = None,
    from_stage: str | None = None,
) -> list[str]:
    """Check the requested changes and write the new spec into the run directory; returns notices for the user.

    `overrides` are KEY=VALUE; `profile` replaces the run's profile. `limits` maps names of the [limits] table
    (max_hours, devices, …) to the values on this command line; all others stay as they were at the last start.
    `from_stage` names a stage that is done again from its start, with all stages that start from it.

    Raises:
        UsageError: `from_step` has no checkpoint, `from_stage` is no stage of the run, a change is not allowed, or a
            finished run would not get longer.
        EnvironmentProblem: an engine works on the run, or the package of a tracker is not installed.
    """
    refuse_if_claimed(directory)
    _refuse_other_runs_option(directory, from_step, from_stage)
    _refuse_without_checkpoints(directory)
    _require_checkpoint(directory, from_step)
    notices = change_spec(
        directory, overrides, limits, profile=profile, from_step=from_step, from_stage=from_stage
    )
    warning = record_start(directory)
    return [*notices, *([warning] if warning else [])]


def _refuse_other_runs_option(directory: RunDirectory, from_step: int | None, from_stage: str | None) -> None:
    """Raise UsageError for --from (`from_step`) on a staged run, and for --from-stage on any other run."""
    stages = [stage.name for stage in load_run_spec(directory.run_toml).recipe.stages]
    if stages and from_step is not None:
        raise UsageError(
            "--from names a step of one stage, and this run has several",
            fix=f"do a stage again from its start: tunedeck resume {directory.name} --from-stage {stages[-1]}",
        )
    if from_stage is not None and from_stage not in stages:
        raise UsageError(
            f"{directory.name} has no stage {from_stage!r}",
            expected=f"one of: {', '.join(stages)}" if stages else "a run of several stages",
            fix="leave --from-stage out to go on where the run stopped",
        )


def _refuse_without_checkpoints(directory: RunDirectory) -> None:
    """Raise UsageError for a stage whose checkpoints were removed when its run was done: the stage could only be
    trained again from its start."""
    removed = removed_checkpoints(directory.checkpoints)
    if removed is not None:
        run, name = directory.path.parent.parent.name, stage_name(directory)
        raise UsageError(
            removed.explain(name),
            expected="a run or stage that has checkpoints",
            fix=f"do it again from its start: tunedeck resume {run} --from-stage {name}",
        )


def _stages_done_again(spec: RunSpec, from_stage: str | None) -> set[str]:
    """Return the names of the stages to be done again: `from_stage`, and all stages that start from it. Empty if
    `from_stage` is None. Raises UsageError if `from_stage` is disabled."""
    if from_stage is None:
        return set()
    if not any(stage.name == from_stage and stage.enabled for stage in spec.recipe.stages):
        raise UsageError(
            f"stage {from_stage} is disabled, so it would not be done again",
            expected="an enabled stage after --from-stage",
            fix=f"--set stages.{from_stage}.enabled=true",
        )
    return {from_stage, *dependants(spec.recipe, from_stage)}


def set_stages_aside(directory: RunDirectory, names: set[str]) -> None:
    """Move the directories of the stages `names` to `stages/.old-N/`. Raises EnvironmentProblem, and moves none, if an
    engine works on one of them."""
    begun = [stage for stage in stage_directories(directory) if stage_name(stage) in names]
    for stage in begun:
        refuse_if_claimed(stage)
    if not begun:
        return
    aside = next(path for number in count(1) if not (path := directory.stages / f".old-{number}").exists())
    aside.mkdir()
    for stage in begun:
        stage.path.rename(aside / stage.name)


def _changes_of_done_stages(directory: RunDirectory, changes: Changes, again: set[str]) -> list[str]:
    """Return one line for each refused change: one that affects a stage that is done, unless the stage is in `again`,
    the names of those that are done again."""
    done = {row["name"] for row in summarise(directory).stages if row["status"] == "done"} - again
    begun = {stage_name(stage) for stage in stage_directories(directory)}
    refused = []
    for name in sorted(done & begun):
        prefix = f"{STAGES_KEY}.{name}."
        for key, (old, new) in changes.items():
            if key.startswith(prefix) and key.removeprefix(prefix) not in UNFELT_KEYS:
                refused.append(f"{key.removeprefix('recipe.')}: {old!r} -> {new!r}; stage {name} is done")
    return refused


def _require_checkpoint(directory: RunDirectory, step: int | None) -> None:
    """Raise UsageError if the run has no checkpoint of the step that `--from` names; does nothing if `step` is None."""
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
    from_stage: str | None = None,
) -> list[str]:
    """Write the changed spec into the run directory, with a copy of the old one as run.N.toml, and set the stages aside
    that are done again; returns notices for the user. For the parameters see `prepare_resume`.

    Raises UsageError for a change that is not allowed; the run directory is then left as it was.
    """
    before = load_run_spec(directory.run_toml)
    resolved = override(before, overrides, profile=profile)
    if profile is not None:  # on the same devices the run keeps the number that was decided at its start
        spec, settled = settle_parallel(resolved.spec)
        resolved = Resolved(spec, [*resolved.notices, *settled])
    changes = find_changes(comparable(before), comparable(resolved.spec))
    again = _stages_done_again(resolved.spec, from_stage)
    if refused := [*refused_changes(changes), *_changes_of_done_stages(directory, changes, again)]:
        raise UsageError(
            "resume cannot change what the run has already learned from:\n  " + "\n  ".join(refused),
            fix="start a new run with: tunedeck train",
        )
    refuse_unsupported(resolved.spec)
    require_trackers(resolved.spec.recipe)
    longer = makes_longer(changes)
    if not longer and not enables_stage(changes) and from_step is None and from_stage is None:
        _refuse_if_done(directory)
    spec, notices = _with_limits(directory, resolved.spec, limits)
    set_stages_aside(directory, again)
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
    """Return `spec` with the [limits] table of the last start, updated by `limits`, and notices for the user. Raises
    UsageError if the devices do not match the profile's kind or number of devices."""
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
