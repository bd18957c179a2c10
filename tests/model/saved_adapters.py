"""Adapters as strangers save them: of any type of the installed peft, on tiny models. No test lives here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.model.tokenizer import byte_tokenizer

WEIGHTS = "adapter_model.safetensors"


def lora(**changes: Any) -> LoraConfig:
    """A plain LoRA on the attention, with `changes` in its config."""
    return LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes}
    )


def foreign(
    base: Path, folder: Path, config: PeftConfig, *, rows: int | None = None, dtype: torch.dtype | None = None
) -> Path:
    """Save an adapter of `base` as peft does, with everything that it trains moved away from its initial value. `rows`:
    of the embedding, if it was resized; `dtype`: of the saved weights. Returns `folder`."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if rows is not None:
            model.resize_token_embeddings(rows)
        adapted = get_peft_model(model, config)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)
        adapted.save_pretrained(str(folder))
    byte_tokenizer().save_pretrained(folder)
    if dtype is not None:
        rewrite(folder, lambda state: {name: _in(dtype, name, tensor) for name, tensor in state.items()})
    return folder


def _in(dtype: torch.dtype, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """In `dtype`, unless it is the base's weight, which peft saves with an adapter on the embedding or the head."""
    return tensor if ".base_layer.weight" in name else tensor.to(dtype)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """Replace the tensors of a saved adapter by what `change` makes of them; returns the folder."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def opened_by_peft(base: Path, folder: Path, rows: int | None = None) -> PeftModel:
    """The adapter on its base, opened with peft and transformers alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if rows is not None:
            model.resize_token_embeddings(rows)
        return PeftModel.from_pretrained(model, str(folder), is_trainable=True).eval()
