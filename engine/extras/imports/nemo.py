"""NeMo AutoModel's configurations: components with arguments. Defaults by its source: `recipes/`, `components/`."""

from __future__ import annotations

from typing import Any

from engine.config.files.text import quoted
from engine.extras.imports.draft import OFF, Draft
from engine.extras.imports.sources import name_of, place_of

RECIPES = ("TrainFinetuneRecipeForNextTokenPrediction", "FinetuneRecipeForVLM")
"""Its recipes that fine-tune on tokens."""

NO_EFFECT = {
    "dist_env": "the launcher starts the processes",
    "ci": "a note for its own tests",
    "rng": "train.seed seeds a run",
    "seed": "train.seed seeds a run",
    "checkpoint": "runs have their own folders; [checkpoint] sets when to save",
    "fsdp": "[parallel] sets devices and sharding",
    "separate_meshes": "[parallel] sets devices and sharding",
    "performance": "the engine chooses equivalent kernels",
    "compile": "train.compile compiles the layers; the result is the same",
    "nvtx": "profiling is not part of a recipe",
    "skypilot": "`tunedeck launch` sets where a job runs",
    "slurm": "`tunedeck launch` sets where a job runs",
}
OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "FusedAdam": "adamw", "SGD": "sgd"}


def read_nemo(draft: Draft) -> None:
    recipe = draft.take("recipe")
    name = str(recipe.get("_target_") if isinstance(recipe, dict) else recipe or RECIPES[0]).rpartition(".")[2]
    if name not in RECIPES:
        draft.refuse("recipe", name, "this training is not supported")
    for key in ("benchmark", "qat", "teacher_model", "kd_ratio", "kd_loss_fn", "flow_matching", "quantization_aware"):
        if draft.theirs.get(key) not in OFF:
            draft.refuse(key, draft.theirs[key], "this training is not supported")
    for key, reason in NO_EFFECT.items():
        if draft.take(key) is not None:
            draft.leave(key, reason)
    _schedule(draft)
    _model(draft, name)
    _method(draft)
    _optimizer(draft)
    _loss(draft)
    _distributed(draft)
    _lengths(draft)
    _data(draft)
    tracker = _table(draft, "wandb")
    if tracker:
        draft.set("trackers.use", ["wandb"], "wandb")
        if (project := tracker.pop("project", None)) is not None:
            draft.set("trackers.project", str(project), "wandb.project")
        for key in tracker:
            draft.leave(f"wandb.{key}", "a tracker's account and options come from its environment variables")


def _table(draft: Draft, key: str) -> dict[str, Any]:
    value = draft.take(key)
    return dict(value) if isinstance(value, dict) else {}


def _rest(draft: Draft, key: str, table: dict[str, Any]) -> None:
    """Hand what is left of a table to the tables of keys that all tools share."""
    draft.theirs.update({f"{key}.{name}": value for name, value in table.items() if name != "_target_"})


def _schedule(draft: Draft) -> None:
    steps = _table(draft, "step_scheduler")
    if isinstance(total := steps.pop("global_batch_size", None), int):
        draft.set("train.batch_size", total, "step_scheduler.global_batch_size")
    names = {"ckpt_every_steps": "checkpoint.every_steps", "val_every_steps": "eval.every_steps"}
    names |= {"num_epochs": "train.epochs", "max_steps": "train.max_steps"}
    for theirs, ours in names.items():
        if (value := steps.pop(theirs, None)) is not None:
            draft.set(ours, value, f"step_scheduler.{theirs}")
    for key in ("local_batch_size", "save_checkpoint_every_epoch", "gc_every_steps", "log_remote_every_steps"):
        if steps.pop(key, None) is not None:
            draft.leave(f"step_scheduler.{key}", "the plan chooses the micro-batch; [checkpoint] sets when to save")
    _rest(draft, "step_scheduler", steps)


