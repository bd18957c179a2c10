"""Names that other tools use for our keys and choices, so that an error can say what to write instead.

Sources: transformers' TrainingArguments, TRL's SFTConfig and ModelConfig, peft's LoraConfig, Axolotl's config
reference, LLaMA-Factory's hparams, Unsloth's notebooks, torchtune's recipe configs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.config.files.text import quoted

Siblings = dict[str, Any]
"""All values of the file by the last part of their keys: some of our values follow from two of theirs."""


@dataclass(frozen=True)
class Alias:
    """Our key for another tool's key; the function converts its value, to None where ours has no equivalent."""

    tool: str
    key: str
    value: Callable[[Any], Any] = lambda theirs: theirs


HF, AXOLOTL, FACTORY, TRL, PEFT = "Hugging Face Trainer", "Axolotl", "LLaMA-Factory", "TRL", "peft"
UNSLOTH, TORCHTUNE = "Unsloth", "torchtune"

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16", "float": "float32"}
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adam": "adamw",
    "torch.optim.AdamW": "adamw",
    "adamw_apex_fused": "adamw",
    "paged_adamw_32bit": "adamw",
    "bitsandbytes.optim.PagedAdamW": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "adamw8bit": "adamw_8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw_8bit",
    "torch.optim.SGD": "sgd",
}
SCHEDULERS = {
    "cosine_with_min_lr": "cosine",
    "constant_with_warmup": "constant",
    "cosine_annealing": "cosine",
    "linear_with_warmup": "linear",
    "warmup_stable_decay": "wsd",
    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup": "cosine",
}
FORMATS = {
    "completion": "text",
    "messages": "chat",
    "chat_template": "chat",
    "chatml": "chat",
    "openai": "chat",
    "instruction": "alpaca",
    "instruct": "alpaca",
    "prompt_completion": "prompt-completion",
    "jsonl": "auto",
    "json": "auto",
    "csv": "auto",
    "parquet": "auto",
}
ATTENTION = {
    "flash_attn": "flash",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    "fa4": "flash_attention_4",
    "math": "eager",
}

CHOICE_ALIASES: dict[str, dict[str, str]] = {
    "model.dtype": DTYPES,
    "method.adapter_dtype": DTYPES,
    "model.attention": ATTENTION,
    "model.quantize": {"4bit": "nf4", "int4": "nf4", "fp4": "nf4", "bnb": "nf4", "false": "none"},
    "method.targets": {"all": "all-linear", "all_linear": "all-linear", "attn": "attention"},
    "train.optimizer": OPTIMIZERS,
    "train.scheduler": SCHEDULERS,
    "data.sources.format": FORMATS,
    "data.validation.format": FORMATS,
    "device.kind": {"gpu": "cuda", "nvidia": "cuda", "simulated": "metered"},
    "parallel.strategy": {
        "ddp": "replicated",
        "fsdp": "sharded",
        "fsdp2": "sharded",
        "deepspeed": "sharded",
        "zero3": "sharded",
        "none": "single",
    },
}
"""Each of our keys has a table from other tools' names of its choices to ours."""

PREFERENCE_NAMES = {"sigmoid": "dpo"}
"""TRL's and LLaMA-Factory's name of a preference loss to ours."""


def _dtype_if(name: str) -> Callable[[Any], Any]:
    return lambda theirs: name if theirs is True else "auto" if theirs is False else DTYPES.get(str(theirs), theirs)


def _choice(table: dict[str, str]) -> Callable[[Any], Any]:
    return lambda theirs: table.get(str(theirs), theirs)


def _nf4(theirs: Any) -> str:
    return "nf4" if theirs else "none"


def _positive_or_none(theirs: Any) -> Any:
    return theirs if isinstance(theirs, int) and theirs > 0 else None


def _layers(theirs: Any) -> list[int] | None:
    """A number of a layer or a list of numbers; None for anything else."""
    numbers = theirs if isinstance(theirs, list) else [theirs]
    return numbers if numbers and all(isinstance(each, int) for each in numbers) else None


def _as_list(theirs: Any) -> Any:
    """LLaMA-Factory separates names by commas."""
    if isinstance(theirs, list) or theirs in ("all-linear", "attention"):
        return theirs
    return [word.strip() for word in theirs.split(",")] if isinstance(theirs, str) else [theirs]


def _negated(theirs: Any) -> bool:
    return not theirs


