"""Traces one decoder layer, and groups a model's layers into kinds that need the same memory. The trace has the local
variables of the family's modelling file in transformers, so that the same tensors stay allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from engine.architecture.facts import Architecture
from engine.architecture.parameters import layer_parameters
from engine.budget.trace.attention import attend, rotary
from engine.budget.trace.experts import ExpertAdapter, mixture
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, Node, Storage, TracedTensor
from engine.budget.trace.operations import (
    activation,
    add,
    add_number,
    copy,
    dropped,
    fused_gate,
    fused_rms_norm,
    halves,
    layer_norm,
    multiply,
    narrow,
    power,
    rms_norm,
    saves_output,
    scale,
    split,
)
from engine.budget.trace.polynomial import TOKEN, BytesPolynomial
from engine.budget.trace.trainable import (
    Trainable,
    embedding_learns,
    trainable_by_layer,
    trainable_vision_ends,
    vision_trainable_by_layer,
)
from engine.budget.trace.weights import Weights


class Layer(Weights):
    """A decoder layer; which of its weights are trained or adapted decides what its operations save."""

    def __init__(self, trace: MemoryTrace, arch: Architecture, config: MemoryConfig, kind: LayerKind) -> None:
        parameters = layer_parameters(arch, kind.trainable.dense)
        super().__init__(trace, config, kind.trainable, parameters, transposed=arch.layout == "gpt2")
        self.arch, self.kind = arch, kind
        self.cached: list[TracedTensor] | None = None
        """The cache of keys and values while text is generated; None in training."""
        self.masked = kind.masked

    def forward(self, x: TracedTensor) -> TracedTensor:
        """Attention and feed-forward with norms and residual connections; Gemma 2 and 3 have four norms."""
        if self.arch.layout == "gpt2":
            return self._forward_gpt2(x)
        if self.arch.norms_per_layer == 4:
            return self._forward_four_norms(x)
        residual = x
        hidden = self.norm("input_layernorm", x)
        hidden, _weights = self.attention(hidden)
        hidden = add(self.trace, residual, self._dropped(hidden))
        residual = hidden
        hidden = self.norm("post_attention_layernorm", hidden)
        hidden = self.feed_forward(hidden)
        return add(self.trace, residual, self._dropped(hidden))

    def _dropped(self, x: TracedTensor) -> TracedTensor:
        """GPT-2 and Phi-3 have dropout before residual connections."""
        return dropped(self.trace, self.config, x) if self.config.residual_dropout else x

    def _forward_four_norms(self, x: TracedTensor) -> TracedTensor:
        residual = x
        hidden = self.norm("input_layernorm", x)
        hidden, _weights = self.attention(hidden)
        hidden = self.norm("post_attention_layernorm", hidden)
        hidden = add(self.trace, residual, hidden)
        residual = hidden
        hidden = self.norm("pre_feedforward_layernorm", hidden)
        hidden = self.feed_forward(hidden)
        hidden = self.norm("post_feedforward_layernorm", hidden)
        return add(self.trace, residual, hidden)

    def norm(self, name: str, x: TracedTensor, rows: BytesPolynomial = TOKEN) -> TracedTensor:
        """RMSNorm in fp32, cast back, then times the weight; Gemma and gpt-oss multiply before the cast."""
        trace, (size, trained) = self.trace, self.weight(name)
        if self.config.fused:
            return fused_rms_norm(trace, x, rows, size, trained)
        return rms_norm(trace, x, rows, size, trained, self.config.base_bytes, wide=self.arch.wide_norm)

    def attention(self, x: TracedTensor) -> tuple[TracedTensor, TracedTensor | None]:
        """Returns the output and, in eager attention, the attention weights: a local variable of the layer's forward
        refers to them until it returns."""
        arch, trace = self.arch, self.trace
        if arch.layout == "phi3":
            return self._joint_attention(x, "self_attn.qkv_proj", "self_attn.o_proj")
        query = self.linear("self_attn.q_proj", x)
        if arch.qk_norm:
            query = self.norm("self_attn.q_norm", query, arch.heads * TOKEN)
        key = self.linear("self_attn.k_proj", x)
        if arch.qk_norm:
            key = self.norm("self_attn.k_norm", key, arch.kv_heads * TOKEN)
        value = self.linear("self_attn.v_proj", x)
        if not (self.config.fused and fuses_rotary(arch)):  # the kernel rotates both where they are
            query, key = rotary_both(trace, arch, query, key, self.config.base_bytes)
        key, value = self._remember(key, value)
        output, weights = attend(trace, arch, self.config, self.masked, query, key, value)
        return self.linear("self_attn.o_proj", output), weights

    def feed_forward(self, x: TracedTensor) -> TracedTensor:
        """A mixture of experts, or a dense block, which may be computed in pieces of the sequence."""
        if self.arch.experts is not None and not self.trainable.dense:
            return mixture(self.trace, self.arch, self.arch.experts, x, self._trained_bytes(), self._expert_adapters())
        if self.config.mlp_tiles > 1:
            return tiled(self.trace, x, self.config.mlp_tiles, self._dense_on, trains=self._feed_forward_learns)
        return self.dense(x)

    @property
    def _feed_forward_learns(self) -> bool:
        return any(name.startswith("mlp.") for name in (*self.trainable.trained, *self.trainable.adapted))

    def _dense_on(self, trace: MemoryTrace) -> Callable[[TracedTensor], TracedTensor]:
        """The dense block of this layer on another trace."""
        return Layer(trace, self.arch, self.config, self.kind).dense

    def dense(self, x: TracedTensor) -> TracedTensor:
        """down(act(gate(x)) * up(x))."""
        trace, arch = self.trace, self.arch
        if arch.layout == "gpt2":
            return self._gpt2_feed_forward(x)
        if arch.layout == "phi3":
            joint = self.linear("mlp.gate_up_proj", x)
            gate, up = halves(trace, joint)
            up = multiply(trace, up, activation(trace, gate))
            return self.linear("mlp.down_proj", up)
        if self.config.fused and fuses_gate(arch):
            joined = fused_gate(trace, self.linear("mlp.gate_proj", x), self.linear("mlp.up_proj", x))
            return self.linear("mlp.down_proj", joined)
        return self.linear(
            "mlp.down_proj",
            multiply(trace, activation(trace, self.linear("mlp.gate_proj", x)), self.linear("mlp.up_proj", x)),
        )

    def _joint_attention(
        self, x: TracedTensor, projection: str, output_projection: str
    ) -> tuple[TracedTensor, TracedTensor | None]:
        """One linear layer, `projection`, computes query, key and value together; returns what `attention` does."""
        arch, trace = self.arch, self.trace
        joint = self.linear(projection, x)
        parts = [width * TOKEN for width in (arch.query_width, arch.kv_width, arch.kv_width)]
        if arch.layout == "phi3":
            query, key, value = (narrow(trace, joint, elements) for elements in parts)
            if self.config.fused and fuses_rotary(arch):  # the kernel wants heads that lie together
                query, key = copy(trace, query), copy(trace, key)
            else:
                query, key = rotary_both(trace, arch, query, key, self.config.base_bytes)
        else:
            query, key, value = split(trace, joint, parts)
        key, value = self._remember(key, value)
        output, weights = attend(trace, arch, self.config, self.masked, query, key, value)
        return self.linear(output_projection, output), weights

    def _remember(self, key: TracedTensor, value: TracedTensor) -> tuple[TracedTensor, TracedTensor]:
        """The keys and values that attention uses: copies in the cache while it is filled."""
        if self.cached is None:
            return key, value
        self.cached += [copy(self.trace, key), copy(self.trace, value)]
        return self.cached[-2], self.cached[-1]

    def _forward_gpt2(self, x: TracedTensor) -> TracedTensor:
        """Layer norms, no rotary embedding, an ungated feed-forward block."""
        trace = self.trace
        residual = x
        hidden = layer_norm(trace, x, *self.weight("ln_1"))
        output, _weights = self._joint_attention(hidden, "attn.c_attn", "attn.c_proj")
        output = self._dropped(output)
        hidden = add(trace, output, residual)
        residual = hidden
        hidden = layer_norm(trace, hidden, *self.weight("ln_2"))
        forward = self._dropped(self.feed_forward(hidden))
        return add(trace, residual, forward)

    def _gpt2_feed_forward(self, x: TracedTensor) -> TracedTensor:
        """c_proj(gelu(c_fc(x))); transformers computes "gelu_new" in separate operations."""
        hidden = self.linear("mlp.c_fc", x)
        hidden = new_gelu(self.trace, hidden) if self.arch.activation == "gelu_new" else activation(self.trace, hidden)
        return self.linear("mlp.c_proj", hidden)

    def _expert_adapters(self) -> dict[str, ExpertAdapter]:
        rank, itemsize = self.config.rank, self.config.adapter_bytes
        adapted = [each for each in self.parameters.values() if each.of_experts and each.name in self.trainable.adapted]
        return {each.name: ExpertAdapter.of(each, rank, itemsize) for each in adapted}

    def _trained_bytes(self) -> dict[str, int]:
        """Bytes of each trained parameter's gradient, by name."""
        return {name: self.parameter(name)[0] for name in self.trainable.trained}


