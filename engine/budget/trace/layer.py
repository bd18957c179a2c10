"""Traces one decoder layer. The code has the local variables of the family's modelling file in transformers, so that
the same tensors stay allocated.

Try: `python -m pytest tests/budget/test_accuracy.py`
"""

from __future__ import annotations

from engine.budget.architecture.facts import Architecture
from engine.budget.architecture.parameters import layer_parameters
from engine.budget.trace.attention import attend, rotary
from engine.budget.trace.dropout import dropped
from engine.budget.trace.experts import mixture
from engine.budget.trace.layer_kinds import LayerKind
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, TracedTensor
from engine.budget.trace.operations import (
    activation,
    add,
    add_number,
    copy,
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
from engine.budget.trace.weights import Weights


class Layer(Weights):
    """A decoder layer; which of its weights are trained or adapted decides what its operations save."""

    def __init__(self, trace: MemoryTrace, arch: Architecture, config: MemoryConfig, kind: LayerKind) -> None:
        parameters = layer_parameters(arch, kind.trainable.dense)
        super().__init__(trace, config, kind.trainable, parameters, transposed=arch.layout == "gpt2")
        self.arch = arch
        self.cached: list[TracedTensor] | None = None
        """The cache of keys and values while text is generated; None in training."""
        self.masked = kind.masked

    def forward(self, x: TracedTensor) -> TracedTensor:
        """Trace attention and feed-forward with norms and residual connections; Gemma 2 and 3 have four norms."""
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
        """Trace the dropout before a residual connection, if the model has one: GPT-2 and Phi-3."""
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
        """Trace the RMSNorm `name` of `rows` vectors: in fp32, cast back, then times the weight; Gemma and gpt-oss
        multiply before the cast."""
        trace, (size, trained) = self.trace, self.weight(name)
        return rms_norm(trace, x, rows, size, trained, self.config.base_bytes, wide=self.arch.wide_norm)

    def attention(self, x: TracedTensor) -> tuple[TracedTensor, TracedTensor | None]:
        """Trace projections, rotary embedding, the attention kernel and the output projection.

        Returns the output and, in eager attention, the attention weights: a local variable of the layer's forward
        refers to them until it returns.
        """
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
        query, key = rotary_both(trace, arch, query, key, self.config.base_bytes)
        key, value = self._remember(key, value)
        output, weights = attend(trace, arch, self.config, self.masked, query, key, value)
        return self.linear("self_attn.o_proj", output), weights

    def feed_forward(self, x: TracedTensor) -> TracedTensor:
        """Trace down(act(gate(x)) * up(x)), or a mixture of experts."""
        trace, arch = self.trace, self.arch
        if arch.experts is not None and not self.trainable.dense:
            return mixture(trace, arch, arch.experts, x, self._trained_bytes())
        if arch.layout == "phi3":
            joint = self.linear("mlp.gate_up_proj", x)
            gate, up = halves(trace, joint)
            up = multiply(trace, up, activation(trace, gate))
            return self.linear("mlp.down_proj", up)
        return self.linear(
            "mlp.down_proj",
            multiply(trace, activation(trace, self.linear("mlp.gate_proj", x)), self.linear("mlp.up_proj", x)),
        )

    def _joint_attention(
        self, x: TracedTensor, projection: str, output_projection: str
    ) -> tuple[TracedTensor, TracedTensor | None]:
        """Trace attention in which one linear layer, `projection`, computes query, key and value together. Returns the
        output and the attention weights, as `attention` does."""
        arch, trace = self.arch, self.trace
        joint = self.linear(projection, x)
        parts = [width * TOKEN for width in (arch.query_width, arch.kv_width, arch.kv_width)]
        if arch.layout == "phi3":
            query, key, value = (narrow(trace, joint, elements) for elements in parts)
            query, key = rotary_both(trace, arch, query, key, self.config.base_bytes)
        else:
            query, key, value = split(trace, joint, parts)
        key, value = self._remember(key, value)
        output, weights = attend(trace, arch, self.config, self.masked, query, key, value)
        return self.linear(output_projection, output), weights

    def _remember(self, key: TracedTensor, value: TracedTensor) -> tuple[TracedTensor, TracedTensor]:
        """Return the keys and values that attention uses: while the key-value cache is filled, the copies in the cache,
        else `key` and `value` themselves."""
        if self.cached is None:
            return key, value
        self.cached += [copy(self.trace, key), copy(self.trace, value)]
        return self.cached[-2], self.cached[-1]

    def _forward_gpt2(self, x: TracedTensor) -> TracedTensor:
        """Trace a GPT-2 layer: layer norms, no rotary embedding, an ungated feed-forward block."""
        trace = self.trace
        residual = x
        hidden = layer_norm(trace, x, *self.weight("ln_1"))
        output, _weights = self._joint_attention(hidden, "attn.c_attn", "attn.c_proj")
        output = self._dropped(output)
        hidden = add(trace, output, residual)
        residual = hidden
        hidden = layer_norm(trace, hidden, *self.weight("ln_2"))
        forward = self._dropped(self._gpt2_feed_forward(hidden))
        return add(trace, residual, forward)

    def _gpt2_feed_forward(self, x: TracedTensor) -> TracedTensor:
        """Trace c_proj(gelu(c_fc(x))); transformers computes "gelu_new" in separate operations."""
        hidden = self.linear("mlp.c_fc", x)
        hidden = new_gelu(self.trace, hidden) if self.arch.activation == "gelu_new" else activation(self.trace, hidden)
        return self.linear("mlp.c_proj", hidden)

    def _trained_bytes(self) -> dict[str, int]:
        """Bytes of the gradient of each trained parameter, by name."""
        return {name: self.parameter(name)[0] for name in self.trainable.trained}


def new_gelu(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """Trace `NewGELUActivation`: 0.5 · x · (1 + tanh(c · (x + 0.044715 · x³)))."""
    half = scale(trace, x)
    raised = add_number(trace, saves_output(trace, scale(trace, add(trace, x, scale(trace, power(trace, x))))))
    return multiply(trace, half, raised)


def rotary_both(
    trace: MemoryTrace, arch: Architecture, query: TracedTensor, key: TracedTensor, width: int
) -> tuple[TracedTensor, TracedTensor]:
    """Trace `apply_rotary_pos_emb` on query and key, with `width` bytes per value of cos and sin; both originals stay
    allocated until this returns."""
    rotated_query = rotary(trace, arch, query, width)
    rotated_key = rotary(trace, arch, key, width)
    return rotated_query, rotated_key
