"""The rules, in the order in which their problems are reported. `engine.checks.run` runs them.

Rules of a recipe or a profile alone are in `engine.config.check`, which reports them at their lines when a file is
read; rules of a recipe with its model are in `engine.budget.advise.model_rules`: the search for advice asks them, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from engine.architecture.families import refuse_own_code
from engine.architecture.lookup import continues_adapter
from engine.architecture.model_folder import refuse_files, refuse_no_weights
from engine.budget.advise.continued_adapter import refuse_continued
from engine.budget.advise.model_rules import MODEL_RULES, ModelRule, refuse_other_weights, refuse_unusable
from engine.budget.advise.preflight import (
    free_bytes,
    notes_on_kernels,
    notes_on_model,
    notes_on_serving,
    warnings_of,
)
from engine.budget.advise.row_notes import notes_on_rows
from engine.budget.advise.staged_plan import planning_spec
from engine.budget.predict.shards import require_shards
from engine.checks.machine import require_device, require_hub, require_trackers, require_training_packages
from engine.checks.rule import Level, Need, Rule, Subject, Test
from engine.config.check.hardware_rules import PROFILE_RULES, require_launcher, require_matching_devices
from engine.config.check.notes import notes_of, refuse_unsupported
from engine.config.check.preference_rules import CONTINUED, no_adapter_to_switch_off
from engine.config.check.rules import RECIPE_RULES
from engine.config.files.caches import offline_variable
from engine.config.files.data_files import fixed_prompts, missing_data_files
from engine.config.files.document import Problem, key_text
from engine.config.files.find import RUN_PREFIX, split_run_reference
from engine.config.schema.run import RunSpec
from engine.config.stages import enabled_stages, stage_recipe, weights_chain
from engine.config.sweep import refuse_sweep
from engine.errors import SpecError, TunedeckError, UsageError
from engine.journal.index import resolve_run

RUN_KEYS = ("id", "tokenizer", "adapter")
"""Keys of [model] that may be "run:RUN"."""


def _of_spec(test: Callable[[RunSpec], None]) -> Test:
    return lambda subject: test(subject.spec)


def _of_model_rule(rule: ModelRule) -> Rule:
    needs: frozenset[Need] = frozenset({"config"} if rule.of_model else {"recipe", "config"})
    return Rule(
        rule.keys, needs, "error", lambda subject: rule.test(subject.spec, subject.model, subject.known.has_images)
    )


def _of_file_rule(table: str, test: Callable[[Any], Iterable[Problem]]) -> Rule:
    """A rule of a recipe or a profile alone. When their files are read it is reported at its line; here it holds for a
    run spec that was made otherwise."""

    def on_run(subject: Subject) -> Iterator[tuple[str, TunedeckError]]:
        checked = getattr(subject.spec, table)
        for problem in test(checked):
            key = key_text(problem.place, checked.model_dump(by_alias=True))
            yield key, SpecError([f"{key}: {problem.found}; {problem.allowed}"])

    return Rule((), frozenset({"recipe"}), "error", on_run, of_run=True)


def _raise_undecided(subject: Subject) -> None:
    """`parallel.sequence = "auto"` that no plan decides."""
    if subject.known.undecided is not None:
        raise subject.known.undecided


def _raise_unfetched(subject: Subject) -> None:
    """The hub answered and refused the model's config."""
    if subject.known.unfetched is not None:
        raise subject.known.unfetched


def _refuse_missing_runs(subject: Subject) -> None:
    for key in RUN_KEYS:
        text = getattr(subject.spec.recipe.model, key)
        if text is not None and text.startswith(RUN_PREFIX):
            resolve_run(split_run_reference(text)[0], None)


def _refuse_missing_folder(subject: Subject, key: str) -> None:
    """The folder of an adapter or a tokenizer; that of a model is looked for with its config."""
    text = getattr(subject.spec.recipe.model, key) or ""
    if os.path.isabs(text) and not os.path.isdir(text):
        raise UsageError(f"the {key} folder {text} does not exist", fix=f"check model.{key}")


