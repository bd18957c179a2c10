"""Compares parameter names and shapes with transformers' classes on the meta device (no memory, no download)."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from engine.architecture.facts import from_config
from engine.architecture.lookup import shipped_entries
from engine.architecture.parameters import (
    layer_parameters,
    layer_prefix,
    outer_parameters,
    parameter_count,
    vision_end_parameters,
    vision_layer_parameters,
    vision_layer_prefix,
)
from engine.errors import UnknownArchitectureError

ENTRIES = list(shipped_entries())


def has_closed_form(entry: dict[str, Any]) -> bool:
    try:
        from_config(entry["config"])
    except UnknownArchitectureError:
        return False
    return True


CLOSED_FORM = [entry for entry in ENTRIES if has_closed_form(entry)]
SIMULATED = [entry for entry in ENTRIES if entry not in CLOSED_FORM]

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
UNSHIPPED: dict[str, dict[str, Any]] = {
    "phi3": {"model_type": "phi3", **SMALL, "pad_token_id": 0},
    "gpt2": {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "llama with biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "qwen3_moe with dense layers": {
        "model_type": "qwen3_moe",
        **SMALL,
        "num_hidden_layers": 6,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
    },
    "qwen2_vl that merges nine patches": {
        "model_type": "qwen2_vl",
        "text_config": {**SMALL, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "vision_config": {"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 64, "spatial_merge_size": 3},
    },
    "qwen3 with biases": {
        "model_type": "qwen3",
        **SMALL,
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}


def meta_model(config: dict[str, Any]) -> Any:
    """The model on the meta device: of the class that the config names, else of transformers' automatic one."""
    import torch
    import transformers

    from engine.model.config import auto_class

    facts = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    found = transformers.AutoConfig.for_model(config["model_type"], **copy.deepcopy(facts))
    named = config.get("architectures")
    with torch.device("meta"):
        return getattr(transformers, named[0])._from_config(found) if named else auto_class(found).from_config(found)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the parameters that the budget counts for a config."""
    arch = from_config(config)
    named = {parameter.name: parameter.shape for parameter in outer_parameters(arch)}
    for layer in range(arch.layers):
        prefix, parameters = layer_prefix(arch, layer), layer_parameters(arch, arch.is_dense(layer))
        named |= {prefix + parameter.name: parameter.shape for parameter in parameters}
    if arch.vision_encoder:
        named |= {parameter.name: parameter.shape for parameter in vision_end_parameters(arch.vision_encoder)}
        for layer in range(arch.vision_encoder.layers):
            prefix = vision_layer_prefix(arch.vision_encoder, layer)
            named |= {
                prefix + parameter.name: parameter.shape for parameter in vision_layer_parameters(arch.vision_encoder)
            }
    return named


@pytest.mark.parametrize("entry", CLOSED_FORM, ids=lambda entry: entry["ids"][0])
def test_shipped_model_has_the_parameters_of_transformers(entry: dict[str, Any]) -> None:
    model = meta_model(entry["config"])
    assert shapes(entry["config"]) == {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert parameter_count(from_config(entry["config"])) == entry["parameters"] == model.num_parameters()


@pytest.mark.parametrize("entry", SIMULATED, ids=lambda entry: entry["ids"][0])
def test_shipped_model_without_a_closed_form_opens_with_its_published_parameters(entry: dict[str, Any]) -> None:
    assert meta_model(entry["config"]).num_parameters() == entry["parameters"]


@pytest.mark.parametrize("name", UNSHIPPED)
def test_other_families_have_the_parameters_of_transformers(name: str) -> None:
    config = UNSHIPPED[name]
    model = meta_model(config)
    assert shapes(config) == {name: tuple(value.shape) for name, value in model.named_parameters()}


def test_every_entry_says_where_it_comes_from() -> None:
    assert all(entry["source"] and entry["ids"] for entry in ENTRIES)


def test_no_model_id_is_shipped_twice() -> None:
    ids = [model.lower() for entry in ENTRIES for model in entry["ids"]]
    assert len(ids) == len(set(ids))