KEY_ALIASES: dict[str, Alias] = {
    "num_train_epochs": Alias(HF, "train.epochs"),
    "num_epochs": Alias(AXOLOTL, "train.epochs"),
    "lr": Alias(TORCHTUNE, "train.learning_rate"),
    "lr_scheduler_type": Alias(HF, "train.scheduler", _choice(SCHEDULERS)),
    "lr_scheduler": Alias(AXOLOTL, "train.scheduler", _choice(SCHEDULERS)),
    "num_warmup_steps": Alias(TORCHTUNE, "train.warmup_steps"),
    "min_lr": Alias(HF, "train.min_learning_rate"),
    "cosine_min_lr": Alias(AXOLOTL, "train.min_learning_rate"),
    "optim": Alias(HF, "train.optimizer", _choice(OPTIMIZERS)),
    "adam_epsilon": Alias(HF, "train.eps"),
    "adam_eps": Alias(AXOLOTL, "train.eps"),
    "eta_min": Alias(AXOLOTL, "train.min_learning_rate"),
    "tiled_mlp_num_shards": Alias(AXOLOTL, "train.mlp_tiles"),
    "activation_offloading": Alias(AXOLOTL, "train.activation_offload", bool),
    "liger_fused_linear_cross_entropy": Alias(AXOLOTL, "train.loss", lambda theirs: "fused" if theirs else "auto"),
    "pref_loss": Alias(FACTORY, "preference.loss", _choice(PREFERENCE_NAMES)),
    "loss_type": Alias(TRL, "preference.loss", _choice(PREFERENCE_NAMES)),
    "pref_beta": Alias(FACTORY, "preference.beta"),
    "rl_beta": Alias(AXOLOTL, "preference.beta"),
    "dpo_beta": Alias(AXOLOTL, "preference.beta"),
    "orpo_alpha": Alias(AXOLOTL, "preference.beta"),
    "beta": Alias(TRL, "preference.beta"),
    "pref_ftx": Alias(FACTORY, "preference.sft_weight"),
    "rpo_alpha": Alias(TRL, "preference.sft_weight"),
    "simpo_gamma": Alias(FACTORY, "preference.margin"),
    "kto_chosen_weight": Alias(FACTORY, "preference.desirable_weight"),
    "kto_rejected_weight": Alias(FACTORY, "preference.undesirable_weight"),
    "kto_desirable_weight": Alias(AXOLOTL, "preference.desirable_weight"),
    "kto_undesirable_weight": Alias(AXOLOTL, "preference.undesirable_weight"),
    "max_norm": Alias(TORCHTUNE, "train.max_grad_norm"),
    "clip_grad_norm": Alias(TORCHTUNE, "train.max_grad_norm"),
    "gradient_clipping": Alias(AXOLOTL, "train.max_grad_norm"),
    "label_smoothing_factor": Alias(HF, "train.label_smoothing"),
    "enable_activation_checkpointing": Alias(TORCHTUNE, "train.gradient_checkpointing"),
    "enable_activation_offloading": Alias(TORCHTUNE, "train.activation_offload"),
    "use_gradient_checkpointing": Alias(UNSLOTH, "train.gradient_checkpointing", bool),
    "disable_gradient_checkpointing": Alias(FACTORY, "train.gradient_checkpointing", _negated),
    "torch_compile": Alias(HF, "train.compile"),
    "full_determinism": Alias(HF, "train.deterministic"),
    "data_seed": Alias(HF, "train.seed"),
    "random_state": Alias(UNSLOTH, "train.seed"),
    "logging_steps": Alias(HF, "train.log_every_steps"),
    "log_every_n_steps": Alias(TORCHTUNE, "train.log_every_steps"),
    "max_steps_per_epoch": Alias(TORCHTUNE, "train.max_steps"),
    "use_liger_kernel": Alias(HF, "train.loss", lambda theirs: "fused" if theirs else "auto"),
    "lora_r": Alias(AXOLOTL, "method.rank"),
    "lora_rank": Alias(FACTORY, "method.rank"),
    "r": Alias(PEFT, "method.rank"),
    "lora_alpha": Alias(PEFT, "method.alpha"),
    "lora_dropout": Alias(PEFT, "method.dropout"),
    "lora_target": Alias(
        FACTORY, "method.targets", lambda theirs: "all-linear" if theirs == "all" else _as_list(theirs)
    ),
    "target_modules": Alias(PEFT, "method.targets", _as_list),
    "lora_target_modules": Alias(AXOLOTL, "method.targets", _as_list),
    "lora_target_linear": Alias(AXOLOTL, "method.targets", lambda theirs: "all-linear" if theirs else None),
    "lora_attn_modules": Alias(TORCHTUNE, "method.targets", _as_list),
    "exclude_modules": Alias(PEFT, "method.exclude", _as_list),
    "layers_to_transform": Alias(PEFT, "method.layers", _layers),
    "peft_layers_to_transform": Alias(AXOLOTL, "method.layers", _layers),
    "modules_to_save": Alias(PEFT, "method.also_train", _as_list),
    "lora_modules_to_save": Alias(AXOLOTL, "method.also_train", _as_list),
    "use_rslora": Alias(PEFT, "method.rslora"),
    "use_dora": Alias(PEFT, "method.dora"),
    "peft_use_dora": Alias(AXOLOTL, "method.dora"),
    "peft_use_rslora": Alias(AXOLOTL, "method.rslora"),
    "finetuning_type": Alias(FACTORY, "method.kind"),
    "full_finetuning": Alias(UNSLOTH, "method.kind", lambda theirs: "full" if theirs else "lora"),
    "use_peft": Alias(TRL, "method.kind", lambda theirs: "lora" if theirs else "full"),
    "unfrozen_parameters": Alias(AXOLOTL, "method.train_only", _as_list),
    "base_model": Alias(AXOLOTL, "model.id"),
    "model_name_or_path": Alias(HF, "model.id"),
    "model_name": Alias(UNSLOTH, "model.id"),
    "pretrained_model_name_or_path": Alias(HF, "model.id"),
    "tokenizer_name": Alias(HF, "model.tokenizer"),
    "tokenizer_name_or_path": Alias(TRL, "model.tokenizer"),
    "model_revision": Alias(TRL, "model.revision"),
    "eos_token": Alias(TRL, "model.special_tokens", lambda theirs: {"eos": str(theirs)} if theirs else None),
    "revision_of_model": Alias(AXOLOTL, "model.revision"),
    "adapter_name_or_path": Alias(FACTORY, "model.adapter"),
    "lora_model_dir": Alias(AXOLOTL, "model.adapter"),
    "torch_dtype": Alias(HF, "model.dtype", _choice(DTYPES)),
    "bf16": Alias(HF, "model.dtype", _dtype_if("bfloat16")),
    "fp16": Alias(HF, "model.dtype", _dtype_if("float16")),
    "bfloat16": Alias(AXOLOTL, "model.dtype", _dtype_if("bfloat16")),
    "float16": Alias(AXOLOTL, "model.dtype", _dtype_if("float16")),
    "pure_bf16": Alias(FACTORY, "model.dtype", _dtype_if("bfloat16")),
    "attn_implementation": Alias(HF, "model.attention", _choice(ATTENTION)),
    # auto is the best flash attention that there is; "flash" would be refused where there is none.
    "flash_attention": Alias(AXOLOTL, "model.attention", lambda theirs: "auto" if theirs else "sdpa"),
    "flash_attn": Alias(FACTORY, "model.attention", _choice({**ATTENTION, "disabled": "eager"})),
    "load_in_4bit": Alias(HF, "model.quantize", _nf4),
    "quantization_bit": Alias(FACTORY, "model.quantize", lambda theirs: "nf4" if theirs == 4 else None),
    "max_seq_length": Alias(TRL, "data.max_length"),
    "max_seq_len": Alias(TORCHTUNE, "data.max_length"),
    "sequence_len": Alias(AXOLOTL, "data.max_length"),
    "cutoff_len": Alias(FACTORY, "data.max_length"),
    "model_max_length": Alias(HF, "data.max_length"),
    "sample_packing": Alias(AXOLOTL, "data.packing"),
    "packed": Alias(TORCHTUNE, "data.packing"),
    "val_set_size": Alias(AXOLOTL, "data.valid_fraction"),
    "val_size": Alias(FACTORY, "data.valid_fraction"),
    "train_on_inputs": Alias(AXOLOTL, "data.loss_on", lambda theirs: "all" if theirs else "completion"),
    "train_on_prompt": Alias(FACTORY, "data.loss_on", lambda theirs: "all" if theirs else "completion"),
    "train_on_input": Alias(TORCHTUNE, "data.loss_on", lambda theirs: "all" if theirs else "completion"),
    "completion_only_loss": Alias(TRL, "data.loss_on", lambda theirs: "completion" if theirs else "all"),
    "assistant_only_loss": Alias(TRL, "data.loss_on", lambda theirs: "completion" if theirs else "all"),
    "default_system_message": Alias(AXOLOTL, "data.system_prompt"),
    "default_system": Alias(FACTORY, "data.system_prompt"),
    "preprocessing_num_workers": Alias(FACTORY, "data.workers"),
    "dataset_num_proc": Alias(TRL, "data.workers"),
    "dataset_processes": Alias(AXOLOTL, "data.workers"),
    "dataloader_num_workers": Alias(HF, "data.workers"),
    "max_samples": Alias(FACTORY, "data.sources.NAME.limit"),
    "dataset_name": Alias(TRL, "data.sources.NAME.hub"),
    "dataset_config_name": Alias(HF, "data.sources.NAME.config"),
    "train_file": Alias(HF, "data.sources.NAME.path"),
    "validation_file": Alias(HF, "data.validation.NAME.path"),
    "dataset_text_field": Alias(TRL, "data.sources.NAME.columns.text"),
    "save_steps": Alias(HF, "checkpoint.every_steps"),
    "keep_last_n_checkpoints": Alias(TORCHTUNE, "checkpoint.keep"),
    "save_total_limit": Alias(HF, "checkpoint.keep"),
    "metric_for_best_model": Alias(HF, "checkpoint.best_metric", lambda theirs: str(theirs).removeprefix("eval_")),
    "load_best_model_at_end": Alias(HF, "checkpoint.result", lambda theirs: "best" if theirs else "last"),
    "eval_steps": Alias(HF, "eval.every_steps", _positive_or_none),
    "eval_on_start": Alias(HF, "eval.at_start"),
    "early_stopping_patience": Alias(HF, "eval.early_stopping_patience"),
    "report_to": Alias(HF, "trackers.use", lambda theirs: [] if theirs == "none" else _as_list(theirs)),
    "wandb_project": Alias(AXOLOTL, "trackers.project"),
    "trackio_project_name": Alias(AXOLOTL, "trackers.project"),
}
"""Another tool's key (lower case, '-' as '_') to ours. Keys that are spelt like ours need no row."""

