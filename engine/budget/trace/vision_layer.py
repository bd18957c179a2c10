"""Traces one layer of a vision encoder, with the local variables of its modelling file; a patch counts as a token."""

from __future__ import annotations

from functools import lru_cache

from engine.architecture.facts import Architecture
from engine.architecture.parameters import vision_layer_parameters
from engine.architecture.vision_encoder import VisionEncoder
from engine.budget.trace.attention import attend, rotary
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, TracedTensor
from engine.budget.trace.operations import (
    FLOAT,
    activation,
    add,
    cast,
    copy,
    layer_norm,
    multiply,
    rms_norm,
    saves_output,
    scale,
    split,
)
from engine.budget.trace.polynomial import TOKEN
from engine.budget.trace.trainable import Trainable
from engine.budget.trace.weights import Weights


class VisionLayer(Weights):
    """A layer of a vision encoder; which of its weights are trained or adapted decides what its operations save."""

    def __init__(self, trace: MemoryTrace, encoder: VisionEncoder, config: MemoryConfig, trainable: Trainable) -> None:
        super().__init__(trace, config, trainable, vision_layer_parameters(encoder), transposed=False)
        self.encoder = encoder
        self.arch = attending(encoder)

    def forward(self, x: TracedTensor) -> TracedTensor:
        first, second = ("layer_norm1", "layer_norm2") if self.encoder.kind == "siglip" else ("norm1", "norm2")
        residual = x
        hidden = self.norm(first, x)
        hidden, _weights = self.attention(hidden)
        hidden = add(self.trace, residual, hidden)
        residual = hidden
        hidden = self.norm(second, hidden)
        hidden = self.feed_forward(hidden)
        return add(self.trace, residual, hidden)

    def norm(self, name: str, x: TracedTensor) -> TracedTensor:
        return norm_of(self, name, x)

    def attention(self, x: TracedTensor) -> tuple[TracedTensor, TracedTensor | None]:
        """Trace attention, with rotary embedding in fp32; returns what `Layer.attention` does."""
        trace, elements = self.trace, self.encoder.hidden * TOKEN
        if self.encoder.kind == "siglip":
            query = self.linear("self_attn.q_proj", x)
            key = self.linear("self_attn.k_proj", x)
            value = self.linear("self_attn.v_proj", x)
            output, weights = attend(trace, self.arch, self.config, False, query, key, value)
            return self.linear("self_attn.out_proj", output), weights
        query, key, value = split(trace, self.linear("attn.qkv", x), [elements] * 3)
        query, key = self._turned(query, key)
        outputs, _weights = attend(trace, self.arch, self.config, False, query, key, value)
        joined = copy(trace, outputs)
        return self.linear("attn.proj", joined), None

    def _turned(self, query: TracedTensor, key: TracedTensor) -> tuple[TracedTensor, TracedTensor]:
        """`apply_rotary_pos_emb_vision`, which rotates query and key in fp32."""
        trace, itemsize = self.trace, query.itemsize
        query, key = cast(trace, query, FLOAT), cast(trace, key, FLOAT)
        turned_query = rotary(trace, self.arch, query, FLOAT)
        turned_key = rotary(trace, self.arch, key, FLOAT)
        turned_query = cast(trace, turned_query, itemsize)
        turned_key = cast(trace, turned_key, itemsize)
        return turned_query, turned_key

    def feed_forward(self, x: TracedTensor) -> TracedTensor:
        """Gated in Qwen2.5-VL, ungated in the other encoders."""
        if self.encoder.kind == "qwen2_5_vl":
            gate = activation(self.trace, self.linear("mlp.gate_proj", x))
            return self.linear("mlp.down_proj", multiply(self.trace, gate, self.linear("mlp.up_proj", x)))
        act = quick_gelu if self.encoder.activation == "quick_gelu" else activation
        hidden = self.linear("mlp.fc1", x)
        hidden = act(self.trace, hidden)
        return self.linear("mlp.fc2", hidden)


def quick_gelu(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """`x * sigmoid(1.702 * x)`."""
    return multiply(trace, x, saves_output(trace, scale(trace, x)))


def norm_of(weights: Weights, name: str, x: TracedTensor) -> TracedTensor:
    """A layer norm if it has a bias, else an RMSNorm."""
    size, trained = weights.weight(name)
    if f"{name}.bias" in weights.parameters:
        return layer_norm(weights.trace, x, size, trained)
    return rms_norm(weights.trace, x, TOKEN, size, trained, weights.config.base_bytes, wide=False)


@lru_cache(maxsize=64)
def attending(encoder: VisionEncoder) -> Architecture:
    """The encoder's sizes as an `Architecture`, so that the decoder's attention traces can be used for it."""
    return Architecture(
        model_type=encoder.kind,
        layout="llama",
        vocab=0,
        hidden=encoder.hidden,
        intermediate=encoder.intermediate,
        layers=encoder.layers,
        heads=encoder.heads,
        kv_heads=encoder.heads,
        head_dim=encoder.hidden // encoder.heads,
        tied=False,
        activation=encoder.activation,
    )
