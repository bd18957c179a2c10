"""Words other tools use, answered with ours: key names, and names of choices.

Two tables and the arithmetic between them. Sources: transformers' TrainingArguments, TRL's SFTConfig and ModelConfig,
peft's LoraConfig, Axolotl's config reference, LLaMA-Factory's hparams, Unsloth's notebooks, torchtune's recipe configs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.spec.files.text import quoted

Siblings = dict[str, Any]
"""Every scalar of the same file by its bare key, for values that take two of another tool's keys to compute."""


@dataclass(frozen=True)
class Foreign:
    """Another tool's key: whose it is, our key, and our value for theirs (None: only the key is known)."""

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
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "adamw8bit": "adamw_8bit",
}
SCHEDULERS = {
    "cosine_with_min_lr": "cosine",
    "constant_with_warmup": "constant",
    "cosine_annealing": "cosine",
    "linear_with_warmup": "linear",
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
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "fa2": "flash",
    "flash_attn": "flash",
    "math": "eager",
}

CHOICES: dict[str, dict[str, str]] = {
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
"""Our key = their word for a choice, and ours."""


def _dtype_if(name: str) -> Callable[[Any], Any]:
    return lambda theirs: name if theirs is True else "auto" if theirs is False else DTYPES.get(str(theirs), theirs)


def _word(table: dict[str, str]) -> Callable[[Any], Any]:
    return lambda theirs: table.get(str(theirs), theirs)


def _nf4(theirs: Any) -> str:
    return "nf4" if theirs else "none"


def _steps(theirs: Any) -> Any:
    return theirs if isinstance(theirs, int) and theirs > 0 else None


def _as_list(theirs: Any) -> Any:
    return theirs if isinstance(theirs, list) or theirs in ("all-linear", "attention") else [theirs]


def _turned(theirs: Any) -> bool:
    return not theirs


KEYS: dict[str, Foreign] = {
    "num_train_epochs": Foreign(HF, "train.epochs"),
    "num_epochs": Foreign(AXOLOTL, "train.epochs"),
    "lr": Foreign(TORCHTUNE, "train.learning_rate"),
    "lr_scheduler_type": Foreign(HF, "train.scheduler", _word(SCHEDULERS)),
    "lr_scheduler": Foreign(AXOLOTL, "train.scheduler", _word(SCHEDULERS)),
    "num_warmup_steps": Foreign(TORCHTUNE, "train.warmup_steps"),
    "min_lr": Foreign(HF, "train.min_learning_rate"),
    "cosine_min_lr": Foreign(AXOLOTL, "train.min_learning_rate"),
    "optim": Foreign(HF, "train.optimizer", _word(OPTIMIZERS)),
    "adam_epsilon": Foreign(HF, "train.eps"),
    "max_norm": Foreign(TORCHTUNE, "train.max_grad_norm"),
    "clip_grad_norm": Foreign(TORCHTUNE, "train.max_grad_norm"),
    "gradient_clipping": Foreign(AXOLOTL, "train.max_grad_norm"),
    "label_smoothing_factor": Foreign(HF, "train.label_smoothing"),
    "enable_activation_checkpointing": Foreign(TORCHTUNE, "train.gradient_checkpointing"),
    "enable_activation_offloading": Foreign(TORCHTUNE, "train.activation_offload"),
    "use_gradient_checkpointing": Foreign(UNSLOTH, "train.gradient_checkpointing", bool),
    "disable_gradient_checkpointing": Foreign(FACTORY, "train.gradient_checkpointing", _turned),
    "torch_compile": Foreign(HF, "train.compile"),
    "full_determinism": Foreign(HF, "train.deterministic"),
    "data_seed": Foreign(HF, "train.seed"),
    "random_state": Foreign(UNSLOTH, "train.seed"),
    "logging_steps": Foreign(HF, "train.log_every_steps"),
    "log_every_n_steps": Foreign(TORCHTUNE, "train.log_every_steps"),
    "max_steps_per_epoch": Foreign(TORCHTUNE, "train.max_steps"),
    "use_liger_kernel": Foreign(HF, "train.loss", lambda theirs: "fused" if theirs else "auto"),
    "lora_r": Foreign(AXOLOTL, "method.rank"),
    "lora_rank": Foreign(FACTORY, "method.rank"),
    "r": Foreign(PEFT, "method.rank"),
    "lora_alpha": Foreign(PEFT, "method.alpha"),
    "lora_dropout": Foreign(PEFT, "method.dropout"),
    "lora_target": Foreign(
        FACTORY, "method.targets", lambda theirs: "all-linear" if theirs == "all" else _as_list(theirs)
    ),
    "target_modules": Foreign(PEFT, "method.targets", _as_list),
    "lora_target_modules": Foreign(AXOLOTL, "method.targets", _as_list),
    "lora_target_linear": Foreign(AXOLOTL, "method.targets", lambda theirs: "all-linear" if theirs else None),
    "lora_attn_modules": Foreign(TORCHTUNE, "method.targets", _as_list),
    "exclude_modules": Foreign(PEFT, "method.exclude", _as_list),
    "modules_to_save": Foreign(PEFT, "method.also_train", _as_list),
    "lora_modules_to_save": Foreign(AXOLOTL, "method.also_train", _as_list),
    "use_rslora": Foreign(PEFT, "method.rslora"),
    "use_dora": Foreign(PEFT, "method.dora"),
    "peft_use_dora": Foreign(AXOLOTL, "method.dora"),
    "finetuning_type": Foreign(FACTORY, "method.kind"),
    "full_finetuning": Foreign(UNSLOTH, "method.kind", lambda theirs: "full" if theirs else "lora"),
    "use_peft": Foreign(TRL, "method.kind", lambda theirs: "lora" if theirs else "full"),
    "unfrozen_parameters": Foreign(AXOLOTL, "method.train_only", _as_list),
    "base_model": Foreign(AXOLOTL, "model.id"),
    "model_name_or_path": Foreign(HF, "model.id"),
    "model_name": Foreign(UNSLOTH, "model.id"),
    "pretrained_model_name_or_path": Foreign(HF, "model.id"),
    "tokenizer_name": Foreign(HF, "model.tokenizer"),
    "tokenizer_name_or_path": Foreign(TRL, "model.tokenizer"),
    "model_revision": Foreign(TRL, "model.revision"),
    "adapter_name_or_path": Foreign(FACTORY, "model.adapter"),
    "lora_model_dir": Foreign(AXOLOTL, "model.adapter"),
    "torch_dtype": Foreign(HF, "model.dtype", _word(DTYPES)),
    "bf16": Foreign(HF, "model.dtype", _dtype_if("bfloat16")),
    "fp16": Foreign(HF, "model.dtype", _dtype_if("float16")),
    "attn_implementation": Foreign(HF, "model.attention", _word(ATTENTION)),
    "flash_attention": Foreign(AXOLOTL, "model.attention", lambda theirs: "flash" if theirs else "auto"),
    "flash_attn": Foreign(FACTORY, "model.attention", _word({**ATTENTION, "disabled": "eager"})),
    "load_in_4bit": Foreign(HF, "model.quantize", _nf4),
    "quantization_bit": Foreign(FACTORY, "model.quantize", lambda theirs: "nf4" if theirs == 4 else None),
    "max_seq_length": Foreign(TRL, "data.max_length"),
    "max_seq_len": Foreign(TORCHTUNE, "data.max_length"),
    "sequence_len": Foreign(AXOLOTL, "data.max_length"),
    "cutoff_len": Foreign(FACTORY, "data.max_length"),
    "model_max_length": Foreign(HF, "data.max_length"),
    "sample_packing": Foreign(AXOLOTL, "data.packing"),
    "packed": Foreign(TORCHTUNE, "data.packing"),
    "val_set_size": Foreign(AXOLOTL, "data.valid_fraction"),
    "val_size": Foreign(FACTORY, "data.valid_fraction"),
    "train_on_inputs": Foreign(AXOLOTL, "data.loss_on", lambda theirs: "all" if theirs else "completion"),
    "train_on_prompt": Foreign(FACTORY, "data.loss_on", lambda theirs: "all" if theirs else "completion"),
    "train_on_input": Foreign(TORCHTUNE, "data.loss_on", lambda theirs: "all" if theirs else "completion"),
    "completion_only_loss": Foreign(TRL, "data.loss_on", lambda theirs: "completion" if theirs else "all"),
    "assistant_only_loss": Foreign(TRL, "data.loss_on", lambda theirs: "completion" if theirs else "all"),
    "default_system_message": Foreign(AXOLOTL, "data.system_prompt"),
    "default_system": Foreign(FACTORY, "data.system_prompt"),
    "preprocessing_num_workers": Foreign(FACTORY, "data.workers"),
    "dataset_num_proc": Foreign(TRL, "data.workers"),
    "dataset_processes": Foreign(AXOLOTL, "data.workers"),
    "dataloader_num_workers": Foreign(HF, "data.workers"),
    "max_samples": Foreign(FACTORY, "data.sources.NAME.limit"),
    "dataset_name": Foreign(TRL, "data.sources.NAME.hub"),
    "dataset_config_name": Foreign(HF, "data.sources.NAME.config"),
    "train_file": Foreign(HF, "data.sources.NAME.path"),
    "validation_file": Foreign(HF, "data.validation.NAME.path"),
    "dataset_text_field": Foreign(TRL, "data.sources.NAME.columns.text"),
    "save_steps": Foreign(HF, "checkpoint.every_steps"),
    "save_total_limit": Foreign(HF, "checkpoint.keep"),
    "metric_for_best_model": Foreign(HF, "checkpoint.best_metric", lambda theirs: str(theirs).removeprefix("eval_")),
    "load_best_model_at_end": Foreign(HF, "checkpoint.result", lambda theirs: "best" if theirs else "last"),
    "eval_steps": Foreign(HF, "eval.every_steps", _steps),
    "eval_on_start": Foreign(HF, "eval.at_start"),
    "early_stopping_patience": Foreign(HF, "eval.early_stopping_patience"),
    "report_to": Foreign(HF, "trackers.use", lambda theirs: [] if theirs == "none" else _as_list(theirs)),
    "wandb_project": Foreign(AXOLOTL, "trackers.project"),
    "router_aux_loss_coef": Foreign(HF, "moe.aux_loss_weight"),
}
"""Another tool's key (lower case, '-' as '_') = ours. Keys spelt like ours need no row."""

PER_DEVICE = ("per_device_train_batch_size", "micro_batch_size", "per_device_batch_size")
ACCUMULATION = ("gradient_accumulation_steps", "accumulation_steps")
BETAS = ("adam_beta1", "adam_beta2")
DEEPSPEED = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "deepspeed_plugin", "zero_stage")
"""Keys of the Trainer, Accelerate, Axolotl and LLaMA-Factory that name a DeepSpeed configuration or its ZeRO stage."""

