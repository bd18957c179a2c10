"""Facts about the model families of transformers that a model's `config.json` does not contain.

One row per `model_type`: a family that is built from known parts is added as a row. Only facts live here; a config is
read in `engine.budget.architecture.facts`, parameters are named in `engine.budget.architecture.parameters`. Source of
every row: the configuration and modelling files of transformers 5.23 (`src/transformers/models/<model_type>/`).
`tests/budget/test_parameters.py` compares each parameter's name and shape with a model on the meta device.

Try: `python -c "from engine.budget.architecture.families import FAMILIES; print(sorted(FAMILIES))"`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["llama", "phi3", "gpt2", "mixtral", "qwen3_moe", "gpt_oss"]


@dataclass(frozen=True)
class Family:
    """Structure shared by all models of one `model_type`; `defaults` fill keys that a published config leaves out."""

    layout: Layout = "llama"
    qkv_bias: bool = False
    """The query, key and value projections have biases, whatever the config says."""
    bias_key: str | None = None
    """Config key that switches the biases of all four attention projections."""
    mlp_bias_key: str | None = None
    """Config key that switches the biases of the feed-forward layers."""
    qk_norm: bool = False
    norms_per_layer: int = 2
    wide_norm: bool = False
    """RMSNorm multiplies by its weight in fp32, before the cast."""
    full_every: int | None = None
    """With a sliding window, every `full_every`-th layer attends to all positions; None: no layer does."""
    rotary_by_kind: bool = False
    """Full and sliding layers have rotary tables of their own."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by a number that is stored as a buffer."""
    rotary_by_row: bool = False
    """Each row of a batch has rotary tables of its own, because positions in images have three axes."""
    default_attention: Literal["sdpa", "eager"] = "sdpa"
    """The kernel that transformers chooses by default: gpt-oss has no sdpa path."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "qwen2": Family(qkv_bias=True, defaults={"tie_word_embeddings": False}),
    "qwen2_vl_text": Family(qkv_bias=True, rotary_by_row=True, defaults={"tie_word_embeddings": False}),
    "qwen2_5_vl_text": Family(qkv_bias=True, rotary_by_row=True, defaults={"tie_word_embeddings": False}),
    "qwen3": Family(qk_norm=True, bias_key="attention_bias", defaults={"tie_word_embeddings": False, "head_dim": 128}),
    "llama": Family(bias_key="attention_bias", mlp_bias_key="mlp_bias", defaults={"tie_word_embeddings": False}),
    "mistral": Family(defaults={"tie_word_embeddings": False, "num_key_value_heads": 8}),
    "phi3": Family(layout="phi3", defaults={"tie_word_embeddings": False}),
    "gemma2": Family(
        bias_key="attention_bias",
        norms_per_layer=4,
        wide_norm=True,
        full_every=2,
        scaled_embedding=True,
        defaults={
            "tie_word_embeddings": True,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "sliding_window": 4096,
        },
    ),
    "gemma3_text": Family(
        bias_key="attention_bias",
        qk_norm=True,
        norms_per_layer=4,
        wide_norm=True,
        full_every=6,
        rotary_by_kind=True,
        scaled_embedding=True,
        defaults={
            "tie_word_embeddings": True,
            "vocab_size": 262208,
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
        },
    ),
    "gpt2": Family(layout="gpt2", qkv_bias=True, defaults={"tie_word_embeddings": True}),
    "mixtral": Family(
        layout="mixtral",
        defaults={
            "tie_word_embeddings": False,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": Family(
        layout="qwen3_moe", qk_norm=True, bias_key="attention_bias", defaults={"tie_word_embeddings": False}
    ),
    "gpt_oss": Family(
        layout="gpt_oss",
        bias_key="attention_bias",
        default_attention="eager",
        wide_norm=True,
        full_every=2,
        defaults={"tie_word_embeddings": False, "attention_bias": True, "head_dim": 64, "sliding_window": 128},
    ),
}
