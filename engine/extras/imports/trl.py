"""TRL's configurations and command lines, and those of the alignment handbook.

Defaults by its source: `trainer/sft_config.py`, `dpo_config.py`, `model_config.py`, and peft's table of target modules.
"""

from __future__ import annotations

import re
from typing import Any

from engine.config.check.aliases import WITHOUT_REWARDS
from engine.config.files.text import quoted
from engine.extras.imports.draft import OFF, Draft
from engine.extras.imports.sources import mixture_source
from engine.extras.imports.templates import take_template

REWARD_KEYS = ("num_generations", "reward_funcs", "reward_model_path", "reward_model_name_or_path")
PEFT_TARGETS = ["q_proj", "v_proj"]
"""What peft gives adapters to where no modules are named, for Llama, Mistral, Mixtral, Gemma and Qwen."""

KTO_MARKS = ("desirable_weight", "undesirable_weight")
PREFERENCE_MARKS = ("beta", "max_prompt_length", "rpo_alpha", "precompute_ref_log_probs", *KTO_MARKS)
"""Keys that only TRL's trainers of preferences have."""

NAMED_LOSS = re.compile(r"(?<![a-z])(dpo|simpo|orpo|kto)(?![a-z])")


def read_trl(draft: Draft) -> None:
    for key in REWARD_KEYS:
        if draft.theirs.get(key) not in OFF:
            draft.refuse(key, draft.theirs[key], WITHOUT_REWARDS)
    learns_preferences = _preferences(draft)
    uses_peft = draft.take("use_peft")
    draft.set("method.kind", "lora" if uses_peft else "full", "use_peft")
    if uses_peft:
        _targets(draft)
    if "learning_rate" not in draft.theirs:
        draft.default("train.learning_rate", 1e-6 if learns_preferences else 2e-5)
    draft.rounds_weights = str(draft.theirs.get("dtype", draft.theirs.get("torch_dtype"))) in ("bfloat16", "bf16")
    if draft.theirs.get("bf16") is False and not draft.theirs.get("fp16"):
        draft.set("model.dtype", "float32", "bf16")
    _data(draft)
    if not learns_preferences:
        _loss_on(draft)
    _schedule(draft)
    take_template(draft, "chat_template", {})
    if (end := draft.take("eos_token")) not in OFF:
        draft.set("model.special_tokens", {"eos": str(end)}, "eos_token")
    if (path := draft.take("chat_template_path")) is not None:
        draft.blanks["chat_template_path"] = f"{quoted(path)}: set model.chat_template to the template's file"


def _targets(draft: Draft) -> None:
    experts = draft.take("lora_target_parameters")
    given = [key for key in ("lora_target_modules", "target_modules") if draft.theirs.get(key) not in OFF]
    if not given:
        draft.set("method.targets", PEFT_TARGETS, "peft's default")
        draft.notes.append(
            "peft chooses targets by model type: q_proj and v_proj in most, the fused projection in others"
        )
    if experts not in OFF:
        draft.blanks["lora_target_parameters"] = f"{quoted(experts)}: add these names to method.targets"


def _preferences(draft: Draft) -> bool:
    """Return whether preferences are trained.

    TRL's files do not name their trainer: it follows from keys that only one has, from the loss, or from a name in the
    file's comments, output folder or run.
    """
    marks, loss = [key for key in PREFERENCE_MARKS if key in draft.theirs], draft.theirs.get("loss_type")
    if draft.trainer in ("dpo", "kto", "orpo", "simpo", "cpo") and not marks:
        marks = ["its command"]
    if not marks and loss is not None:
        loss = draft.take("loss_type")
        if loss not in ("nll", "chunked_nll"):
            draft.refuse("loss_type", loss, "of the losses on text, only cross-entropy (nll) is supported")
        draft.leave("loss_type", f"{quoted(loss)}: the loss is cross-entropy")
    if not marks:
        return False
    draft.set("method.objective", "dpo", marks[0])
    if isinstance(loss, list) and len(loss) == 1:
        loss = draft.theirs["loss_type"] = loss[0]
    if loss is not None and loss not in ("sigmoid", "ipo", "simpo", "kto", "orpo"):
        draft.refuse("loss_type", loss, "supported preference losses are dpo (sigmoid), ipo, simpo, orpo and kto")
    names = " ".join(str(draft.theirs.get(key, "")) for key in ("output_dir", "hub_model_id", "run_name"))
    comments = " ".join(re.findall(r"#(.*)", draft.text))
    named = [draft.trainer] if draft.trainer in ("orpo", "kto") else NAMED_LOSS.findall(f"{names} {comments}".lower())
    kto = next((key for key in KTO_MARKS if key in draft.theirs), None)
    if kto is not None:
        draft.set("preference.loss", "kto", kto)
    elif loss is None and draft.trainer == "dpo":
        draft.set("preference.loss", "dpo", "its command")
    elif loss is None and len(set(named)) == 1:
        draft.set("preference.loss", named[0], f"its name, {named[0]}")
    elif loss is None:
        draft.notes.append(
            f"{marks[0]} means preference training, but the file does not set DPO, ORPO or KTO: DPO is used; "
            'for another, set preference.loss = "orpo" or "kto"'
        )
    return True