def _model(draft: Draft, recipe: str) -> None:
    model = _table(draft, "model")
    target = str(model.pop("_target_", ""))
    if target.endswith("from_config"):
        draft.refuse("model._target_", target, "training from new weights is not imported")
    draft.has_images = recipe == "FinetuneRecipeForVLM"
    dtype = str(model.pop("torch_dtype", "bfloat16")).removeprefix("torch.")
    if dtype != "auto":
        draft.set("model.dtype", {"bf16": "bfloat16"}.get(dtype, dtype), "model.torch_dtype")
    draft.rounds_weights = dtype in ("bfloat16", "bf16", "auto")
    for key in (
        "use_liger_kernel",
        "use_sdpa_patching",
        "backend",
        "sdpa_method",
        "force_hf",
        "text_config",
        "rope_fusion",
    ):
        if (value := model.pop(key, None)) is not None and key != "text_config":
            draft.leave(f"model.{key}", "the engine chooses equivalent kernels")
        elif value is not None:
            draft.blanks["model.text_config"] = f"{quoted(value)}: values of a model's config cannot be changed"
    _rest(draft, "model", model)
    frozen: list[str] = []
    parts = _table(draft, "freeze_config")
    for key, part in (("freeze_vision_tower", "vision"), ("freeze_language_model", "language")):
        if parts.pop(key, None):
            frozen.append(part)
    if parts.pop("freeze_embeddings", False) and not isinstance(draft.theirs.get("peft"), dict):
        frozen.append("**.embed_tokens")
    if frozen and (draft.has_images or frozen != ["vision"]):
        draft.set("method.freeze", frozen, "freeze_config")
    for key, value in parts.items():
        if value not in OFF:
            draft.blanks[f"freeze_config.{key}"] = f"{quoted(value)}: list these parts in method.freeze"
    for key in ("processor", "tokenizer"):
        table = _table(draft, key)
        table.pop("_target_", None)
        path = table.pop("pretrained_model_name_or_path", None)
        if path is not None and path != draft.theirs.get("model.pretrained_model_name_or_path"):
            draft.set("model.tokenizer", str(path), f"{key}.pretrained_model_name_or_path")
        for name, value in table.items():
            if value not in OFF:
                draft.blanks[f"{key}.{name}"] = f"{quoted(value)}: set in the files of the tokenizer or processor"


def _method(draft: Draft) -> None:
    given = draft.take("peft")
    if not isinstance(given, dict):
        draft.set("method.kind", "full", "peft (none)")
        return
    peft = dict(given)
    draft.set("method.kind", "lora", "peft")
    draft.set("method.rank", peft.pop("dim", 8), "peft.dim")
    draft.set("method.alpha", peft.pop("alpha", 32), "peft.alpha")
    targets = peft.pop("target_modules", None)
    if peft.pop("match_all_linear", False):
        draft.set("method.targets", "all-linear", "peft.match_all_linear")
    elif targets not in OFF:
        names = targets if isinstance(targets, list) else [targets]
        draft.set(
            "method.targets",
            [str(name).replace("*", "**") if "." in str(name) else str(name) for name in names],
            "peft.target_modules",
        )
    else:
        draft.blanks["peft.target_modules"] = "does not list modules: set method.targets"
    if (excluded := peft.pop("exclude_modules", None)) not in OFF:
        names = excluded if isinstance(excluded, list) else [excluded]
        kept = [str(name).replace("*", "**") for name in names if "head" not in str(name)]
        if kept:
            draft.set("method.exclude", kept, "peft.exclude_modules")
    draft.set("method.dropout", peft.pop("dropout", 0.0), "peft.dropout")
    for key in ("use_triton", "dropout_position", "lora_A_init", "use_memory_efficient_lora", "lora_dtype"):
        value = peft.pop(key, None)
        if value not in (None, True, False, "post", "pre", "xavier", "kaiming", "uniform"):
            draft.blanks[f"peft.{key}"] = f"{quoted(value)} has no counterpart"
        elif value is not None:
            draft.leave(f"peft.{key}", "the engine chooses kernels and the random numbers of new adapters")
    if peft.pop("use_dora", False):
        draft.set("method.dora", True, "peft.use_dora")
    _rest(draft, "peft", peft)


