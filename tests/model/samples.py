"""Tiny models of many families, run specs around them, and batches. No test lives here."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.config.schema.data import Data, Source
from engine.config.schema.recipe import Method, Model, Moe, Recipe, Train
from engine.config.schema.run import Device, Profile, RunSpec
from engine.data.batch import Batch
from engine.device.cpu import CpuDevice
from engine.model.load import load_model
from engine.model.loaded import LoadedModel
from engine.model.tokenizer import byte_tokenizer, load_tokenizer

VOCABULARY = 264
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 48,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": _SIZES,
    "qwen3": _SIZES,
    "llama": _SIZES,
    "mistral": {**_SIZES, "sliding_window": 8},
    "gemma2": {**_SIZES, "sliding_window": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_SIZES, "sliding_window": 8},
    "gemma4_text": {
        **_SIZES,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "phi3": _SIZES,
    "gpt2": _GPT2,
    "gpt_neox": {**_SIZES, "rotary_pct": 1.0},
    "mixtral": {**_SIZES, **_MOE},
    "qwen3_moe": {**_SIZES, **_MOE},
    "olmo2": _SIZES,
    "cohere": {**_SIZES, "logit_scale": 0.25},
    "granite": {**_SIZES, "logits_scaling": 4.0},
}

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": FAMILIES["mixtral"],
    "qwen3_moe": FAMILIES["qwen3_moe"],
    "qwen2_moe": {**_SIZES, **_MOE, "shared_expert_intermediate_size": 16},
    "olmoe": {**_SIZES, **_MOE},
    "flex_olmo": {**_SIZES, **_MOE},
    "gpt_oss": {**_SIZES, **_MOE},
    "minimax": {**_SIZES, **_MOE},
    "qwen3_next": {**_SIZES, **_MOE, "shared_expert_intermediate_size": 16},
}
"""Mixtures of experts whose routers choose by the highest probability."""


@lru_cache(maxsize=1)
def cpu() -> CpuDevice:
    """The plain CPU."""
    return CpuDevice(4 * 2**30)


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    """Write a model folder with random weights of `family` and the byte tokenizer; returns the folder. `changes`
    override keys of the family's config in FAMILIES; for a family that is not there, they are the whole config."""
    config = AutoConfig.for_model(family, **{**FAMILIES.get(family, {}), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(11)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run_spec(
    model: str = "builtin:tiny",
    *,
    method: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    moe: dict[str, Any] | None = None,
    device: Any = "cpu",
    **model_keys: Any,
) -> RunSpec:
    """A run spec for `model`, by default on the CPU. `method`, `train`, `moe` and `model_keys` are keys of these tables
    of the recipe."""
    recipe = Recipe(
        name="test",
        model=Model(id=model, **model_keys),
        method=Method(**(method or {})),
        data=Data(sources=[Source(name="dates", path="builtin:dates")]),
        train=Train(**(train or {})),
        moe=Moe(**(moe or {})),
    )
    profile = Profile(name="test", device=Device(kind=device, memory_gib=4.0))
    return RunSpec(name="test", profile=profile, recipe=recipe)


def load(spec: RunSpec, device: Any = None) -> LoadedModel:
    """Load the tokenizer and the model of a run spec, by default onto the CPU."""
    return load_model(spec, device or cpu(), load_tokenizer(spec.recipe.model))


def load_family(folder: Path, family: str, **options: Any) -> LoadedModel:
    """A tiny model of `family`, written to and loaded from `folder`."""
    return load(run_spec(str(write_model(folder / family, family)), **options))


def batch_of(rows: int = 3, length: int = 12, *, masked: int = 4, seed: int = 0) -> Batch:
    """A batch of random tokens [rows, length]. The first `masked` tokens of each row are not targets; the last row ends
    with three tokens of padding."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, 256, (rows, length), generator=generator)
    labels_BS = ids_BS.clone()
    labels_BS[:, :masked] = -100
    mask_BS = torch.ones_like(ids_BS)
    ids_BS[-1, -3:], labels_BS[-1, -3:], mask_BS[-1, -3:] = 258, -100, 0
    targets = int((labels_BS[:, 1:] != -100).sum())
    return Batch(ids_BS, labels_BS, mask_BS, None, tuple(range(rows)), targets)


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own logits in evaluation mode."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits_BSV: torch.Tensor = model(input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS).logits
    model.train(was_training)
    return logits_BSV


def disturb(loaded: LoadedModel) -> None:
    """Move everything that learns away from its initial value, as training would (LoRA's B starts at zero)."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in loaded.trainable():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def tokenizer_at(folder: Path) -> Any:
    """Load the tokenizer in `folder` with transformers alone."""
    return AutoTokenizer.from_pretrained(folder)


def name_base(adapter: Path, base: Path) -> None:
    """Write a folder into a saved adapter's config as its base, as peft does: here it is outside the run that would
    tell its base."""
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(base)}))