def _loss_on(draft: Draft) -> None:
    """Set where the loss is: by default on every token of conversations and texts, and on completions of prompts."""
    chosen = [key for key in ("assistant_only_loss", "completion_only_loss") if draft.theirs.get(key) is not None]
    values = {key: draft.take(key) for key in chosen}
    if any(values.values()):
        draft.set("data.loss_on", "completion", " and ".join(chosen))
        return
    draft.set("data.loss_on", "all", " and ".join(chosen) or "TRL's default")
    if "completion_only_loss" not in values:
        draft.notes.append(
            "TRL trains on every token of conversations and texts, but only on the completions of rows with "
            'prompt and completion: for such rows set data.loss_on = "completion"'
        )


def _schedule(draft: Draft) -> None:
    kwargs, rate = draft.take("lr_scheduler_kwargs") or {}, draft.theirs.get("learning_rate")
    for name, value in kwargs.items() if isinstance(kwargs, dict) else ():
        if name == "min_lr_rate" and isinstance(rate, (int, float)) and isinstance(value, (int, float)):
            draft.set("train.min_learning_rate", value * rate, "lr_scheduler_kwargs.min_lr_rate")
        elif name == "min_lr":
            draft.set("train.min_learning_rate", value, "lr_scheduler_kwargs.min_lr")
        elif name == "num_cycles" and str(draft.theirs.get("lr_scheduler_type")) == "cosine_with_restarts":
            draft.set("train.restarts", value, "lr_scheduler_kwargs.num_cycles")
        else:
            draft.blanks[f"lr_scheduler_kwargs.{name}"] = f"{quoted(value)}: unknown key of a schedule"


def _data(draft: Draft) -> None:
    mixture = draft.take("dataset_mixture") or {}
    mixer, splits = draft.take("dataset_mixer") or {}, draft.take("dataset_splits") or ["train"]
    entries = [*(draft.take("datasets") or []), *(mixture.get("datasets") or [])]
    entries += [{"id": name, "weight": weight, "split": splits[0]} for name, weight in mixer.items()]
    train, test = draft.take("dataset_train_split") or "train", draft.take("dataset_test_split")
    config, name = draft.take("dataset_config") or draft.take("dataset_config_name"), draft.take("dataset_name")
    if name:
        entries.append({"path": name, "name": config, "split": train})
    sources: list[dict[str, Any]] = []
    for index, entry in enumerate(entries):
        sources.append(mixture_source(draft, entry, f"datasets[{index}]", sources))
    column = draft.take("dataset_text_field")
    if column not in (None, "", "text"):
        for source in sources:
            source["columns"] = {"text": str(column)}
    draft.set("data.sources", sources, "datasets" if not name else "dataset_name")
    evaluates = draft.theirs.get("eval_strategy", draft.theirs.get("do_eval")) not in ("no", False, None)
    held = [{"id": entry, "split": splits[-1]} for entry in mixer if evaluates and len(splits) > 1]
    held += [{"path": name, "name": config, "split": test or "test"}] if name and evaluates else []
    validation: list[dict[str, Any]] = []
    for entry in held:
        validation.append(mixture_source(draft, entry, "dataset_test_split", [*sources, *validation]))
    if validation:
        draft.set("data.validation", validation, "dataset_test_split")
    elif test:
        draft.leave("dataset_test_split", "the file does not evaluate")
    if (size := mixture.get("test_split_size")) is not None and isinstance(size, float):
        draft.set("data.valid_fraction", size, "dataset_mixture.test_split_size")
    elif size is not None:
        draft.blanks["dataset_mixture.test_split_size"] = (
            f"{size} samples: set data.valid_fraction, a fraction of the samples"
        )
    for key in set(mixture) - {"datasets", "test_split_size", "seed"}:
        draft.blanks[f"dataset_mixture.{key}"] = "unknown key of a mixture"
    if "seed" in mixture:
        draft.leave("dataset_mixture.seed", "train.seed sets the order of samples")
