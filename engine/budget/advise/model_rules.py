"""The gate before a run folder: refuses what files and the model's config already show to be wrong, also patterns that
match nothing in the model. Every way to a run asks here and says the same: `recipes check`, `plan`, `advise`, `train`,
`queue add`, `launch`, `resume`, the console.

Names of parameters are those of `engine.architecture.parameters`; the engine checks again on the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from engine.architecture.classes import refuse_class, refuse_images
from engine.architecture.facts import Architecture
from engine.architecture.families import refuse_family, refuse_own_code
from engine.architecture.lookup import ModelFacts, continues_adapter, find_facts
from engine.architecture.model_folder import refuse_files, weight_folder
from engine.architecture.parameters import (
    adaptable_names,
    globs_of_parts,
    in_vision_encoder,
    parameter_names,
)
from engine.architecture.positions import refuse_long_sequences
from engine.architecture.stored_names import note_on_surplus, refuse_other_model
from engine.architecture.support import refuse_sequence_parallel, refuse_unsafe_packing
from engine.budget.advise.continued_adapter import refuse_continued, settle_continued
from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.staged_plan import RunFacts, find_run_facts, planning_spec, planning_specs
from engine.budget.trace.memory_config import memory_config_of, patterns_of
from engine.budget.trace.trainable import learning_names, trained_parameters
from engine.config.check.data_rules import image_key
from engine.config.check.notes import refuse_unsupported
from engine.config.check.preference_rules import CONTINUED, no_adapter_to_switch_off
from engine.config.name_patterns import (
    compile_patterns,
    layer_of,
    matches,
    matches_end,
    no_match,
    nothing_learns,
    require_layers,
    require_trained_matches,
)
from engine.config.parameter_groups import assign_groups
from engine.config.schema.recipe import Method, Recipe
from engine.config.schema.run import Device, Limits, Profile, RunSpec
from engine.config.stages import enabled_stages, stage_recipe, weights_chain
from engine.config.sweep import refuse_sweep, sweep_points
from engine.errors import ConfigNotHereError, DataError, SpecError, TunedeckError, UnknownArchitectureError


class Admitted(NamedTuple):
    """A run that the gate lets through."""

    spec: RunSpec
    """The run spec, with "auto" in [parallel] decided."""
    facts: RunFacts
    notices: list[str]
    """What the user is told of the decisions."""


def admit(spec: RunSpec) -> Admitted:
    """Find the facts of a run's models, decide what is "auto" in [parallel], and ask the gate. Raises the first of
    `refusals`, or UsageError where `parallel.sequence` cannot be decided."""
    facts = find_run_facts(spec)
    settled, notices = settle_parallel(spec, facts)
    for error in refusals(settled, facts):
        raise error
    continued, more = settle_continued(settled, facts)
    return Admitted(continued, facts, [*notices, *more])


def refusals(spec: RunSpec, facts: RunFacts) -> Iterator[TunedeckError]:
    """Yield an error for everything that the engine would refuse of one run, also of each of its stages, as far as its
    spec and its models' configs tell. A model whose config is not on this machine is checked by the engine."""
    checks: list[Callable[[], None]] = [partial(refuse_sweep, spec), partial(refuse_unsupported, spec)]
    for part in planning_specs(spec):
        of_model = facts.of(part.recipe.model)
        checks += [
            partial(refuse_unsafe, part, of_model),
            partial(_refuse_untrusted_code, part, of_model),
            partial(refuse_files, part, of_model.config),
            partial(_refuse_other_weights, part, of_model),
        ]
    checks += [partial(_refuse_reference, spec), partial(refuse_continued, spec, facts)]
    for _, stage in enabled_stages(spec.recipe):
        if stage.kind == "assemble":
            checks.append(partial(_refuse_unusable, facts.of(planning_spec(spec, stage).recipe.model)))
    said = set()
    for check in checks:
        try:
            check()
        except TunedeckError as error:
            if error.render() not in said:
                said.add(error.render())
                yield error


def refuse_model(spec: RunSpec) -> None:
    """Raise UsageError for a model that can be neither scored nor talked to, as far as its files and config tell."""
    facts = find_facts(spec.recipe.model)
    _refuse_unusable(facts)
    _refuse_untrusted_code(spec, facts)
    refuse_files(spec, facts.config)
    if facts.config is not None:
        refuse_class(facts.config, spec.recipe.model.id)