ZERO_STAGE = re.compile(r"z(?:ero)?[_-]?(?:stage)?[_-]?([23])", re.IGNORECASE)
"""The stage in the name of a DeepSpeed configuration file, such as ds_z3_config.json or zero2_torch_compile.json."""


def translate(key: str, value: Any, siblings: Siblings) -> tuple[str, str] | None:
    """(whose key it is, "our.key = value") for another tool's key, or None for a word nobody uses."""
    folded = key.lower().replace("-", "_")
    if folded in PER_DEVICE or folded in ACCUMULATION:
        return HF, _batch(siblings)
    if folded in BETAS:
        return HF, f"train.betas = {quoted([siblings.get(BETAS[0], 0.9), siblings.get(BETAS[1], 0.999)])}"
    if folded in DEEPSPEED:
        return "DeepSpeed", f'parallel.strategy = "sharded", parallel.shard = {quoted(_shard(value))} in the profile'
    row = KEYS.get(folded)
    if row is None:
        return None
    ours = row.value(value)
    return row.tool, row.key if ours is None or isinstance(ours, dict) else f"{row.key} = {quoted(ours)}"


def _shard(value: Any) -> str:
    """What ranks share at the ZeRO stage that a DeepSpeed key names: a number, a file's name, or a table with a stage
    in it. Stage 3, which saves most memory, where it names none."""
    if isinstance(value, dict):
        inner = value.get("zero_optimization", value)
        value = inner.get("stage", inner.get("zero_stage")) if isinstance(inner, dict) else None
    found = ZERO_STAGE.search(value) if isinstance(value, str) else None
    return "gradients" if value == 2 or (found and found[1] == "2") else "parameters"


def _batch(siblings: Siblings) -> str:
    """Trainer's two numbers as ours: sequences in one forward pass, and per optimizer step on one device."""
    rows = _first_number(siblings, PER_DEVICE)
    accumulation = _first_number(siblings, ACCUMULATION)
    if rows is None:
        return f"train.batch_size = {accumulation or 'accumulation'} x the sequences of one forward pass x devices"
    return f"train.micro_batch = {rows}, train.batch_size = {rows * (accumulation or 1)} (times the devices)"


def _first_number(siblings: Siblings, keys: tuple[str, ...]) -> int | None:
    values = (siblings.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