PER_DEVICE = ("per_device_train_batch_size", "micro_batch_size", "per_device_batch_size")
ACCUMULATION = ("gradient_accumulation_steps", "accumulation_steps")
BETAS = ("adam_beta1", "adam_beta2")
DEEPSPEED = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "deepspeed_plugin", "zero_stage")
"""Keys of the Trainer, Accelerate, Axolotl and LLaMA-Factory that name a DeepSpeed configuration or its ZeRO stage."""

ZERO_STAGE = re.compile(r"z(?:ero)?[_-]?(?:stage)?[_-]?([23])", re.IGNORECASE)
"""The stage in the name of a DeepSpeed configuration file, such as ds_z3_config.json or zero2_torch_compile.json."""


PREFERENCE_LOSSES = ("dpo", "ipo", "simpo", "orpo", "kto")

REWARD_METHODS = ("ppo", "grpo", "rlhf", "reward")

WITHOUT_REWARDS = 'preference training is method.objective = "dpo"; training on rewards is not supported'


def translate_key(key: str, value: Any, siblings: Siblings) -> tuple[str, str] | None:
    """Translate another tool's key to (the tool, "our.key = value"); None if no known tool has this key."""
    folded = key.lower().replace("-", "_")
    if folded in PER_DEVICE or folded in ACCUMULATION:
        return HF, _batch(siblings)
    if folded in BETAS:
        return HF, f"train.betas = {quoted([siblings.get(BETAS[0], 0.9), siblings.get(BETAS[1], 0.999)])}"
    if folded in DEEPSPEED:
        return "DeepSpeed", f'parallel.strategy = "sharded", parallel.shard = {quoted(shard_of(value))} in the profile'
    row = KEY_ALIASES.get(folded)
    if row is None:
        return None
    ours = row.value(value)
    return row.tool, row.key if ours is None or isinstance(ours, dict) else f"{row.key} = {quoted(ours)}"


def shard_of(value: Any) -> str:
    """What is sharded: "gradients" for ZeRO stage 2, else "parameters" (stage 3, also where none is named)."""
    if isinstance(value, dict):
        inner = value.get("zero_optimization", value)
        value = inner.get("stage", inner.get("zero_stage")) if isinstance(inner, dict) else None
    found = ZERO_STAGE.search(value) if isinstance(value, str) else None
    return "gradients" if value == 2 or (found and found[1] == "2") else "parameters"


def _batch(siblings: Siblings) -> str:
    """Keys "train.micro_batch = …, train.batch_size = …" from a batch size per device and gradient accumulation
    (1 if not given); without a batch size, how to compute train.batch_size."""
    rows = first_number(siblings, PER_DEVICE)
    accumulation = first_number(siblings, ACCUMULATION)
    if rows is None:
        return f"train.batch_size = {accumulation or 'accumulation'} x the sequences of one forward pass x devices"
    return f"train.micro_batch = {rows}, train.batch_size = {rows * (accumulation or 1)} (times the devices)"


def first_number(siblings: Siblings, keys: tuple[str, ...]) -> int | None:
    values = (siblings.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
