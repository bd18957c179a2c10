"""Tells from a model's config whether its family and attention kernel keep packed documents from influencing each
other.

Facts of transformers 5.23: `masking_utils.find_packed_sequence_indices` builds a block mask from restarting position
ids, for any batch size, when there is no attention mask; `modeling_flash_attention_utils._is_packed_sequence` does so
only for a batch of one, so `engine.model.decoder` flattens packed batches under flash. tests/model/test_packing.py
checks this with real models.

Try: `python -m pytest tests/model/test_packing.py`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UsageError
from engine.spec.schema.recipe import Recipe

STATEFUL_LAYERS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "rwkv", "ssm", "moe_mamba", "hybrid")
"""Layer types with a state that passes from token to token, which restarting position ids do not reset."""
STATEFUL_FAMILIES = frozenset(
    {
        "mamba",
        "mamba2",
        "falcon_mamba",
        "rwkv",
        "recurrent_gemma",
        "jamba",
        "bamba",
        "zamba",
        "zamba2",
        "falcon_h1",
        "nemotron_h",
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "qwen3_next",
        "plamo2",
        "xlstm",
        "minimax",
        "kimi_linear",
        "olmo_hybrid",
    }
)
"""Model types with such layers whatever their config says."""
POSITION_BLIND_FAMILIES = frozenset({"bloom", "mpt", "codegen", "ctrl", "xlnet", "openai-gpt", "gpt_neo"})
"""Model types that take no position ids, or build their mask without them."""


def why_documents_mix(facts: Mapping[str, Any]) -> str | None:
    """The reason, as a sentence, why documents of one packed row would influence each other; None if they would not."""
    model_type = str(facts.get("model_type", "unknown"))
    layers = {str(layer) for layer in facts.get("layer_types") or ()}
    if model_type in STATEFUL_FAMILIES or layers & set(STATEFUL_LAYERS):
        return f"{model_type} carries a state from token to token, so packed documents would run into each other"
    if model_type in POSITION_BLIND_FAMILIES or facts.get("alibi"):
        return f"{model_type} does not take position ids, so nothing marks where a packed document starts"
    return None


def refuse_unsafe_packing(facts: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise UsageError if a recipe packs documents that would influence each other; `facts` are the model's config."""
    reason = why_documents_mix(facts) if recipe.data.packing else None
    if reason is not None:
        raise UsageError(
            f"data.packing = true, but {reason}",
            expected="a model whose attention keeps the documents of a row apart",
            fix="set data.packing = false",
        )
