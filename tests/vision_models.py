"""Tiny vision-language models with their tokenizers and image processors, and data with images that tests draw."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
BOX_TOKENS = ("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>")
QWEN_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
GEMMA_TEMPLATE = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
GEMMA_TOKENS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")


def write_qwen2_vl(
    folder: Path, *, family: str = "qwen2_vl", smallest: int = 56**2, largest: int = 112**2, tokenizer: Any = None
) -> Path:
    """A random Qwen2-VL or Qwen2.5-VL of two decoder and two encoder layers; `tokenizer` is by default of bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tokenizer or make_tokenizer((*IMAGE_TOKENS, *BOX_TOKENS), QWEN_TEMPLATE)
    start, pad, end = (int(tokenizer.convert_tokens_to_ids(token)) for token in IMAGE_TOKENS)
    vision = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    wide = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    if family == "qwen2_5_vl":
        wide = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    config = AutoConfig.for_model(
        family,
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
            "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={**vision, **wide},
        image_token_id=pad, vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(size={"shortest_edge": smallest, "longest_edge": largest}).save_pretrained(folder)
    return folder


def write_gemma3(folder: Path) -> Path:
    """A random Gemma 3 with a vision encoder, images of 28 × 28 pixels and four tokens, and a byte vocabulary."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = make_tokenizer(GEMMA_TOKENS, GEMMA_TEMPLATE)
    begin, part, end = (int(tokenizer.convert_tokens_to_ids(token)) for token in GEMMA_TOKENS)
    config = AutoConfig.for_model(
        "gemma3",
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 64,
            "max_position_embeddings": 1024, "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 7, "vision_use_head": False,
        },
        mm_tokens_per_image=4, boi_token_index=begin, image_token_index=part, eoi_token_index=end,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Gemma3ImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


def make_tokenizer(tokens: tuple[str, ...], template: str, named: dict[str, Any] | None = None) -> Any:
    """The byte tokenizer with more special tokens, of which some are attributes of the tokenizer, by name."""
    from engine.model.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.extra_special_tokens, *tokens]})
    tokenizer.chat_template = template
    if named:
        tokenizer.SPECIAL_TOKENS_ATTRIBUTES = tokenizer.SPECIAL_TOKENS_ATTRIBUTES + list(named)
        tokenizer._set_model_specific_special_tokens(special_tokens=named)
    return tokenizer


def write_boxes(folder: Path, *, count: int, sizes: tuple[tuple[int, int], ...] = ((112, 84),), seed: int = 0) -> Path:
    """A detection source of `count` images of `sizes` (width, height), with one dark box each: data.jsonl, where
    objects.bbox is (top, left, bottom, right) in shares of the image, and the images beside it."""
    drawn, folder = random.Random(seed), folder.absolute()
    (folder / "images").mkdir(parents=True, exist_ok=True)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(count):
            width, height = sizes[number % len(sizes)]
            left, top = drawn.uniform(0.0, 0.6), drawn.uniform(0.0, 0.6)
            right, bottom = left + 0.3, top + 0.3
            image = Image.new("RGB", (width, height), (230, 220, 200))
            corners = (left * width, top * height, right * width, bottom * height)
            ImageDraw.Draw(image).rectangle(corners, fill=(10, 20 * (number % 10), 90))
            image.save(folder / "images" / f"{number}.png")
            objects = {"bbox": [[top, left, bottom, right]], "category_name": ["table"]}
            file.write(json.dumps({"image": f"images/{number}.png", "objects": objects}) + "\n")
    return folder / "data.jsonl"


def detection_source(path: Path, **keys: Any) -> dict[str, Any]:
    """The table of a source as `write_boxes` writes it."""
    columns = {"image": "image", "boxes": "objects.bbox", "labels": "objects.category_name"}
    return {
        "name": "boxes", "path": str(path), "format": "detection", "prompt": "Find the table.", "columns": columns,
        "box_order": "yxyx", "box_scale": "unit", **keys,
    }  # fmt: skip
