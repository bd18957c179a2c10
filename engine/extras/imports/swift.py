"""ms-swift's configurations and command lines. Defaults by its source: `arguments/`, `trainers/arguments.py`."""

from __future__ import annotations

import math
import re
from typing import Any

from engine.config.check.aliases import PREFERENCE_LOSSES, WITHOUT_REWARDS
from engine.config.files.text import quoted
from engine.extras.imports.draft import OFF, Draft
from engine.extras.imports.sources import name_of, place_of
from engine.extras.imports.templates import take_template

DATA_SET = re.compile(r"(?P<place>[^#:]+(?:://[^#:]+)?)(?::(?P<subset>[^#]+))?(?:#(?P<limit>\d+))?")
LENGTHS = {"delete": "drop", "right": "truncate", "split": "split"}


def read_swift(draft: Draft) -> None:
    command = draft.trainer or str(draft.take("command") or "sft")
    draft.take("ENV"), draft.take("env")
    kind = draft.take("tuner_type") or draft.take("train_type") or "lora"
    if kind not in ("lora", "full"):
        draft.refuse("tuner_type", kind, "only full training and LoRA are supported")
    draft.set("method.kind", kind, "tuner_type")
    _objective(draft, command)
    if (model := draft.take("model")) is not None:
        draft.theirs["model_name_or_path"] = model
        if not draft.theirs.get("use_hf"):
            draft.notes.append(
                "ms-swift loads models and data sets from ModelScope; here their names are looked up on the "
                "Hugging Face hub"
            )
    adapters = draft.take("adapters")
    if isinstance(adapters, list) and len(adapters) > 1:
        draft.refuse("adapters", adapters, "only one adapter can be continued")
    if adapters not in OFF:
        draft.set("model.adapter", str(adapters[0] if isinstance(adapters, list) else adapters), "adapters")
    for theirs, ours in (("lr", "learning_rate"), ("lr_warmup_fraction", "warmup_ratio"), ("train_iters", "max_steps")):
        if theirs in draft.theirs:
            draft.theirs[ours] = draft.take(theirs)
    if "learning_rate" not in draft.theirs:
        draft.set("train.learning_rate", 1e-5 if kind == "full" else 1e-4, "ms-swift's default")
    if (system := draft.take("system")) is not None:
        draft.set("data.system_prompt", str(system), "system")
    _parts(draft)
    _lengths(draft, command)
    _batch(draft)
    _loss(draft, command)
    _data(draft)
    take_template(draft, "template", {})
    if (bits := draft.take("quant_bits")) is not None:
        if bits == 4 and draft.theirs.get("quant_method") in ("bnb", None):
            draft.set("model.quantize", "nf4", "quant_bits")
        else:
            draft.blanks["quant_bits"] = f'{quoted(bits)}: choose model.quantize = "none" (16 bits) or "nf4" (4 bits)'
    draft.rounds_weights = str(draft.theirs.get("torch_dtype")) in ("bfloat16", "float16") and kind == "full"


def _objective(draft: Draft, command: str) -> None:
    rlhf = draft.take("rlhf_type")
    if rlhf is None and command != "rlhf":
        return
    if rlhf not in PREFERENCE_LOSSES:
        draft.refuse("rlhf_type", rlhf, WITHOUT_REWARDS)
    draft.set("method.objective", "dpo", "rlhf_type")
    draft.set("preference.loss", rlhf, "rlhf_type")


def _parts(draft: Draft) -> None:
    parts = {"freeze_vit": "vision", "freeze_aligner": "projector", "freeze_llm": "language"}
    given = {key: draft.take(key) for key in parts}
    named = [key for key, value in given.items() if value is not None]
    if named:
        frozen = [parts[key] for key, value in given.items() if (key != "freeze_llm" if value is None else value)]
        if frozen:
            draft.set("method.freeze", frozen, " and ".join(named))
        else:
            draft.leave("freeze_vit", "every part is trained")
    for theirs, ours in (("freeze_parameters", "method.freeze"), ("trainable_parameters", "method.train_only")):
        if (patterns := draft.take(theirs)) not in OFF:
            names = patterns if isinstance(patterns, list) else [patterns]
            draft.set(ours, [*(draft.get(ours) or []), *(f"{name}**" for name in names)], theirs)
    for key in ("freeze_parameters_regex", "trainable_parameters_regex", "target_regex", "target_parameters"):
        if (value := draft.take(key)) not in OFF:
            draft.blanks[key] = f"{quoted(value)}: list the names or globs in [method]"