def _optimizer(draft: Draft) -> None:
    optimizer, schedule = _table(draft, "optimizer"), _table(draft, "lr_scheduler")
    name = str(optimizer.pop("_target_", "torch.optim.AdamW")).rpartition(".")[2]
    if name not in OPTIMIZERS:
        draft.blanks["optimizer._target_"] = f"{quoted(name)}: set train.optimizer"
    else:
        draft.set("train.optimizer", OPTIMIZERS[name], "optimizer._target_")
        if name == "Adam" and optimizer.get("weight_decay"):
            draft.blanks["optimizer.weight_decay"] = (
                f"{optimizer.pop('weight_decay')}: Adam adds it to gradients; AdamW does not"
            )
    for key in ("foreach", "fused", "master_weights", "store_param_remainders", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if optimizer.pop(key, None) is not None:
            draft.leave(f"optimizer.{key}", "the engine sets the precision of optimizer state")
    _rest(draft, "optimizer", optimizer)
    style = schedule.pop("lr_decay_style", None)
    draft.set("train.scheduler", str(style or "constant"), "lr_scheduler.lr_decay_style" if style else "its default")
    for theirs, ours in (("min_lr", "train.min_learning_rate"), ("lr_warmup_steps", "train.warmup_steps")):
        if (value := schedule.pop(theirs, None)) is not None:
            draft.set(ours, value, f"lr_scheduler.{theirs}")
    for key, value in schedule.items():
        if value is not None:
            draft.blanks[f"lr_scheduler.{key}"] = f"{quoted(value)}: this learning rate schedule is not supported"
    clip = _table(draft, "clip_grad_norm")
    draft.set("train.max_grad_norm", clip.get("max_norm", 1.0), "clip_grad_norm.max_norm" if clip else "its default")


def _loss(draft: Draft) -> None:
    loss = _table(draft, "loss_fn")
    name = str(loss.pop("_target_", "MaskedCrossEntropy")).rpartition(".")[2]
    if "CrossEntropy" not in name and "CE" not in name:
        draft.refuse("loss_fn", name, "this training loss is not supported")
    draft.leave("loss_fn", f"{quoted(name)}: the loss is cross-entropy")


def _distributed(draft: Draft) -> None:
    table = _table(draft, "distributed")
    strategy = str(table.get("strategy", table.get("_target_", "fsdp2")))
    if "ddp" in strategy.lower():
        draft.set("parallel.strategy", "replicated", "distributed.strategy")
    for key in table:
        draft.leave(f"distributed.{key}", "[parallel] sets devices and sharding")


def _lengths(draft: Draft) -> None:
    packed = _table(draft, "packed_sequence")
    size = packed.pop("packed_sequence_size", 0)
    if isinstance(size, int) and size > 0:
        draft.set("data.packing", True, "packed_sequence.packed_sequence_size")
        draft.set("data.max_length", size, "packed_sequence.packed_sequence_size")
    for key in packed:
        draft.leave(f"packed_sequence.{key}", "a micro-batch is packed without padding")
    draft.unbounded_length = draft.get("data.max_length") is None


def _data(draft: Draft) -> None:
    for key, loader, ours in (
        ("dataset", "dataloader", "data.sources"),
        ("validation_dataset", "validation_dataloader", "data.validation"),
    ):
        options = _table(draft, loader)
        if key == "dataset" and options.get("shuffle") is False:
            draft.set("data.shuffle", False, f"{loader}.shuffle")
        elif options:
            draft.leave(loader, "rows are read when they are needed")
        entry = _table(draft, key)
        if entry:
            draft.set(ours, [_source(draft, entry, key)], key)


def _source(draft: Draft, entry: dict[str, Any], key: str) -> dict[str, Any]:
    builder = str(entry.pop("_target_", "")).rpartition(".")[2]
    place = next(
        (entry.pop(name) for name in ("path_or_dataset_id", "path_or_dataset", "dataset_name") if name in entry), ""
    )
    if isinstance(place, list):
        place = place[0] if place else ""
    source = {
        "name": name_of(str(place), []),
        **(place_of(draft, str(place), f"{key}.path") if place else {"path": "data/train.jsonl"}),
    }
    if (split := entry.pop("split", None)) is not None and "hub" in source:
        source["split"] = str(split)
    if (limit := entry.pop("limit_dataset_samples", None)) is not None:
        source["limit"] = limit
    if builder == "ChatDataset":
        source["format"] = "chat"
    else:
        source["format"] = "auto"
        draft.blanks[f"{key}._target_"] = (
            f"{quoted(builder)}: the rows of this builder are unknown: set path and format"
        )
    for name in ("tokenizer", "name", "shuffle_seed"):
        entry.pop(name, None)
    if (length := entry.pop("seq_length", None)) is not None:
        draft.set("data.max_length", length, f"{key}.seq_length")
    for name, value in entry.items():
        if value not in OFF:
            draft.blanks[f"{key}.{name}"] = f"{quoted(value)}: unknown key of a data set"
    return source