def _refuse_missing_template(subject: Subject) -> None:
    text = subject.spec.recipe.model.chat_template or ""
    if os.path.isabs(text) and not os.path.isfile(text):
        raise UsageError(f"the chat template {text} does not exist", fix="check model.chat_template")


def _refuse_reference(subject: Subject) -> None:
    """Preferences are compared with a model without its adapter, and that is not the model which the run or stage
    starts from."""
    found = subject.spec.recipe
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


def _refuse_unusable_experts(subject: Subject) -> None:
    """A mixture that cannot be assembled, because of the model that its experts are of."""
    for _, stage in enabled_stages(subject.spec.recipe):
        if stage.kind == "assemble":
            refuse_unusable(subject.known.facts.of(planning_spec(subject.spec, stage).recipe.model))


def _refuse_own_code(subject: Subject) -> None:
    """The model needs code that comes with it, and the command line does not allow it."""
    if subject.model.config is not None:
        trusted = subject.spec.limits.trust_remote_code
        refuse_own_code(subject.model.config, subject.spec.recipe.model.id, trusted=trusted)


def _refuse_old_torch(subject: Subject) -> None:
    if subject.spec.profile.parallel.strategy == "sharded":
        require_shards()


def _missing_files(subject: Subject, *, trees: bool) -> Iterator[tuple[str, TunedeckError]]:
    data = subject.spec.recipe.data
    yield from missing_data_files("data.sources", data.sources, trees=trees)
    yield from missing_data_files("data.validation", data.validation, trees=trees)


def _refuse_missing_prompts(subject: Subject) -> None:
    fixed_prompts(subject.spec.recipe.eval)


def _missing_evaluation_files(subject: Subject) -> Iterator[tuple[str, TunedeckError]]:
    """They are read when the run is over."""
    yield from missing_data_files("evaluate.sources", subject.spec.recipe.evaluate.sources, trees=False)


def _refuse_offline(subject: Subject) -> None:
    """A variable forbids requests to the hub, and the run needs some."""
    if offline_variable() is not None:
        require_hub([subject.spec])


def _refuse_without_hub(subject: Subject) -> None:
    if offline_variable() is None:
        require_hub([subject.spec], answers=subject.known.hub_answers)


def _memory_warnings(subject: Subject) -> list[str]:
    """Return none where the memory is simulated: the formulas do not know the model."""
    if subject.model.architecture is None:
        return []
    folder = subject.known.runs_folder
    return warnings_of(subject.model, subject.spec, free_disk_bytes=None if folder is None else free_bytes(folder))


def _notes(keys: str, needs: tuple[Need, ...], texts: Callable[[Subject], list[str]], *, of_run: bool = False) -> Rule:
    """A rule whose warnings are sentences."""

    def test(subject: Subject) -> Iterator[tuple[str, TunedeckError]]:
        for text in texts(subject):
            yield keys.split()[0], TunedeckError(text)

    return _rule(keys, needs, "warning", test, of_run=of_run)


def _rule(keys: str, needs: tuple[Need, ...], level: Level, test: Test, *, of_run: bool = False) -> Rule:
    return Rule(tuple(keys.split()), frozenset(needs), level, test, of_run)


DATA = "data.sources data.validation"