def refuse_unsafe(spec: RunSpec, facts: ModelFacts, *, has_images: bool | None = None) -> None:
    """Check a run without stages against its model's config; does nothing where there is none on this machine.

    `has_images`: whether any sample to train on has an image; None: not known yet, the recipe's keys tell.

    Raises UsageError or DataError for a run that would compute wrong results or train nothing.
    """
    recipe = spec.recipe
    if facts.config is not None:
        refuse_sequence_parallel(facts.config, spec)
        refuse_family(facts.config, recipe)
        refuse_class(facts.config, recipe.model.id)
        refuse_images(facts.config, recipe)
        refuse_long_sequences(facts.config, _with_earlier_scaling(recipe, facts))
        refuse_unsafe_packing(facts.config, recipe)
    _refuse_unusable(facts)
    if facts.architecture is not None:  # else the engine checks the names when it has loaded the model
        refuse_patterns(facts.architecture, recipe, has_images=has_images)
        if recipe.train.groups:
            names = trained_parameters(facts.architecture, memory_config_of(facts.architecture, spec))
            assign_groups(recipe.train.groups, names)


def _refuse_reference(spec: RunSpec) -> None:
    """Raise UsageError where preferences are compared with a model without its adapter, and that is not the model which
    the run or stage starts from."""
    found = spec.recipe
    asked = (
        [(found, [], "")]
        if not found.stages
        else [
            (stage_recipe(found, stage), list(weights_chain(found, stage))[1:2], stage.name)
            for _, stage in enabled_stages(found)
            if stage.kind == "train"
        ]
    )
    for recipe, before, name in asked:
        if not recipe.learns_preferences or recipe.preference.reference != "adapter_off":
            continue
        continued = [stage_recipe(found, stage).method.kind == "lora" for stage in before if stage.kind == "train"]
        if any(continued) if before else continues_adapter(recipe.model):
            raise no_adapter_to_switch_off(CONTINUED, name)


def _refuse_unusable(facts: ModelFacts) -> None:
    """Raise the error of a model that no run can use, such as a folder that does not exist."""
    if facts.reason is not None and not isinstance(facts.reason, (ConfigNotHereError, UnknownArchitectureError)):
        raise facts.reason


def _refuse_other_weights(spec: RunSpec, facts: ModelFacts) -> None:
    """Raise UsageError if the files of the model belong to another one than its config describes, as far as headers
    show."""
    files = weight_folder(spec.recipe.model)
    if files is not None and facts.config is not None and facts.architecture is not None:
        refuse_other_model(facts.architecture, facts.config, files)


def _with_earlier_scaling(recipe: Recipe, facts: ModelFacts) -> Recipe:
    """The recipe with the rotary scaling of the run that it starts from, unless it has its own."""
    if recipe.model.rope_scaling is not None or facts.scaling is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"rope_scaling": facts.scaling})})


def _refuse_untrusted_code(spec: RunSpec, facts: ModelFacts) -> None:
    """Raise UsageError if the model needs code that comes with it, and the command line does not allow it."""
    if facts.config is not None:
        refuse_own_code(facts.config, spec.recipe.model.id, trusted=spec.limits.trust_remote_code)


ANY_PROFILE = Profile(schema=1, name="any", device=Device(kind="cuda", memory_gib=1.0))
"""Hardware for a check of a recipe that names no profile: no rule speaks against it."""


def problems_of_run(spec: RunSpec) -> list[str]:
    """Why a run, or each point of a sweep, cannot be started, a line for each reason: what is wrong, and the fix. A
    model's own code is none: whether it may run is decided by the command line (`notes_on_code`)."""
    found: list[TunedeckError] = []
    trusting = spec.model_copy(update={"limits": Limits(trust_remote_code=True)})
    for point in sweep_points(trusting, force=True) if spec.recipe.sweep else [trusting]:
        facts = find_run_facts(point)
        try:
            found += refusals(settle_parallel(point, facts).spec, facts)
        except TunedeckError as error:
            found.append(error)
    return list(dict.fromkeys(line for error in found for line in _lines_of(error)))


def _lines_of(error: TunedeckError) -> list[str]:
    whats = error.problems if isinstance(error, SpecError) else [error.found]
    return ["; ".join(text for text in (what, error.fix) if text) for what in whats]


