"""Prepares a run to be resumed: the checks of its folder and of the changed spec, and its writing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.preflight import warnings_of
from engine.budget.advise.staged_plan import RunFacts, find_run_facts
from engine.checks.rule import Known
from engine.checks.run import RESUME, CheckedRun, Command, run_checks
from engine.config.check.hardware_rules import require_matching_devices
from engine.config.load import Resolved, dump_run_spec, load_run_spec, override
from engine.config.schema.run import RunSpec
from engine.config.stages import dependants
from engine.errors import EnvironmentProblem, UsageError
from engine.journal.checkpoints_on_disk import find_checkpoints, removed_checkpoints
from engine.journal.directory import RunDirectory, rewrite_spec
from engine.journal.events import EventTail
from engine.journal.files import write_atomically
from engine.journal.index import record_start
from engine.journal.liveness import refuse_if_claimed
from engine.journal.stages import stage_directories, stage_name, typed_name
from engine.journal.summary import summarise
from engine.launch.changed_keys import (
    STAGES_KEY,
    UNFELT_KEYS,
    Changes,
    comparable,
    enables_stage,
    find_changes,
    makes_longer,
    notes_on_start,
    notices_of,
    refused_changes,
    unreached_limit,
)
from engine.launch.create_run import drop_untrusted_limits
from engine.launch.destinations import allow_typed, notes_on_destinations


def prepare_resume(
    directory: RunDirectory,
    overrides: Sequence[str],
    limits: dict[str, Any],
    *,
    profile: str | None = None,
    from_step: int | None = None,
    from_stage: str | None = None,
    command: Command = RESUME,
) -> list[str]:
    """Check the requested changes and write the new spec into the run directory; returns notices for the user.

    `overrides` are KEY=VALUE; `limits` has the names of the [limits] table that this command line sets, all others stay
    as they were at the last start. `from_stage` is done again from its start, with all stages that start from it.

    Raises:
        UsageError: `from_step` has no checkpoint, the run's checkpoints are not there, `from_stage` is no stage of the
            run, a change is not allowed, or a finished run would not get longer.
        EnvironmentProblem: an engine works on the run, or the package of a tracker is not installed.
    """
    refuse_if_claimed(directory)
    _refuse_file_for_folder(directory)
    _refuse_other_runs_option(directory, from_step, from_stage)
    refuse_stage(directory)
    _require_checkpoint(directory, from_step)
    _refuse_lost_checkpoints(directory, from_stage)
    notices = change_spec(
        directory, overrides, limits, profile=profile, from_step=from_step, from_stage=from_stage, command=command
    )
    warning = record_start(directory)
    return [*notices, *([warning] if warning else [])]


def _refuse_file_for_folder(directory: RunDirectory) -> None:
    """Raise EnvironmentProblem if something else stands where the engine keeps its folders."""
    for folder in (directory.checkpoints, directory.control):
        if folder.exists() and not folder.is_dir():
            raise EnvironmentProblem(
                f"{folder} is a file", expected="a folder for the engine's files", fix=f"move it away: {folder}"
            )


def _refuse_other_runs_option(directory: RunDirectory, from_step: int | None, from_stage: str | None) -> None:
    """Raise UsageError for --from on a staged run, and for --from-stage on any other."""
    stages = [stage.name for stage in load_run_spec(directory.run_toml).recipe.stages]
    if stages and from_step is not None:
        raise UsageError(
            "--from is a step of a stage, but this run has several stages",
            fix=f"repeat a stage from its start: tunedeck resume {directory.name} --from-stage {stages[-1]}",
        )
    if from_stage is not None and from_stage not in stages:
        raise UsageError(
            f"{directory.name} has no stage {from_stage!r}",
            expected=f"one of: {', '.join(stages)}" if stages else "a run of several stages",
            fix="leave out --from-stage to continue where the run stopped",
        )


def refuse_stage(directory: RunDirectory) -> None:
    """Raise UsageError for a stage, which goes on with its run alone."""
    run, _, name = typed_name(directory).partition("/")
    if not name:
        return
    removed = removed_checkpoints(directory.checkpoints)
    if removed is not None:
        again = f"repeat it from its start: tunedeck resume {run} --from-stage {name}"
        raise UsageError(removed.explain(name), expected="a run or stage that has checkpoints", fix=again)
    further = f"tunedeck resume {run}; a change of the stage is --set stages.{name}.KEY=VALUE"
    raise UsageError(f"{run}/{name} is a stage; only a run can be resumed", fix=further)


def _stages_done_again(spec: RunSpec, from_stage: str | None) -> set[str]:
    """`from_stage` and all stages that start from it. Raises UsageError if it is disabled."""
    if from_stage is None:
        return set()
    if not any(stage.name == from_stage and stage.enabled for stage in spec.recipe.stages):
        raise UsageError(
            f"stage {from_stage} is disabled, so it would not run",
            expected="an enabled stage for --from-stage",
            fix=f"--set stages.{from_stage}.enabled=true",
        )
    return {from_stage, *dependants(spec.recipe, from_stage)}


def set_stages_aside(directory: RunDirectory, names: set[str]) -> None:
    """Move directories of stages to `stages/.old-N/`. Raises EnvironmentProblem, and moves none, if an engine works on
    one."""
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
    """A line for each change that affects a stage which is done and not in `again`."""
    done = {row["name"] for row in summarise(directory).stages if row["status"] == "done"} - again
    begun = {stage_name(stage) for stage in stage_directories(directory)}
    refused = []
    for name in sorted(done & begun):
        prefix = f"{STAGES_KEY}.{name}."
        for key, (old, new) in changes.items():
            if key.startswith(prefix) and key.removeprefix(prefix) not in UNFELT_KEYS:
                refused.append(f"{key.removeprefix('recipe.')}: {old!r} -> {new!r}; stage {name} is done")
    return refused


def _as_options(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def _require_checkpoint(directory: RunDirectory, step: int | None) -> None:
    if step is None or directory.checkpoint(step).is_dir():
        return
    steps = sorted(checkpoint.step for checkpoint in find_checkpoints(directory.checkpoints))
    raise UsageError(
        f"{directory.name} has no checkpoint of step {step}",
        expected=f"--from {' or '.join(map(str, steps))}" if steps else "a run that has written a checkpoint",
        fix="leave out --from to continue from the newest checkpoint",
    )


def _refuse_lost_checkpoints(directory: RunDirectory, from_stage: str | None) -> None:
    """Raise UsageError for a run, or a stage of one without a result, that has written checkpoints of which none is in
    its folder, as in that of an imported run: it would start again, behind the steps that its journal has."""
    if from_stage is not None:
        return
    begun = stage_directories(directory)  # a staged run's journal repeats theirs
    without_result = [stage for stage in begun if not (stage.adapter.is_dir() or stage.model.is_dir())]
    for part in without_result if begun else [directory]:
        if find_checkpoints(part.checkpoints) or not _has_written_checkpoints(part):
            continue
        raise UsageError(
            f"{typed_name(part)} has written checkpoints, but {part.checkpoints} has none",
            expected="a run with its checkpoints; exported runs do not include them",
            fix=f"repeat the run: {shlex.join(['tunedeck', 'train', '--run-spec', str(directory.run_toml)])}",
        )


def _has_written_checkpoints(directory: RunDirectory) -> bool:
    return any(event["kind"] == "checkpoint_saved" for event in EventTail(directory.events).poll())


def change_spec(
    directory: RunDirectory,
    overrides: Sequence[str],
    limits: dict[str, Any],
    *,
    profile: str | None = None,
    from_step: int | None = None,
    from_stage: str | None = None,
    command: Command = RESUME,
) -> list[str]:
    """Write the changed spec, keep the old one as run.N.toml, and set the stages aside that are done again (see
    `prepare_resume`). Raises UsageError for a change that is not allowed; the directory is then left as it was."""
    before = load_run_spec(directory.run_toml)
    resolved = override(before, overrides, profile=profile)
    facts = find_run_facts(resolved.spec)
    if profile is not None:  # on the same devices the run keeps the number that was decided at its start
        spec, settled = settle_parallel(resolved.spec, facts)
        resolved = Resolved(spec, [*resolved.notices, *settled])
    changes = find_changes(comparable(before), comparable(resolved.spec))
    again = _stages_done_again(resolved.spec, from_stage)
    if refused := [*refused_changes(changes), *_changes_of_done_stages(directory, changes, again)]:
        raise UsageError(
            "resume cannot change settings that the trained steps depend on:\n  " + "\n  ".join(refused),
            fix=shlex.join(["tunedeck", "train", "--run-spec", str(directory.run_toml), *_as_options(overrides)]),
        )
    allow_typed(resolved.spec.recipe.finish, overrides)
    longer = makes_longer(changes)
    _refuse_unreached_limit(directory, changes, before, resolved.spec)
    if not longer and not enables_stage(changes) and from_step is None and from_stage is None:
        _refuse_if_done(directory)
    spec, notices = _with_limits(directory, resolved.spec, limits)
    notices += _checked(_without_done_stages(directory, spec, again), facts, command)
    set_stages_aside(directory, again)
    if changes:
        write_atomically(_next_backup(directory), directory.run_toml.read_text("utf-8"))
    if changes or spec.limits != load_run_spec(directory.run_toml, own=True).limits:
        rewrite_spec(directory, dump_run_spec(spec))
    notices += notes_on_destinations(spec.recipe.finish)
    notices += _new_warnings(before, spec, facts)
    notices += notes_on_start(changes, summarise(directory).step)
    return [*resolved.notices, *notices, *notices_of(changes), *([_schedule_notice(spec)] if longer else [])]


def _new_warnings(before: RunSpec, after: RunSpec, facts: RunFacts) -> list[str]:
    """Return the warnings of a plan that the change adds; none of a staged run, or where memory is not predicted."""
    if after.recipe.stages or facts.of(after.recipe.model).architecture is None:
        return []
    of_model = facts.of(after.recipe.model)
    earlier = warnings_of(of_model, before)
    return [text for text in warnings_of(of_model, after) if text not in earlier]


def _checked(spec: RunSpec, facts: RunFacts, command: Command) -> list[str]:
    """Raise what prevents the changed run, except of the model that its first stage started from: that may be gone,
    because a later stage starts from the weights of an earlier one. Returns what else was found."""
    gone = {of_model.reason.render() for of_model in facts.models.values() if of_model.reason is not None}
    findings = [found for found in run_checks(spec, Known(command.needs, facts)) if found.error.render() not in gone]
    return CheckedRun(spec, facts, [], findings, command).require().reported


def _without_done_stages(directory: RunDirectory, spec: RunSpec, again: set[str]) -> RunSpec:
    """The run spec in which stages that are done, and not done `again`, are disabled."""
    done = {row["name"] for row in summarise(directory).stages if row["status"] == "done"} - again
    stages = [
        stage.model_copy(update={"enabled": False}) if stage.name in done else stage for stage in spec.recipe.stages
    ]
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"stages": stages})})


def _refuse_unreached_limit(directory: RunDirectory, changes: Changes, before: RunSpec, after: RunSpec) -> None:
    """Raise UsageError if only one of epochs and max_steps was raised, and the other ends the run."""
    found = unreached_limit(changes, before.recipe.train, summarise(directory).max_steps)
    if found is None:
        return
    raised, ends = found
    mine, other = (getattr(after.recipe.train, key.partition(".")[2]) for key in found)
    value = "" if mine is None else f"{mine:g}"
    raise UsageError(
        f"{raised} = {value or 'no limit'} does not make {directory.name} longer: {ends} = {other:g} ends it",
        expected="a higher value of the limit that is reached first",
        fix=f"tunedeck resume {directory.name} --set {raised}={value} --set {ends}=",
    )


def _refuse_if_done(directory: RunDirectory) -> None:
    summary = summarise(directory)
    if summary.status == "done":
        raise UsageError(
            f"run {directory.name} is done at step {summary.step}",
            expected="an unfinished run, or a higher epochs or max_steps",
            fix=f"tunedeck resume {directory.name} {_more_of(directory, summary.step)}",
        )


def _more_of(directory: RunDirectory, step: int) -> str:
    """The option that makes a run longer which is done at `step`: twice what it had. Of several stages the last is
    done again, because none can go on."""
    recipe = load_run_spec(directory.run_toml).recipe
    if recipe.stages:
        return f"--from-stage {recipe.stages[-1].name}"
    steps, epochs = recipe.train.max_steps, recipe.train.epochs
    if steps is None or (epochs is not None and step < steps):
        return f"--set train.epochs={2 * (epochs or 1):g}"
    return f"--set train.max_steps={2 * steps}"


def _with_limits(directory: RunDirectory, spec: RunSpec, limits: dict[str, Any]) -> tuple[RunSpec, list[str]]:
    """`spec` with the [limits] of the last start, updated by `limits`, and notices. Raises UsageError if the devices do
    not match the profile."""
    notice = drop_untrusted_limits(directory)
    notices = [notice] if notice else []
    earlier = load_run_spec(directory.run_toml, own=True).limits
    if earlier.devices and "devices" not in limits:
        try:
            require_matching_devices(spec.model_copy(update={"limits": earlier}))
        except UsageError as error:
            notices.append(f"the devices of the last start are not used: {error.found}")
            earlier = earlier.model_copy(update={"devices": []})
    spec = spec.model_copy(update={"limits": earlier.model_copy(update=limits)})
    require_matching_devices(spec)
    return spec, notices


def _schedule_notice(spec: RunSpec) -> str:
    scheduler = spec.recipe.train.scheduler
    if scheduler == "constant":
        return "the run is extended; its learning rate is constant, so the schedule does not change"
    return f"the run is extended; the {scheduler} schedule is recomputed for the new number of steps"


def _next_backup(directory: RunDirectory) -> Path:
    """The first run.N.toml that does not exist yet."""
    backups = (directory.path / f"run.{number}.toml" for number in count(1))
    return next(path for path in backups if not path.exists())