def tiled(
    trace: MemoryTrace,
    x: TracedTensor,
    pieces: int,
    block_on: Callable[[MemoryTrace], Callable[[TracedTensor], TracedTensor]],
    *,
    trains: bool,
) -> TracedTensor:
    """A feed-forward block on `pieces` of the sequence, one after the other (`engine.model.tiled_mlp`): its input is
    saved before it is computed, and backward computes each piece again. `block_on` makes the block on a trace;
    `trains`: whether the block has trained weights or adapters."""
    itemsize, elements, wanted = x.itemsize, x.elements, x.node is not None
    learns = wanted or trains

    def piece_on(inner: MemoryTrace) -> tuple[TracedTensor, TracedTensor]:
        piece = inner.new(elements, itemsize)
        if wanted and inner.learning:
            piece.node = Node(piece.size)
        return piece, block_on(inner)(piece)

    def backward(gradient: Storage) -> list[Storage | None]:
        inner = MemoryTrace(metered=trace.metered)
        piece, output = piece_on(inner)
        assert output.node is not None
        upstream = output.node.gradient = inner.allocate(output.size)
        inner.backward()
        held = inner.live.trained_grads()
        peaks = [peak.of_piece(pieces) for peak in inner.take_peaks()]
        del piece, output, upstream
        grad_x = trace.allocate(x_size) if wanted else None
        # The first piece makes the gradients of weights, the others add to them.
        trace.add_peaks([*peaks, *(peak.after_first() + held for peak in peaks)], leaving=held)
        return [grad_x]

    x_size = x.size
    saved = trace.save(x) if learns else None
    inner = MemoryTrace(metered=trace.metered, learning=False)
    piece, output = piece_on(inner)
    del piece, output
    peaks = [peak.of_piece(pieces) for peak in inner.take_peaks()]
    result = trace.result(elements, itemsize, [x], backward, saved, trains=trains)
    trace.add_peaks(peaks)
    return result


