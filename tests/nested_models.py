"""Tiny random models of families whose config nests the language model beside a vision encoder, in the class in which
they are published, with a byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 1_000
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
}  # fmt: skip
AXES: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
PATCHES: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 14, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
IDS: dict[str, Any] = {"image_token_id": 999, "video_token_id": 998}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

NESTED: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {**TEXT, **LINEAR, "rope_parameters": {**AXES, "partial_rotary_factor": 1.0}},
        "vision_config": {**PATCHES, "deepstack_visual_indexes": []}, **IDS,
    },
    "llama4": {
        "text_config": {
            **TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
        },
        "vision_config": {
            **VISION, "intermediate_size": 64, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        "image_token_index": 999,
    },
    "mllama": {
        "text_config": {**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {
            **VISION, "attention_heads": 2, "num_global_layers": 1, "intermediate_layers_indices": [0],
            "vision_output_dim": 32, "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]],
        },
        "image_token_index": 999,
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 64}, "vision_config": {**VISION, "vision_use_head": False},
        "mm_tokens_per_image": 4, "image_token_index": 999, "boi_token_index": 998, "eoi_token_index": 997,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8}, "image_token_index": 999,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": AXES},
        "vision_config": {**PATCHES, "deepstack_visual_indexes": [0]}, **IDS,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": {**VISION, "image_size": [28, 28]},
        "image_token_id": 999,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "image_token_id": 999,
        "scale_factor": 2,
    },
    "cohere2_vision": {
        "text_config": {
            "model_type": "cohere2", **TEXT, "logit_scale": 0.25, "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        "image_token_id": 999,
    },
}  # fmt: skip
"""Configs by model type. Command A Vision (`cohere2_vision`) does not scale its logits, as its text class does."""
NEEDS_IMAGES: dict[str, Any] = {
    **{key: value for key, value in TEXT.items() if key != "num_key_value_heads"}, "cross_layer_interval": 1,
    "vision_config": {
        "embed_dim": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    },
}  # fmt: skip
"""A config of `idefics`, whose forward raises an error without images, which its signature does not tell."""


def write_nested(folder: Path, family: str, **changes: Any) -> Path:
    """Write a model of `family` with random weights and the byte tokenizer; `changes` override keys of its config."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from engine.model.tokenizer import byte_tokenizer

    config = AutoConfig.for_model(family, **{**NESTED.get(family, {}), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.isfinite().all() or not parameter.any():
                    parameter.normal_(std=0.1)
        model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