def _lengths(draft: Draft, command: str) -> None:
    strategy = draft.take("truncation_strategy")
    default = "split" if command == "pt" and strategy == "split" else "delete"
    chosen = str(strategy or default)
    if chosen not in LENGTHS:
        draft.blanks["truncation_strategy"] = f"{quoted(strategy)}: set data.over_length"
    else:
        draft.set("data.over_length", LENGTHS[chosen], "truncation_strategy" if strategy else "ms-swift's default")
    draft.unbounded_length = draft.theirs.get("max_length") is None


def _batch(draft: Draft) -> None:
    total = draft.take("global_batch_size")
    if isinstance(total, int):
        draft.set("train.batch_size", total, "global_batch_size")
        if draft.take("micro_batch_size") is not None:
            draft.leave("micro_batch_size", "the plan chooses train.micro_batch")
    elif draft.theirs.get("gradient_accumulation_steps") is None:
        rows = draft.theirs.get("per_device_train_batch_size") or 1
        if isinstance(rows, int) and rows > 0:
            draft.take("per_device_train_batch_size")
            steps = max(1, math.ceil(16 / rows / draft.devices))
            draft.set("train.batch_size", rows * steps * draft.devices, "ms-swift's default of 16 samples per step")


def _loss(draft: Draft, command: str) -> None:
    scale = str(draft.take("loss_scale") or ("all" if command == "pt" else "default"))
    known = {"all": "all", "last_round": "last", "default": "completion"}
    if scale in known:
        draft.set("data.loss_on", known[scale], "loss_scale")
    else:
        draft.blanks["loss_scale"] = f"{quoted(scale)}: the loss weighs all target tokens equally"
    if "moe_aux_loss_coeff" in draft.theirs or "router_aux_loss_coef" in draft.theirs:
        weight = draft.take("moe_aux_loss_coeff")
        draft.set(
            "moe.aux_loss_weight",
            draft.take("router_aux_loss_coef") if weight is None else weight,
            "moe_aux_loss_coeff",
        )


def _data(draft: Draft) -> None:
    for key, ours in (("dataset", "data.sources"), ("val_dataset", "data.validation")):
        given = draft.take(key)
        names = given if isinstance(given, list) else str(given).split() if given else []
        taken: list[dict[str, Any]] = []
        for name in names:
            match = DATA_SET.fullmatch(str(name))
            place = match["place"] if match else str(name)
            source = {"name": name_of(place, taken), **place_of(draft, place, f"{key}.{place}"), "format": "auto"}
            if match and match["subset"]:
                source["config"] = match["subset"]
            if match and match["limit"]:
                source["limit"] = int(match["limit"])
                draft.notes.append(
                    f"{place}: ms-swift draws {match['limit']} random rows; here the first ones are used"
                )
            if "hub" in source:
                draft.blanks[f"{key}.{place}"] = (
                    "a data set on ModelScope whose rows ms-swift rewrites: check with `tunedeck data` how the "
                    "rows are read"
                )
            taken.append(source)
        if taken:
            draft.set(ours, taken, key)
    if (share := draft.take("split_dataset_ratio")) not in OFF and share != 0:
        draft.set("data.valid_fraction", share, "split_dataset_ratio")
    elif share is not None:
        draft.leave("split_dataset_ratio", "nothing is held out")
    names = draft.take("model_name")
    if names is not None:
        draft.leave("model_name", "replaces {{NAME}} in the data set swift/self-cognition, which is not supported here")