def new_gelu(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """`NewGELUActivation`: 0.5 · x · (1 + tanh(c · (x + 0.044715 · x³)))."""
    half = scale(trace, x)
    raised = add_number(trace, saves_output(trace, scale(trace, add(trace, x, scale(trace, power(trace, x))))))
    return multiply(trace, half, raised)


def fuses_gate(arch: Architecture) -> bool:
    """Whether the engine finds the family's gated blocks to be what the fused kernel computes."""
    return arch.layout in ("llama", "qwen3_moe") and arch.activation in ("silu", "gelu_pytorch_tanh")


def fuses_rotary(arch: Architecture) -> bool:
    """Whether the engine finds the family's rotary embedding to be what the fused kernel computes."""
    return arch.layout not in ("gpt2", "gpt_oss") and arch.rotary_share == 1.0


def rotary_both(
    trace: MemoryTrace, arch: Architecture, query: TracedTensor, key: TracedTensor, width: int
) -> tuple[TracedTensor, TracedTensor]:
    """Both originals stay allocated until this returns. `width`: bytes per value of cos and sin."""
    rotated_query = rotary(trace, arch, query, width)
    rotated_key = rotary(trace, arch, key, width)
    return rotated_query, rotated_key


class LayerKind(NamedTuple):
    """The facts that decide the memory of a layer."""

    trainable: Trainable
    masked: bool
    """Attention gets a mask: packed documents, bidirectional image tokens, or a window shorter than the sequence."""
    slides: bool
    """Attends within a sliding window."""
    follows: bool
    """The layer's input needs a gradient, because an earlier layer, the embedding or the vision encoder is trained."""
    recomputed: bool = False
    """Gradient checkpointing: the layer keeps its input alone, and is computed again in backward."""

    @property
    def learns(self) -> bool:
        """Whether backward reaches a layer of this kind."""
        return self.follows or bool(self.trainable.trained or self.trainable.adapted)

    def holds_more_than(self, other: LayerKind) -> bool:
        """It trains the same weights, and has a mask or an input gradient that `other` lacks, but not the reverse."""
        mine, its = (self.masked, self.follows), (other.masked, other.follows)
        more = mine != its and all(one >= another for one, another in zip(mine, its, strict=True))
        return more and (self.trainable, self.recomputed) == (other.trainable, other.recomputed)


@dataclass(frozen=True)
class LayerStack:
    """The layers of a model in order, each represented by its kind. Most models have one to three kinds."""

    layers: tuple[LayerKind, ...]

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Each kind once, in the order in which they appear."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def spans(self) -> dict[LayerKind, tuple[int, int]]:
        """Maps each kind to the index of its first layer and that of its last."""
        last = len(self.layers) - 1
        return {kind: (self.layers.index(kind), last - self.layers[::-1].index(kind)) for kind in self.kinds}

    def larger(self, kind: LayerKind) -> list[LayerKind]:
        return [other for other in self.kinds if other.holds_more_than(kind)]

    def counts(self, start: int, stop: int) -> dict[LayerKind, int]:
        return Counter(self.layers[start:stop])

    def ends(self, *, checkpointed: bool) -> dict[int, str]:
        """The layers whose backward pass may be the peak, from the last to the first, with their phases: the first and
        last layer of each kind, since live bytes change linearly between layers of a kind. Phase `layer_first` is the
        model's second half, which backward reaches first, `layer_last` the other.

        If all layers are `checkpointed` and train the same weights, each saves the same number of bytes. A kind cannot
        be the peak if a larger kind has layers both before and after all of its own.
        """
        last = len(self.layers) - 1
        even = checkpointed and len({kind.trainable for kind in self.kinds}) == 1
        kinds = [kind for kind in self.kinds if kind.learns and not (even and self._is_between_larger(kind))]
        layers = sorted({layer for kind in kinds for layer in self.spans[kind]}, reverse=True)
        return {layer: "layer_first" if 2 * layer >= last else "layer_last" for layer in layers}

    def _is_between_larger(self, kind: LayerKind) -> bool:
        """Whether a larger kind has layers both before and after all layers of `kind`."""
        first, last = self.spans[kind]
        return any(self.spans[other][0] <= first and last <= self.spans[other][1] for other in self.larger(kind))


@lru_cache(maxsize=256)
def layer_stack(arch: Architecture, config: MemoryConfig) -> LayerStack:
    """The kind of each layer of a model, as this config trains it; with checkpointing, all are recomputed."""
    trainable = trainable_by_layer(arch, config.patterns)
    slides = arch.sliding_layers or (False,) * arch.layers
    always_masked = config.packed or sees_images_both_ways(arch, config)
    follows = vision_learns(arch, config) or embedding_learns(arch, config)
    layers = []
    for each, sliding in zip(trainable, slides, strict=True):
        masked = always_masked or (sliding and config.window_reached)
        kind = LayerKind(each, masked, sliding, follows, config.checkpointing)
        layers.append(kind)
        follows = kind.learns
    return LayerStack(tuple(layers))


def sees_images_both_ways(arch: Architecture, config: MemoryConfig) -> bool:
    """Whether image tokens attend in both directions; every row then needs an attention mask of its own."""
    return arch.vision_encoder is not None and arch.vision_encoder.bidirectional and config.image_patches > 0


def vision_learns(arch: Architecture, config: MemoryConfig) -> bool:
    """Whether the decoder's input needs a gradient because the vision encoder is trained."""
    encoder = arch.vision_encoder
    if encoder is None or not config.image_patches:
        return False
    parts = (trainable_vision_ends(encoder, config.patterns), *vision_trainable_by_layer(encoder, config.patterns))
    return any(part.trained or part.adapted for part in parts)


def body_learns(arch: Architecture, config: MemoryConfig) -> bool:
    """Whether the last layer's output needs a gradient."""
    return layer_stack(arch, config).layers[-1].learns
