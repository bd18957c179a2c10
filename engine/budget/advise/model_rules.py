"""Rules of a recipe with its model: what the model's config shows to be wrong, also patterns that match nothing in the
model. `engine.checks` has them in its list; the search for advice asks them of each change that it tries.

Names of parameters are those of `engine.architecture.parameters`; the engine checks again on the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.architecture.classes import refuse_class, refuse_images
from engine.architecture.facts import Architecture
from engine.architecture.families import refuse_family
from engine.architecture.lookup import ModelFacts, continues_adapter
from engine.architecture.model_folder import weight_folder
from engine.architecture.parameters import adaptable_names, globs_of_parts, in_vision_encoder, parameter_names
from engine.architecture.positions import refuse_long_sequences
from engine.architecture.stored_names import refuse_other_model
from engine.architecture.support import refuse_sequence_parallel, refuse_unsafe_packing
from engine.budget.trace.memory_config import memory_config_of, patterns_of
from engine.budget.trace.trainable import learning_names, trained_parameters
from engine.config.check.data_rules import image_key
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
from engine.config.schema.run import RunSpec
from engine.errors import ConfigNotHereError, DataError, UnknownArchitectureError

ModelTest = Callable[[RunSpec, ModelFacts, bool | None], None]
"""Raises UsageError or DataError. The last argument: whether any sample has an image; None: the recipe's keys tell."""


class ModelRule(NamedTuple):
    """A rule of one run without stages."""

    keys: tuple[str, ...]
    test: ModelTest
    of_model: bool = False
    """Whether it is about the model alone."""


def _on_config(test: Callable[[Mapping[str, Any], RunSpec], None]) -> ModelTest:
    """A test that does nothing where no config is on this machine."""

    def on_facts(spec: RunSpec, facts: ModelFacts, _images: bool | None) -> None:
        if facts.config is not None:
            test(facts.config, spec)

    return on_facts


def _refuse_positions(spec: RunSpec, facts: ModelFacts, _images: bool | None) -> None:
    if facts.config is not None:
        refuse_long_sequences(facts.config, _with_earlier_scaling(spec.recipe, facts))


def refuse_unusable(facts: ModelFacts) -> None:
    """Raise the error of a model that no run can use, such as a folder that does not exist."""
    if facts.reason is not None and not isinstance(facts.reason, (ConfigNotHereError, UnknownArchitectureError)):
        raise facts.reason


def _refuse_patterns(spec: RunSpec, facts: ModelFacts, has_images: bool | None) -> None:
    if facts.architecture is not None:  # else the engine checks the names when it has loaded the model
        refuse_patterns(facts.architecture, spec.recipe, has_images=has_images)


def _refuse_groups(spec: RunSpec, facts: ModelFacts, _images: bool | None) -> None:
    if facts.architecture is not None and spec.recipe.train.groups:
        names = trained_parameters(facts.architecture, memory_config_of(facts.architecture, spec))
        assign_groups(spec.recipe.train.groups, names)


MODEL_RULES = (
    ModelRule(("parallel.sequence",), _on_config(refuse_sequence_parallel)),
    ModelRule(("model.id",), _on_config(lambda config, spec: refuse_family(config, spec.recipe))),
    ModelRule(
        ("model.id",), _on_config(lambda config, spec: refuse_class(config, spec.recipe.model.id)), of_model=True
    ),
    ModelRule(("model.id", "data.sources"), _on_config(lambda config, spec: refuse_images(config, spec.recipe))),
    ModelRule(("data.max_length", "model.rope_scaling"), _refuse_positions),
    ModelRule(("data.packing",), _on_config(lambda config, spec: refuse_unsafe_packing(config, spec.recipe))),
    ModelRule(("model.id",), lambda _spec, facts, _images: refuse_unusable(facts), of_model=True),
    ModelRule(
        ("method.targets", "method.exclude", "method.also_train", "method.train_only", "method.freeze"),
        _refuse_patterns,
    ),
    ModelRule(("train.groups",), _refuse_groups),
)


def refuse_with_model(spec: RunSpec, facts: ModelFacts) -> None:
    """Raise the error of the first of MODEL_RULES that a run without stages breaks."""
    for rule in MODEL_RULES:
        rule.test(spec, facts, None)


def refuse_other_weights(spec: RunSpec, facts: ModelFacts) -> None:
    """Raise UsageError if the files of the model belong to a different one than its config describes, as far as their
    headers show."""
    files = weight_folder(spec.recipe.model)
    if files is not None and facts.config is not None and facts.architecture is not None:
        refuse_other_model(facts.architecture, facts.config, files)


def _with_earlier_scaling(recipe: Recipe, facts: ModelFacts) -> Recipe:
    """The recipe with the rotary scaling of the run that it starts from, unless it has its own."""
    if recipe.model.rope_scaling is not None or facts.scaling is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"rope_scaling": facts.scaling})})


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
