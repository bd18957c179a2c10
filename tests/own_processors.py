"""Tiny random models of families whose images are what their own processor makes of them, in the class in which they
are published, with their processor's files and a byte tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.nested_models import AXES, LINEAR, PATCHES, TEXT, VISION
from tests.vision_models import QWEN_TEMPLATE, make_tokenizer


class Family(NamedTuple):
    """What differs between families."""

    config: Callable[[dict[str, int]], dict[str, Any]]
    """The model's config, from the ids of `tokens`."""
    tokens: tuple[str, ...]
    """Special tokens of images."""
    place: str
    """What the chat template writes for an image."""
    image_processor: str
    """transformers' class; its files name it."""
    settings: dict[str, Any]
    """Of the image processor."""
    processor: Mapping[str, Any] = MappingProxyType({})
    """Further settings of the processor."""
    named: Mapping[str, str] = MappingProxyType({})
    """Tokens that the tokenizer has as attributes."""


GRID = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 56**2, "longest_edge": 112**2},
}
QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SPLIT = (
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)),
)
GLM = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>")


def _qwen(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {**TEXT, "rope_parameters": AXES},
        "vision_config": {**PATCHES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
    }  # fmt: skip


def _qwen3_5(ids: dict[str, int]) -> dict[str, Any]:
    text = {**TEXT, **LINEAR, "rope_parameters": {**AXES, "partial_rotary_factor": 1.0}}
    return {**(found := _qwen(ids)), "text_config": text,
            "vision_config": {**found["vision_config"], "deepstack_visual_indexes": []}}  # fmt: skip


def _glm4v(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {**TEXT, "rope_parameters": {**AXES, "partial_rotary_factor": 1.0}},
        "vision_config": {**PATCHES, "image_size": 112}, "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"], "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"], "video_start_token_id": ids["<|begin_of_video|>"],
        "video_end_token_id": ids["<|end_of_video|>"],
    }  # fmt: skip


def _mistral3(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **VISION, "image_size": 112, "head_dim": 8},
        "image_token_index": ids["[IMG]"], "spatial_merge_size": 2,
    }  # fmt: skip


def _llava(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama", **TEXT}, "image_token_index": ids["<image>"],
        "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 16},
    }  # fmt: skip


def _llava_next(ids: dict[str, int]) -> dict[str, Any]:
    return {**_llava(ids), "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}


def _internvl(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": {**VISION, "image_size": [28, 28]},
        "image_token_id": ids["<IMG_CONTEXT>"], "image_seq_length": 1,
    }  # fmt: skip


def _smolvlm(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "image_token_id": ids["<image>"],
        "scale_factor": 2,
    }  # fmt: skip


def _gemma4(ids: dict[str, int]) -> dict[str, Any]:
    """All parts of Gemma 4 E4B: an encoder of audio, inputs of each layer, and layers that share keys and values."""
    return {
        "text_config": {
            **TEXT, "sliding_window": 64, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 8,
            "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
        },
        "audio_config": {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24,
            "subsampling_conv_channels": [8, 4],
        },
        "vision_config": {
            **VISION, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 16, "position_embedding_size": 64,
        },
        "image_token_id": ids["<|image|>"], "boi_token_id": ids["<|image>"], "eoi_token_id": ids["<image|>"],
        "video_token_id": ids["<|video|>"], "audio_token_id": ids["<|audio|>"], "boa_token_id": ids["<|audio>"],
        "eoa_token_index": ids["<audio|>"],
    }  # fmt: skip


GEMMA = ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>")
SMALL = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
SPLITTING = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
FAMILIES: dict[str, Family] = {
    "qwen3_vl": Family(_qwen, QWEN, "".join(QWEN[:3]), "Qwen2VLImageProcessor", GRID),
    "qwen3_5": Family(_qwen3_5, QWEN, "".join(QWEN[:3]), "Qwen2VLImageProcessor", GRID),
    "glm4v": Family(_glm4v, GLM, "".join(GLM[:3]), "Glm4vImageProcessor", GRID),
    "mistral3": Family(
        _mistral3, ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]", "PixtralImageProcessor",
        {"size": {"longest_edge": 112}, "patch_size": 14}, {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "llava": Family(
        _llava, ("<image>",), "<image>", "LlavaImageProcessor", SMALL,
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": Family(
        _llava_next, ("<image>",), "<image>", "LlavaNextImageProcessor",
        {**SMALL, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "internvl": Family(
        _internvl, ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"), "<IMG_CONTEXT>", "GotOcr2ImageProcessor",
        {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        {"image_seq_length": 1}, {"start_image_token": "<img>", "end_image_token": "</img>",
                                  "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
    ),
    "gemma4": Family(
        _gemma4, GEMMA, "<|image|>", "Gemma4ImageProcessor",
        {"patch_size": 16, "max_soft_tokens": 70, "pooling_kernel_size": 3}, {},
        {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>", "boa_token": "<|audio>",
         "audio_token": "<|audio|>", "eoa_token": "<audio|>"},
    ),
    "smolvlm": Family(_smolvlm, SPLIT, "<image>", "SmolVLMImageProcessor", SPLITTING, {"image_seq_len": 1}),
    "idefics3": Family(_smolvlm, SPLIT, "<image>", "Idefics3ImageProcessor", SPLITTING, {"image_seq_len": 1}),
}  # fmt: skip


def write_own(folder: Path, name: str) -> Path:
    """Write a random model of a family, its byte tokenizer, and the files of its processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    family = FAMILIES[name]
    template = QWEN_TEMPLATE.replace("".join(QWEN[:3]), family.place)
    tokenizer = make_tokenizer(family.tokens, template, dict(family.named))
    ids = dict(zip(family.tokens, map(int, tokenizer.convert_tokens_to_ids(list(family.tokens))), strict=True))
    config = AutoConfig.for_model(name, **family.config(ids))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"image_processor_type": family.image_processor, **family.settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps(dict(family.processor)))
    return folder