def notes_on_code(spec: RunSpec) -> list[str]:
    """What --trust-remote-code has to allow before the run can start, a line for each model."""
    facts = find_run_facts(spec)
    found: list[str] = []
    for part in planning_specs(spec):
        try:
            _refuse_untrusted_code(part, facts.of(part.recipe.model))
        except TunedeckError as error:
            found += _lines_of(error)
    return list(dict.fromkeys(found))


def notes_on_weights(spec: RunSpec) -> list[str]:
    """What the files of the run's models hold that is not trained, a line for each model."""
    facts = find_run_facts(spec)
    models = [part.recipe.model for part in planning_specs(spec)]
    found = [note_on_surplus(facts.of(each).config or {}, weight_folder(each)) for each in models]
    return list(dict.fromkeys(note for note in found if note))


def refuse_patterns(arch: Architecture, recipe: Recipe, *, has_images: bool | None = None) -> None:
    """Check the patterns of [method]. `has_images`: whether any sample has an image; None: the recipe's keys tell.

    UsageError: a pattern matches no name, or freezes too much. DataError: only a vision encoder would be trained, and
    there are no images.
    """
    learning = _full_names(arch, recipe.method) if recipe.method.kind == "full" else _lora_names(arch, recipe.method)
    if has_images is None:
        has_images = image_key(recipe) is not None
    if not has_images and learning and all(map(in_vision_encoder, learning)):
        raise DataError(
            "no trainable parameter receives a gradient from these samples: only the vision encoder is "
            "trained, but there are no images",
            expected="samples with images, or trainable weights in the language model",
            fix='set method.train_only, or method.targets, to names outside "model.visual" and its like',
        )
    if recipe.method.freeze:
        _refuse_frozen(arch, recipe)


def _refuse_frozen(arch: Architecture, recipe: Recipe) -> None:
    """Raise UsageError if nothing is left to train, or a pattern of train_only or also_train names only what is
    frozen."""
    if not learning_names(arch, patterns_of(arch, recipe)):
        raise nothing_learns()
    if not continues_adapter(recipe.model):  # an adapter brings modules that may be frozen
        method, names, frozen = recipe.method, parameter_names(arch), _frozen(arch, recipe.method)
        require_trained_matches(method.train_only, names, frozen, "method.train_only")
        require_trained_matches(method.also_train, names, frozen, "method.also_train")


def _full_names(arch: Architecture, method: Method) -> list[str]:
    """Parameters trained by `train_only` and `freeze`. Raises UsageError for a pattern without a match."""
    names = parameter_names(arch)
    frozen = _frozen(arch, method)
    chosen = _matched(method.train_only, names, "method.train_only", matches) if method.train_only else names
    return [name for name in chosen if name not in frozen]


def _frozen(arch: Architecture, method: Method) -> set[str]:
    """The parameters that `freeze` matches. Raises UsageError for a pattern without a match."""
    for pattern in method.freeze:
        _matched(globs_of_parts([pattern], arch)[:1], parameter_names(arch), "method.freeze", matches)
    test = compile_patterns(globs_of_parts(method.freeze, arch)).matches
    return {name for name in parameter_names(arch) if test(name)} if method.freeze else set()


def _lora_names(arch: Architecture, method: Method) -> list[str]:
    """Modules that get adapters, then parameters that `also_train` trains, without what `freeze` matches. Empty if
    method.targets is "all-linear" or "attention": such adapters are in the language model. Raises UsageError for a
    pattern without a match."""
    targets = method.targets if isinstance(method.targets, list) else []
    adapted = _matched(targets, adaptable_names(arch), "method.targets", matches_end)
    excluded = set(_matched(method.exclude, adapted or adaptable_names(arch), "method.exclude", matches_end))
    in_full = _matched(method.also_train, parameter_names(arch), "method.also_train", matches)
    require_layers(method.layers, adapted or adaptable_names(arch))
    adapted = [name for name in adapted if not method.layers or layer_of(name) in method.layers]
    frozen = _frozen(arch, method)
    frozen |= {name.removesuffix(".weight") for name in frozen}
    return [name for name in (*adapted, *in_full) if name not in excluded | frozen] if targets else []


def _matched(patterns: Sequence[str], names: Sequence[str], key: str, test: Callable[[str, str], bool]) -> list[str]:
    """Names that any pattern matches by `test(pattern, name)`. UsageError: a pattern of `key` without a match."""
    chosen: list[str] = []
    for pattern in patterns:
        hits = [name for name in names if test(pattern, name)]
        if not hits:
            raise no_match(pattern, names, key)
        chosen += hits
    return chosen
