"""Rules across the keys of a recipe; those of its data are in `engine.config.check.data_rules`. A table lists them all.

A rule takes a recipe whose fields are valid and yields problems; it reads no files and does not look at the machine.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from itertools import chain

from engine.config.check.data_rules import (
    detection_is_described,
    image_root_has_images,
    image_sizes_in_order,
    images_are_not_packed,
    mixing_has_sources,
    one_kind_of_validation,
    overlap_leaves_room,
    something_to_train_on,
    source_has_one_origin,
    sources_of,
    weights_are_of_training,
)
from engine.config.check.preference_rules import PREFERENCE_RULES
from engine.config.files.document import Place, Problem, Problems
from engine.config.files.find import (
    BUILTIN_PREFIX,
    CHECKPOINT_NAME,
    RUN_PREFIX,
    STAGE_PREFIX,
    split_run_reference,
)
from engine.config.files.text import closest_match, quoted
from engine.config.schema.preference import LEARNING_RATES
from engine.config.schema.recipe import Method, Recipe

BUILTIN_SOURCES = ("builtin:dates",)
BUILTIN_MODELS = ("builtin:tiny",)
BUILTIN_TOKENIZERS = ("builtin:bytes",)

WEBHOOK_TEXT = re.compile(r"https?://[^/\s]+(/\S*)?|\$[A-Za-z_][A-Za-z0-9_]*")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def has_validation(recipe: Recipe) -> bool:
    return recipe.data.valid_fraction > 0 or any(source.enabled for source in recipe.data.validation)


NEEDS_VALIDATION = "validation data is needed: data.valid_fraction above 0, or a [[data.validation]] that is enabled"


def builtins_exist(recipe: Recipe) -> Problems:
    named: list[tuple[Place, str | None, tuple[str, ...]]] = [
        (("model", "id"), recipe.model.id, BUILTIN_MODELS),
        (("model", "tokenizer"), recipe.model.tokenizer, BUILTIN_TOKENIZERS),
        *(((*place, "path"), source.path, BUILTIN_SOURCES) for place, source in sources_of(recipe)),
    ]
    for place, text, known in named:
        if text is not None and text.startswith(BUILTIN_PREFIX) and text not in known:
            meant = closest_match(text, known)
            allowed = f"{' or '.join(quoted(word) for word in known)} is allowed"
            yield Problem(
                place,
                f"{quoted(text)} is not a built-in name",
                f"{allowed}; did you mean {meant}?" if meant else allowed,
            )


def model_is_named(recipe: Recipe) -> Problems:
    if not recipe.model.id.strip():
        yield Problem(("model", "id"), "an empty name", 'a hub id, a folder, "builtin:tiny" or "run:RUN" is allowed')
    for key in ("id", "tokenizer", "adapter"):
        text = getattr(recipe.model, key) or ""
        run, which = split_run_reference(text)
        if text.startswith(RUN_PREFIX) and (not run or (which and not CHECKPOINT_NAME.fullmatch(which))):
            what = "run" if not run else f"checkpoint by {quoted(which)}"
            yield Problem(
                ("model", key), f"{quoted(text)} does not name a {what}", '"run:RUN", "run:RUN@STEP" or "run:RUN@best"'
            )


def revision_is_of_the_hub(recipe: Recipe) -> Problems:
    model = recipe.model
    is_here = model.id.startswith((BUILTIN_PREFIX, RUN_PREFIX, STAGE_PREFIX, "/", ".", "~")) or os.path.isdir(model.id)
    if model.revision is not None and is_here:
        yield Problem(
            ("model", "revision"),
            f"{quoted(model.revision)} with model.id = {quoted(model.id)}",
            "only a model on the hub has revisions: leave it out",
            (("model", "id"),),
        )


def random_weights_are_a_model(recipe: Recipe) -> Problems:
    if recipe.model.init == "random" and (recipe.model.id.startswith(RUN_PREFIX) or recipe.model.adapter is not None):
        culprit = "adapter" if recipe.model.adapter is not None else "id"
        yield Problem(
            ("model", "init"),
            f"random weights, but model.{culprit} has trained ones",
            'init = "pretrained" is needed to continue from them',
            (("model", culprit),),
        )


def original_positions_are_of_yarn(recipe: Recipe) -> Problems:
    scaling = recipe.model.rope_scaling
    if scaling is not None and scaling.type != "yarn" and scaling.original_max_position_embeddings is not None:
        yield Problem(
            ("model", "rope_scaling", "original_max_position_embeddings"),
            f"{scaling.original_max_position_embeddings} with type = {quoted(scaling.type)}",
            'type = "yarn" is needed; the others scale the positions in the model\'s config',
            (("model", "rope_scaling", "type"),),
        )


def names_are_unique(recipe: Recipe) -> Problems:
    seen: set[tuple[Place, str]] = set()
    named = chain(
        ((place, source.name) for place, source in sources_of(recipe)),
        ((("stages", index), stage.name) for index, stage in enumerate(recipe.stages)),
    )
    for place, name in named:
        if (place[:-1], name) in seen:
            yield Problem((*place, "name"), f"{quoted(name)} twice", "each name once: --set addresses entries by it")
        seen.add((place[:-1], name))


def one_warmup(recipe: Recipe) -> Problems:
    if recipe.train.warmup_ratio is not None and recipe.train.warmup_steps is not None:
        yield Problem(
            ("train", "warmup_ratio"),
            "both warmup_ratio and warmup_steps",
            "one of them is allowed",
            (("train", "warmup_steps"),),
        )


def _default_rate(recipe: Recipe) -> float:
    """The lowest default of the recipe, or of its stages that have no learning rate of their own."""
    own = {"learning_rate", "min_learning_rate"}
    inheriting = [stage for stage in recipe.stages if stage.kind == "train" and not own & stage.train.keys()]
    methods = [{**recipe.method.model_dump(), **stage.method} for stage in inheriting] or [recipe.method.model_dump()]
    return min(LEARNING_RATES.get((each["objective"], each["kind"]), math.inf) for each in methods)


def rate_falls(recipe: Recipe) -> Problems:
    low, high = recipe.train.min_learning_rate, recipe.train.learning_rate or _default_rate(recipe)
    if low > high:
        yield Problem(
            ("train", "min_learning_rate"),
            f"{low:g} above learning_rate = {high:g}",
            f"{high:g} or less is allowed",
            (("train", "learning_rate"),),
        )


def constant_has_no_minimum(recipe: Recipe) -> Problems:
    if recipe.train.scheduler == "constant" and recipe.train.min_learning_rate > 0:
        yield Problem(
            ("train", "min_learning_rate"),
            'a minimum with scheduler = "constant", which never decreases',
            '0, or scheduler = "cosine" or "linear"',
            (("train", "scheduler"),),
        )


def micro_batch_within_batch(recipe: Recipe) -> Problems:
    micro, most = recipe.train.micro_batch, recipe.sequences_per_step
    if micro != "auto" and micro > most:
        pairs = " pairs" if recipe.learns_pairs else ""
        yield Problem(
            ("train", "micro_batch"),
            f"micro_batch = {micro} is above batch_size = {recipe.train.batch_size}{pairs}",
            f'{most} or less, or "auto": batch_size is the effective batch size of a step',
            (("train", "batch_size"),),
        )


def restarts_restart(recipe: Recipe) -> Problems:
    if recipe.train.restarts > 1 and recipe.train.scheduler != "cosine_with_restarts":
        yield Problem(
            ("train", "restarts"),
            f"{recipe.train.restarts} with scheduler = {quoted(recipe.train.scheduler)}",
            'scheduler = "cosine_with_restarts" is needed',
            (("train", "scheduler"),),
        )


def schedule_has_its_keys(recipe: Recipe) -> Problems:
    train = recipe.train
    given = {
        "power": ("polynomial", train.power != 1.0, train.power),
        "decay_ratio": ("wsd", train.decay_ratio is not None, train.decay_ratio),
        "decay_shape": ("wsd", train.decay_shape is not None, train.decay_shape),
    }
    for key, (scheduler, is_set, value) in given.items():
        if is_set and train.scheduler != scheduler:
            yield Problem(
                ("train", key),
                f"{quoted(value)} with scheduler = {quoted(train.scheduler)}",
                f"scheduler = {quoted(scheduler)} is needed",
                (("train", "scheduler"),),
            )


def momentum_is_sgd(recipe: Recipe) -> Problems:
    if recipe.train.momentum > 0 and recipe.train.optimizer != "sgd":
        yield Problem(
            ("train", "momentum"),
            f"momentum with optimizer = {quoted(recipe.train.optimizer)}",
            'optimizer = "sgd" is needed; AdamW has train.betas',
            (("train", "optimizer"),),
        )


def state_has_a_dtype(recipe: Recipe) -> Problems:
    """adamw_8bit, adafactor, and sgd without momentum have no state to which train.state_dtype could apply."""
    train = recipe.train
    why = {
        "adamw_8bit": "whose state is stored in 8 bits",
        "adafactor": "whose state is two float32 vectors per matrix",
        "sgd": "which has no state without momentum",
    }
    has_state = train.optimizer == "adamw" or (train.optimizer == "sgd" and train.momentum > 0)
    if train.state_dtype == "bfloat16" and not has_state:
        yield Problem(
            ("train", "state_dtype"),
            f"bfloat16 with optimizer = {quoted(train.optimizer)}, {why[train.optimizer]}",
            'train.state_dtype = "float32", or optimizer = "adamw"',
            (("train", "optimizer"),),
        )


def groups_do_something(recipe: Recipe) -> Problems:
    for index, group in enumerate(recipe.train.groups):
        if group.learning_rate is None and group.weight_decay is None:
            yield Problem(
                ("train", "groups", index),
                f"{quoted(group.match)} does not set anything",
                "learning_rate or weight_decay is needed",
            )


def added_tokens_can_be_trained(recipe: Recipe) -> Problems:
    tokens, place = recipe.model.add_tokens, ("model", "add_tokens")
    if len(set(tokens)) < len(tokens) or any(not token or token != token.strip() for token in tokens):
        yield Problem(
            place, "a token that is empty, listed twice, or has spaces around it", "each token once, without spaces"
        )
    if tokens and recipe.model.quantize != "none":
        yield Problem(
            place,
            f"added tokens with quantize = {quoted(recipe.model.quantize)}",
            'quantize = "none" is needed: the embedding of a 4-bit base cannot grow',
            (("model", "quantize"),),
        )
    for index, stage in enumerate(recipe.stages):
        if tokens and stage.kind == "assemble":
            yield Problem(
                place,
                f"added tokens with the stage {stage.name}, which assembles a mixture of experts",
                "experts with the vocabulary of their base are needed",
                (("stages", index, "kind"),),
            )


def fields_of_the_method(recipe: Recipe) -> Problems:
    method, other = recipe.method, {"lora": "full", "full": "lora"}[recipe.method.kind]
    only: dict[str, list[str]] = {
        "lora": ["targets", "exclude", "layers", "dora", "rslora", "also_train"],
        "full": ["train_only"],
    }
    hint = {
        "also_train": "; train_only limits full fine-tuning",
        "train_only": "; also_train trains parameters in addition to LoRA",
    }
    for key in only[other]:
        if getattr(method, key) != Method.model_fields[key].default:
            yield Problem(
                ("method", key),
                f"{key} with method.kind = {quoted(method.kind)}",
                f"method.kind = {quoted(other)} is needed{hint.get(key, '')}",
                (("method", "kind"),),
            )


def adapters_somewhere(recipe: Recipe) -> Problems:
    if recipe.method.kind == "lora" and recipe.method.targets == []:
        yield Problem(
            ("method", "targets"), "an empty list: no module gets an adapter", '"all-linear", "attention" or some globs'
        )


def quantised_base_is_frozen(recipe: Recipe) -> Problems:
    if recipe.model.quantize != "none" and recipe.method.kind == "full":
        yield Problem(
            ("model", "quantize"),
            f"{quoted(recipe.model.quantize)} with full fine-tuning: 4-bit weights cannot be trained",
            '"none", or method.kind = "lora"',
            (("method", "kind"),),
        )


def adapter_goes_on_as_lora(recipe: Recipe) -> Problems:
    if recipe.model.adapter is not None and recipe.method.kind == "full":
        yield Problem(
            ("model", "adapter"),
            "an adapter to continue with full fine-tuning",
            'method.kind = "lora" is needed',
            (("method", "kind"),),
        )


def evaluation_has_data(recipe: Recipe) -> Problems:
    if has_validation(recipe):
        return
    for key, found in {
        "every_steps": recipe.eval.every_steps,
        "per_epoch": recipe.eval.per_epoch,
        "at_start": recipe.eval.at_start,
        "samples": recipe.eval.samples,
        "prompts": recipe.eval.prompts,
        "early_stopping_patience": recipe.eval.early_stopping_patience,
        "limit": recipe.eval.limit,
    }.items():
        if found:
            yield Problem(("eval", key), f"{quoted(found)} without validation data", NEEDS_VALIDATION)
    if "exact_match" in recipe.eval.metrics:
        yield Problem(("eval", "metrics"), "exact_match without validation data", NEEDS_VALIDATION)
    if recipe.checkpoint.result == "best":
        yield Problem(("checkpoint", "result"), '"best" without validation data', NEEDS_VALIDATION)
    if recipe.checkpoint.keep_best > 1:
        found = f"{recipe.checkpoint.keep_best} without validation data"
        yield Problem(("checkpoint", "keep_best"), found, NEEDS_VALIDATION)


def exact_match_has_answers(recipe: Recipe) -> Problems:
    validation = recipe.data.validation or recipe.data.sources
    if "exact_match" in recipe.eval.metrics and all(source.format == "text" for source in validation):
        yield Problem(
            ("eval", "metrics"),
            "exact_match on plain text, which has no answer to compare with",
            "prompts with completions, or chats, are needed",
        )


def early_stopping_is_reached(recipe: Recipe) -> Problems:
    repeats = recipe.eval.every_steps is not None or recipe.eval.per_epoch is not None
    if recipe.checkpoint.keep_best > 1 and not repeats and has_validation(recipe):
        yield Problem(
            ("checkpoint", "keep_best"),
            f"{recipe.checkpoint.keep_best} with one evaluation, at the end",
            "eval.every_steps or eval.per_epoch is needed",
        )
    if recipe.eval.early_stopping_patience is not None and not repeats and has_validation(recipe):
        yield Problem(
            ("eval", "early_stopping_patience"),
            "early stopping with a single evaluation, at the end",
            "eval.every_steps or eval.per_epoch is needed",
        )


PER_SOURCE = ("loss", "exact_match")
"""Metrics that each of several validation sets has by its name: NAME/loss."""


def best_metric_is_evaluated(recipe: Recipe) -> Problems:
    evaluated = [*recipe.eval.metrics, *(["perplexity"] if "loss" in recipe.eval.metrics else [])]
    if recipe.learns_preferences:
        evaluated = ["loss", "rewards_margin", *(["rewards_accuracy", "win_rate"] if recipe.learns_pairs else [])]
    named = [source.name for source in recipe.data.validation if source.enabled]
    evaluated += [
        f"{name}/{metric}" for name in named for metric in evaluated if len(named) > 1 and metric in PER_SOURCE
    ]
    matters = recipe.checkpoint.result == "best" or recipe.eval.early_stopping_patience is not None
    best = recipe.checkpoint.best_metric
    if best not in evaluated and (matters or best != "loss"):
        yield Problem(
            ("checkpoint", "best_metric"),
            f"{quoted(best)} is not evaluated",
            f"one of eval.metrics: {', '.join(evaluated) or 'which is empty'}",
            (("eval", "metrics"),),
        )


def rungs_once(recipe: Recipe) -> Problems:
    ladder = recipe.backoff.ladder
    for index, rung in enumerate(ladder):
        if rung in ladder[:index]:
            yield Problem(
                ("backoff", "ladder", index), f"{quoted(rung)} twice", "each remedy once, in the order to try them"
            )


def merges_an_adapter(recipe: Recipe) -> Problems:
    if recipe.finish.merge and recipe.method.kind != "lora":
        yield Problem(("finish", "merge"), 'true with method.kind = "full"', "false: a full model has nothing to merge")


def destinations_are_such(recipe: Recipe) -> Problems:
    finish = recipe.finish
    if finish.webhook and not WEBHOOK_TEXT.fullmatch(finish.webhook):
        yield Problem(
            ("finish", "webhook"), "not a URL", 'http://… or https://…, or "$NAME" of a variable that contains one'
        )
    if finish.push and not REPOSITORY.fullmatch(finish.push):
        yield Problem(("finish", "push"), quoted(finish.push), "OWNER/NAME, a repository on the Hugging Face hub")
    if finish.push_public and not finish.push:
        yield Problem(("finish", "push_public"), "true without finish.push", "finish.push is needed")


def sweep_has_values(recipe: Recipe) -> Problems:
    for key, values in recipe.sweep.items():
        if not values:
            yield Problem(("sweep", key), "an empty list", "the values to try are needed")


RECIPE_RULES: tuple[Callable[[Recipe], Iterable[Problem]], ...] = (
    model_is_named,
    revision_is_of_the_hub,
    source_has_one_origin,
    detection_is_described,
    builtins_exist,
    random_weights_are_a_model,
    original_positions_are_of_yarn,
    names_are_unique,
    something_to_train_on,
    weights_are_of_training,
    mixing_has_sources,
    one_kind_of_validation,
    image_sizes_in_order,
    overlap_leaves_room,
    image_root_has_images,
    images_are_not_packed,
    one_warmup,
    rate_falls,
    constant_has_no_minimum,
    micro_batch_within_batch,
    restarts_restart,
    schedule_has_its_keys,
    momentum_is_sgd,
    state_has_a_dtype,
    groups_do_something,
    added_tokens_can_be_trained,
    fields_of_the_method,
    adapters_somewhere,
    quantised_base_is_frozen,
    adapter_goes_on_as_lora,
    evaluation_has_data,
    exact_match_has_answers,
    early_stopping_is_reached,
    best_metric_is_evaluated,
    rungs_once,
    merges_an_adapter,
    destinations_are_such,
    sweep_has_values,
    *PREFERENCE_RULES,
)


def problems_of_recipe(recipe: Recipe) -> list[Problem]:
    return [problem for rule in RECIPE_RULES for problem in rule(recipe)]