RULES: tuple[Rule, ...] = (
    *(_of_file_rule("profile", test) for test in PROFILE_RULES),
    *(_of_file_rule("recipe", test) for test in RECIPE_RULES),
    _rule("sweep", ("recipe",), "error", _of_spec(refuse_sweep), of_run=True),
    _rule("train.compile parallel.strategy model.quantize train.optimizer model.add_tokens method.dropout",
          ("recipe",), "error", _of_spec(refuse_unsupported), of_run=True),
    _rule("--devices device.count device.kind", ("recipe", "machine"), "error", _of_spec(require_matching_devices),
          of_run=True),
    _rule("parallel.sequence", ("recipe", "config"), "error", _raise_undecided, of_run=True),
    _rule("model.id model.revision", ("config",), "error", _raise_unfetched, of_run=True),
    *map(_of_model_rule, MODEL_RULES),
    _rule("model.id model.tokenizer model.init", ("config", "files"), "error",
          lambda subject: refuse_files(subject.spec, subject.model.config)),
    _rule("model.id", ("config", "files"), "error", lambda subject: refuse_other_weights(subject.spec, subject.model)),
    _rule("model.id model.tokenizer model.adapter", ("recipe", "weights"), "error", _refuse_missing_runs),
    _rule("model.adapter", ("recipe", "weights"), "error", partial(_refuse_missing_folder, key="adapter")),
    _rule("model.tokenizer", ("recipe", "files"), "error", partial(_refuse_missing_folder, key="tokenizer")),
    _rule("model.chat_template", ("recipe", "files"), "error", _refuse_missing_template),
    _rule("preference.reference", ("recipe", "files"), "error", _refuse_reference, of_run=True),
    _rule("model.adapter method.rank method.alpha method.dropout method.targets method.exclude method.dora "
          "method.rslora", ("recipe", "config", "files"), "error",
          lambda subject: refuse_continued(subject.spec, subject.known.facts), of_run=True),
    _rule("stages model.id", ("recipe", "config"), "error", _refuse_unusable_experts, of_run=True),
    _rule("model.id", ("config",), "permission", _refuse_own_code),
    _rule(DATA, ("recipe", "files"), "later", partial(_missing_files, trees=False)),
    _rule(DATA, ("recipe", "trees"), "later", partial(_missing_files, trees=True)),
    _rule("eval.prompts", ("recipe", "files"), "later", _refuse_missing_prompts),
    _rule("nodes.count", ("processes",), "start", _of_spec(require_launcher), of_run=True),
    _rule("profile", ("processes",), "start", lambda _: require_training_packages(), of_run=True),
    _rule("parallel.strategy", ("recipe", "machine"), "start", _refuse_old_torch, of_run=True),
    _rule("trackers.use", ("recipe", "machine"), "start", lambda subject: require_trackers(subject.spec.recipe),
          of_run=True),
    _rule("model.id", ("recipe", "weights"), "start", lambda subject: refuse_no_weights(subject.spec.recipe.model)),
    _rule("device.kind device.count", ("recipe", "devices"), "later", _of_spec(require_device), of_run=True),
    _rule("model.id model.tokenizer model.adapter data.sources", ("recipe", "weights"), "start", _refuse_offline,
          of_run=True),
    _rule("model.id model.tokenizer model.adapter data.sources", ("recipe", "hub"), "start", _refuse_without_hub,
          of_run=True),
    _rule("evaluate.sources", ("recipe", "files"), "warning", _missing_evaluation_files),
    _notes("train.warmup_steps moe.aux_loss_weight trackers.project trackers.tags method.rank method.alpha",
           ("recipe",), lambda subject: notes_of(subject.spec.recipe), of_run=True),
    _notes("model.id method.targets", ("recipe", "config"),
           lambda subject: notes_on_model(subject.spec.recipe, subject.model)),
    _notes("data.sources", ("recipe", "plan"), lambda subject: notes_on_rows(subject.spec.recipe)),
    _notes("method.dora method.also_train method.targets method.rank model.rope_scaling", ("recipe", "plan"),
           lambda subject: notes_on_serving(subject.spec.recipe)),
    _notes("model.kernels", ("recipe", "plan"), lambda subject: notes_on_kernels(subject.spec)),
    _notes("model.quantize data.image_max_pixels train.activation_offload train.optimizer_offload train.rounding "
           "train.state_dtype train.mlp_tiles model.attention_dropout eval.samples parallel.strategy checkpoint.keep",
           ("recipe", "config", "plan"), _memory_warnings),
)  # fmt: skip
