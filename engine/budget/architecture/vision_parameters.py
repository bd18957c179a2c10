"""Every parameter of a vision encoder by dotted name and shape, as transformers 5.23 names them.

Try: `python -m pytest tests/budget/test_parameters.py`
"""

from __future__ import annotations

from functools import lru_cache

from engine.budget.architecture.parameter import Parameter, linear, vectors
from engine.budget.architecture.vision_encoder import VisionEncoder

VISION_MODULES = ("model.visual", "model.vision_tower", "model.multi_modal_projector")
"""Names of vision encoders and projectors in all families."""
_INSIDE = tuple(f"{module}." for module in VISION_MODULES)


def in_vision_encoder(name: str) -> bool:
    """Whether a parameter or module, by its dotted name in the whole model, belongs to a vision encoder or its
    projector."""
    return name.startswith(_INSIDE) or name in VISION_MODULES


def behind_vision_layers(name: str) -> bool:
    """Whether a parameter outside the encoder's layers, by its name in `vision_end_parameters`, is used after them, not
    before."""
    return "merger" in name or "projector" in name or "post_layernorm" in name


def vision_layer_prefix(encoder: VisionEncoder, layer: int) -> str:
    """The prefix of a vision layer's parameter names, such as "model.visual.blocks.3.", with the dot at its end."""
    return (
        f"model.vision_tower.encoder.layers.{layer}." if encoder.kind == "siglip" else f"model.visual.blocks.{layer}."
    )


@lru_cache(maxsize=64)
def vision_layer_parameters(encoder: VisionEncoder) -> tuple[Parameter, ...]:
    """Parameters of one layer of a vision encoder, named relative to the layer."""
    hidden, width = encoder.hidden, encoder.intermediate
    if encoder.kind == "siglip":
        return (
            *vectors("layer_norm1", hidden, bias=True),
            *(part for name in ("k_proj", "v_proj", "q_proj", "out_proj")
              for part in linear(f"self_attn.{name}", hidden, hidden, True)),
            *vectors("layer_norm2", hidden, bias=True),
            *linear("mlp.fc1", hidden, width, True),
            *linear("mlp.fc2", width, hidden, True),
        )  # fmt: skip
    older = encoder.kind == "qwen2_vl"
    into, out_of = (("fc1",), "fc2") if older else (("gate_proj", "up_proj"), "down_proj")
    return (
        *vectors("norm1", hidden, bias=older),
        *vectors("norm2", hidden, bias=older),
        *linear("attn.qkv", hidden, 3 * hidden, True),
        *linear("attn.proj", hidden, hidden, True),
        *(part for name in into for part in linear(f"mlp.{name}", hidden, width, True)),
        *linear(f"mlp.{out_of}", width, hidden, True),
    )


@lru_cache(maxsize=64)
def vision_end_parameters(encoder: VisionEncoder) -> tuple[Parameter, ...]:
    """Parameters outside the encoder's layers; the first is the patch embedding's weight, the last are the merger's."""
    hidden = encoder.hidden
    if encoder.kind == "siglip":
        embeddings = "model.vision_tower.embeddings"
        return (
            Parameter(f"{embeddings}.patch_embedding.weight", (hidden, *encoder.patch_shape)),
            Parameter(f"{embeddings}.patch_embedding.bias", (hidden,)),
            Parameter(f"{embeddings}.position_embedding.weight", (encoder.patches or 0, hidden)),
            *vectors("model.vision_tower.post_layernorm", hidden, bias=True),
            Parameter("model.multi_modal_projector.mm_input_projection_weight", (hidden, encoder.output)),
            *vectors("model.multi_modal_projector.mm_soft_emb_norm", hidden, bias=False),
        )
    merged = hidden * encoder.merge**2
    return (
        Parameter("model.visual.patch_embed.proj.weight", (hidden, *encoder.patch_shape)),
        *vectors("model.visual.merger.ln_q", hidden, bias=encoder.kind == "qwen2_vl"),
        *linear("model.visual.merger.mlp.0", merged, merged, True),
        *linear("model.visual.merger.mlp.2", merged, encoder.output, True),
    )
