"""Compares preference learning with TRL: its trainers on the rows of a run, in the same order, and the trained weights
of both. Not a test module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine.config.schema.run import RunSpec
from engine.data.prepare import prepare_data
from engine.data.tokens import TokenData
from engine.device.open import open_device
from engine.journal.directory import RunDirectory
from engine.model.load import load_model
from engine.model.loaded import plain_name
from engine.model.tokenizer import load_tokenizer

STEPS, LONG_STEPS, BATCH = 10, 30, 4
TRAIN: dict[str, Any] = {
    "max_steps": STEPS,
    "batch_size": BATCH,
    "learning_rate": 1e-3,
    "scheduler": "linear",
    "max_grad_norm": 1.0,
}
WEIGHTS = {STEPS: 2e-5, LONG_STEPS: 1e-5}
"""Largest difference of a weight, by steps."""


def train_of(steps: int) -> dict[str, Any]:
    """The recipe's table [train]. Over more steps `eps` is larger: AdamW moves a weight by a whole learning rate for a
    gradient near zero, of which both sides know the sign no better than rounding allows."""
    return {**TRAIN, "max_steps": steps, **({"eps": 1e-5} if steps > STEPS else {})}


class AsTheyAre:
    """For a trainer of TRL: takes rows that are tokenised already, and keeps the loss of every step."""

    seen: list[float]

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = super()
        found = trainer.compute_loss(*args, **kwargs)
        self.seen = [*getattr(self, "seen", []), float((found[0] if isinstance(found, tuple) else found).detach())]
        return found


def arguments_of(spec: RunSpec, folder: Path) -> dict[str, Any]:
    """The arguments of TRL's trainers that are those of the run."""
    train = spec.recipe.train
    return {
        "output_dir": str(folder),
        "max_steps": train.max_steps,
        "per_device_train_batch_size": train.batch_size,
        "learning_rate": train.learning_rate,
        "adam_epsilon": train.eps,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "gradient_checkpointing": False,
    }


def rows_of(spec: RunSpec) -> tuple[Any, TokenData]:
    """(tokenizer, training data) of a run."""
    tokenizer = load_tokenizer(spec.recipe.model)
    return tokenizer, prepare_data(spec, tokenizer).train


def prompt_tokens(row: Any) -> int:
    return int(np.flatnonzero(row.labels != -100)[0])


def started(spec: RunSpec) -> Any:
    """The model as a run starts with it."""
    device = open_device(spec)
    with device.activate():
        return load_model(spec, device, load_tokenizer(spec.recipe.model)).model


def weights_of(base: Path, place: RunDirectory, method: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The trained weights of a finished run, opened by peft or transformers."""
    if method["kind"] == "full":
        model: Any = AutoModelForCausalLM.from_pretrained(place.path / "model", dtype=torch.float32)
        return dict(model.named_parameters())
    whole = AutoModelForCausalLM.from_pretrained(base / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(whole, str(place.path / "adapter"))
    return {plain_name(name): weight for name, weight in model.named_parameters() if ".lora_" in name}


def differing_weights(found: dict[str, torch.Tensor], model: Any, largest: float) -> dict[str, float]:
    """Of a model that TRL trained: the weights that are further than `largest` from those in `found`, and how far."""
    trained = {plain_name(name): weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert found.keys() == trained.keys()
    apart = {name: float((found[name] - weight).detach().abs().max()) for name, weight in trained.items()}
    return {name: distance for name, distance in apart.items() if distance > largest}
