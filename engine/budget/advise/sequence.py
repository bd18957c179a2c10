"""Decides `parallel.sequence = "auto"`: the fewest devices that must share a sequence so that the longest one fits.

Devices that share a sequence exchange data in every layer, so fewer are faster. Only numbers of devices that the recipe
and the model's number of attention heads allow are considered.

Try: `tunedeck plan -p demo-2 -r demo --set parallel.sequence=auto`
"""

from __future__ import annotations

from typing import NamedTuple

from engine.budget.advise.staged_plan import planning_spec
from engine.budget.architecture.lookup import find_architecture, find_config
from engine.budget.architecture.sequence_parallel_support import refuse_sequence_parallel
from engine.budget.predict.prediction import Predictor
from engine.errors import ConfigNotHereError, UnknownArchitectureError, UsageError
from engine.spec.check.parallel import device_count
from engine.spec.files.known_lengths import known_longest
from engine.spec.schema.run import RunSpec
from engine.spec.stages import enabled_stages


class Settled(NamedTuple):
    """A run spec whose `profile.parallel.sequence` is decided, and notices for the user."""

    spec: RunSpec
    notices: list[str]


def settle_sequence(spec: RunSpec) -> Settled:
    """Decide `parallel.sequence` where the recipe says "auto"; any other run spec is returned unchanged.

    If the longest sequence does not fit with any number of devices, the largest possible number is chosen and a notice
    says so. Raises UsageError where memory cannot be predicted.
    """
    devices = device_count(spec.profile)
    if spec.recipe.parallel.sequence != "auto" or devices == 1:
        return Settled(spec, [])
    try:
        sizes = [size for size in range(1, devices + 1) if devices % size == 0 and _is_possible(spec, size)]
        fitting = next((size for size in sizes if _longest_fits(with_sequence(spec, size))), None)
    except (ConfigNotHereError, UnknownArchitectureError) as error:
        raise UsageError(
            f'parallel.sequence = "auto" is decided by the memory plan, and there is none: {error.found}',
            expected=f"a number of devices that share a sequence, a divisor of {devices}",
            fix=error.fix or f"--set parallel.sequence={devices}",
        ) from error
    chosen = with_sequence(spec, fitting or sizes[-1])
    line = f'sequence = {chosen.profile.parallel.sequence} (recipe: "auto")'
    return Settled(recorded(chosen, "sequence", line), [_notice(chosen, fits=fitting is not None)])


def with_sequence(spec: RunSpec, size: int) -> RunSpec:
    """The run spec with `size` devices per sequence (`profile.parallel.sequence`)."""
    parallel = spec.profile.parallel.model_copy(update={"sequence": size})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"parallel": parallel})})


def _parts(spec: RunSpec) -> list[RunSpec]:
    """The run specs to plan: the spec itself, or one for each enabled training stage, with the model that
    `planning_spec` gives it."""
    if not spec.recipe.stages:
        return [spec]
    return [planning_spec(spec, stage) for _, stage in enabled_stages(spec.recipe) if stage.kind == "train"]


def _is_possible(spec: RunSpec, size: int) -> bool:
    """Whether the model and the recipe allow that `size` devices share each sequence."""
    try:
        for part in _parts(with_sequence(spec, size)):
            refuse_sequence_parallel(find_config(part.recipe.model.id, part.recipe.model.revision), part)
    except UsageError:
        return False
    return True


def _longest_fits(spec: RunSpec) -> bool:
    """Whether a micro-batch of one sequence of the longest length fits, in every stage."""
    return all(
        Predictor(find_architecture(part), part).fits(1, known_longest(part.recipe) or part.recipe.data.max_length)
        for part in _parts(spec)
    )


def recorded(spec: RunSpec, key: str, line: str) -> RunSpec:
    """A copy of the run spec in which `provenance.parallel` has the entry `line` about the decision of `key`, instead
    of an earlier entry about that key. `line` must be without commas, which separate the entries."""
    lines = {part.partition(" =")[0]: part for part in spec.provenance.parallel.split(", ") if part} | {key: line}
    provenance = spec.provenance.model_copy(update={"parallel": ", ".join(lines.values())})
    return spec.model_copy(update={"provenance": provenance})


def _notice(spec: RunSpec, *, fits: bool) -> str:
    size = spec.profile.parallel.sequence
    if not fits:
        return f'parallel.sequence = "auto": {size}, the most that is possible, and the longest sequence does not fit'
    shared = f"{size} devices share a sequence" if size > 1 else "each device has whole sequences"
    return f'parallel.sequence = "auto": {shared}; the longest sequence fits'
