"""The facts of a vision encoder that decide its memory, and how many tokens it makes of an image: patches run through
its layers, and `merge` × `merge` of them become one token of the decoder. Source: the vision configs of transformers
5.23 (`src/transformers/models/<model_type>/`), with their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

VisionKind = Literal["siglip", "qwen2_vl", "qwen2_5_vl"]


@dataclass(frozen=True)
class VisionEncoder:
    """The part of a model that turns images into hidden states of the decoder. Sizes are numbers of elements."""

    kind: VisionKind
    layers: int
    hidden: int
    intermediate: int
    heads: int
    activation: str
    patch_side: int
    """Pixels along a side of a patch."""
    patch_shape: tuple[int, ...]
    """Channels, frames (if the encoder takes several), height and width."""
    merge: int
    """`merge` × `merge` patches become one token."""
    output: int
    """Width of the encoder's output, which is the decoder's hidden size."""
    patches: int | None = None
    """Patches per image if all images are resized to one size; None if the number depends on the image's size."""
    most_pixels: int | None = None
    """Pixels of the largest image that the published processor returns; only for encoders of images of any size."""
    window: int | None = None
    """Patches per attention window, in layers with windows; None if no layer has one."""
    full_layers: tuple[int, ...] = ()
    """In an encoder with windows: the indices of the layers that attend to whole images."""

    @property
    def patch_values(self) -> int:
        return prod(self.patch_shape)

    @property
    def bidirectional(self) -> bool:
        """Tokens of an image attend in both directions in the decoder, which then needs an attention mask."""
        return self.kind == "siglip"

    @property
    def pixels_per_token(self) -> int:
        """Pixels that become one token, in an encoder that takes images of any size."""
        return (self.patch_side * self.merge) ** 2

    def patches_of(self, max_pixels: int | None) -> int:
        """Patches of the largest image that `max_pixels` allows (None: the processor's own limit). A Qwen processor
        brings both sides to multiples of patch × merge within it (`smart_resize` in transformers'
        image_processing_qwen2_vl.py)."""
        if self.patches is not None:
            return self.patches
        pixels = max_pixels or self.most_pixels or 0
        return max(1, pixels // self.pixels_per_token) * self.merge**2

    def tokens_of(self, max_pixels: int | None) -> int:
        """Tokens of the largest image that `max_pixels` allows (None: that the processor allows)."""
        return self.patches_of(max_pixels) // self.merge**2


QWEN_MOST_PIXELS = 12_845_056
"""`max_pixels` in the preprocessor_config.json of the published Qwen2-VL and Qwen2.5-VL models: 16,384 tokens."""


def _siglip(vision: Mapping[str, Any], config: Mapping[str, Any], output: int) -> VisionEncoder:
    """Gemma 3: images of one size, pooled to mm_tokens_per_image tokens, then projected to the width `output`."""
    patch, channels = int(vision.get("patch_size", 16)), int(vision.get("num_channels", 3))
    across, tokens = int(vision.get("image_size", 224)) // patch, int(config.get("mm_tokens_per_image", 256))
    return VisionEncoder(
        kind="siglip",
        layers=int(vision.get("num_hidden_layers", 12)),
        hidden=int(vision.get("hidden_size", 768)),
        intermediate=int(vision.get("intermediate_size", 3072)),
        heads=int(vision.get("num_attention_heads", 12)),
        activation=str(vision.get("hidden_act", "gelu_pytorch_tanh")),
        patch_side=patch,
        patch_shape=(channels, patch, patch),
        merge=across // int(tokens**0.5),
        output=output,
        patches=across**2,
    )


def _qwen2_vl(vision: Mapping[str, Any], config: Mapping[str, Any], output: int) -> VisionEncoder:
    hidden = int(vision.get("embed_dim", 1280))
    return VisionEncoder(
        kind="qwen2_vl",
        hidden=hidden,
        intermediate=hidden * int(vision.get("mlp_ratio", 4)),
        activation=str(vision.get("hidden_act", "quick_gelu")),
        output=int(vision.get("hidden_size", output)),
        **_qwen_patches(vision),
    )


def _qwen2_5_vl(vision: Mapping[str, Any], config: Mapping[str, Any], output: int) -> VisionEncoder:
    patch = int(vision.get("patch_size", 14))
    return VisionEncoder(
        kind="qwen2_5_vl",
        hidden=int(vision.get("hidden_size", 3584)),
        intermediate=int(vision.get("intermediate_size", 3420)),
        activation=str(vision.get("hidden_act", "silu")),
        output=int(vision.get("out_hidden_size", output)),
        window=(int(vision.get("window_size", 112)) // patch) ** 2,
        full_layers=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
        **_qwen_patches(vision),
    )


def _qwen_patches(vision: Mapping[str, Any]) -> dict[str, Any]:
    """What Qwen2-VL and Qwen2.5-VL give under the same keys. Not in_chans, which transformers does not use."""
    patch = int(vision.get("patch_size", 14))
    return {
        "layers": int(vision.get("depth", 32)),
        "heads": int(vision.get("num_heads", 16)),
        "patch_side": patch,
        "patch_shape": (int(vision.get("in_channels", 3)), int(vision.get("temporal_patch_size", 2)), patch, patch),
        "merge": int(vision.get("spatial_merge_size", 2)),
        "most_pixels": QWEN_MOST_PIXELS,
    }


Reader = Callable[[Mapping[str, Any], Mapping[str, Any], int], VisionEncoder]

VISION_ENCODERS: dict[str, tuple[str, Reader]] = {
    "gemma3": ("gemma3_text", _siglip),
    "qwen2_vl": ("qwen2_vl_text", _qwen2_vl),
    "qwen2_5_vl": ("qwen2_5_vl_text", _qwen2_5_vl),
}
"""The decoder's model_type and a reader of the vision config, by model_type of a vision-language model."""


def read_vision_encoder(config: Mapping[str, Any], output: int) -> VisionEncoder:
    """`output` is the decoder's width."""
    _decoder, read = VISION_ENCODERS[str(config["model_type"])]
    vision = {key: value for key, value in dict(config.get("vision_config") or {}).items() if value is not None}
    return read(vision, config, output)
