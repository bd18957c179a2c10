"""One decoder layer, written like its modelling file so that a `Walk` through it meets the same live tensors."""

from __future__ import annotations

from engine.budget.architecture import Architecture
from engine.budget.attention import attend, rotary
from engine.budget.experts import mixture
from engine.budget.ghost import Ghost, Walk
from engine.budget.kinds import Kind
from engine.budget.norm import rms_norm
from engine.budget.operations import (
    activation,
    add,
    add_number,
    copy,
    cube,
    halves,
    layer_norm,
    multiply,
    narrow,
    saves_output,
    scale,
    split,
)
from engine.budget.packed import TOKEN
from engine.budget.parameters import layer_parameters
from engine.budget.setting import Setting
from engine.budget.weights import Weights


class Layer(Weights):
    """Operations of one layer: which of its weights are trained or adapted decides what they save."""

    def __init__(self, walk: Walk, arch: Architecture, setting: Setting, kind: Kind) -> None:
        parameters = layer_parameters(arch, kind.chosen.dense)
        super().__init__(walk, setting, kind.chosen, parameters, transposed=arch.layout == "gpt2")
        self.arch = arch
        self.cached: list[Ghost] | None = None
        """Where keys and values go while text is generated."""
        self.masked = kind.masked

    def forward(self, x: Ghost) -> Ghost:
        """Two halves with their residual connections; Gemma 2 and 3 norm what each half gives, too."""
        if self.arch.layout == "gpt2":
            return self._forward_gpt2(x)
        if self.arch.norms_per_layer == 4:
            return self._forward_four_norms(x)
        residual = x
        hidden = self.norm("input_layernorm", x)
        hidden, _weights = self.attention(hidden)
        hidden = add(self.walk, residual, hidden)
        residual = hidden
        hidden = self.norm("post_attention_layernorm", hidden)
        hidden = self.feed_forward(hidden)
        return add(self.walk, residual, hidden)

    def _forward_four_norms(self, x: Ghost) -> Ghost:
        residual = x
        hidden = self.norm("input_layernorm", x)
        hidden, _weights = self.attention(hidden)
        hidden = self.norm("post_attention_layernorm", hidden)
        hidden = add(self.walk, residual, hidden)
        residual = hidden
        hidden = self.norm("pre_feedforward_layernorm", hidden)
        hidden = self.feed_forward(hidden)
        hidden = self.norm("post_feedforward_layernorm", hidden)
        return add(self.walk, residual, hidden)

    def norm(self, name: str, x: Ghost, rows: int = TOKEN) -> Ghost:
        """RMSNorm in fp32, cast back, then times the weight; Gemma and gpt-oss multiply before the cast."""
        walk, (size, trained) = self.walk, self.weight(name)
        return rms_norm(walk, x, rows, size, trained, self.setting.base_bytes, wide=self.arch.wide_norm)

    def attention(self, x: Ghost) -> tuple[Ghost, Ghost | None]:
        """Projections, rotary embedding, the kernel, the output projection.

        A kernel that makes attention weights hands them up, where the layer's frame holds them until its end.
        """
        arch, walk = self.arch, self.walk
        if arch.layout == "phi3":
            return self._joint_attention(x, "self_attn.qkv_proj", "self_attn.o_proj")
        query = self.linear("self_attn.q_proj", x)
        if arch.qk_norm:
            query = self.norm("self_attn.q_norm", query, arch.heads * TOKEN)
        key = self.linear("self_attn.k_proj", x)
        if arch.qk_norm:
            key = self.norm("self_attn.k_norm", key, arch.kv_heads * TOKEN)
        value = self.linear("self_attn.v_proj", x)
        query, key = rotary_both(walk, arch, query, key, self.setting.base_bytes)
        key, value = self._remember(key, value)
        output, weights = attend(walk, arch, self.setting, self.masked, query, key, value)
        return self.linear("self_attn.o_proj", output), weights

    def feed_forward(self, x: Ghost) -> Ghost:
        """down(act(gate(x)) * up(x))."""
        walk, arch = self.walk, self.arch
        if arch.experts is not None and not self.chosen.dense:
            return mixture(walk, arch, arch.experts, x, self._trained_bytes())
        if arch.layout == "phi3":
            joint = self.linear("mlp.gate_up_proj", x)
            gate, up = halves(walk, joint)
            up = multiply(walk, up, activation(walk, gate))
            return self.linear("mlp.down_proj", up)
        return self.linear(
            "mlp.down_proj",
            multiply(walk, activation(walk, self.linear("mlp.gate_proj", x)), self.linear("mlp.up_proj", x)),
        )

    def _joint_attention(self, x: Ghost, projection: str, output_projection: str) -> tuple[Ghost, Ghost | None]:
        """One projection for query, key and value, which are slices of it."""
        arch, walk = self.arch, self.walk
        joint = self.linear(projection, x)
        parts = [width * TOKEN for width in (arch.query_width, arch.kv_width, arch.kv_width)]
        if arch.layout == "phi3":
            query, key, value = (narrow(walk, joint, elements) for elements in parts)
            query, key = rotary_both(walk, arch, query, key, self.setting.base_bytes)
        else:
            query, key, value = split(walk, joint, parts)
        key, value = self._remember(key, value)
        output, weights = attend(walk, arch, self.setting, self.masked, query, key, value)
        return self.linear(output_projection, output), weights

    def _remember(self, key: Ghost, value: Ghost) -> tuple[Ghost, Ghost]:
        """The cache joins keys and values to the earlier ones, of which the first pass has none: a copy."""
        if self.cached is None:
            return key, value
        self.cached += [copy(self.walk, key), copy(self.walk, value)]
        return self.cached[-2], self.cached[-1]

    def _forward_gpt2(self, x: Ghost) -> Ghost:
        """GPT-2: layer norms, no rotary embedding, an ungated feed-forward block."""
        walk = self.walk
        residual = x
        hidden = layer_norm(walk, x, *self.weight("ln_1"))
        output, _weights = self._joint_attention(hidden, "attn.c_attn", "attn.c_proj")
        hidden = add(walk, output, residual)
        residual = hidden
        hidden = layer_norm(walk, hidden, *self.weight("ln_2"))
        forward = self._gpt2_feed_forward(hidden)
        return add(walk, residual, forward)

    def _gpt2_feed_forward(self, x: Ghost) -> Ghost:
        """c_proj(gelu(c_fc(x))), with transformers' gelu of separate operations."""
        hidden = self.linear("mlp.c_fc", x)
        hidden = new_gelu(self.walk, hidden) if self.arch.activation == "gelu_new" else activation(self.walk, hidden)
        return self.linear("mlp.c_proj", hidden)

    def _trained_bytes(self) -> dict[str, int]:
        """Gradient bytes of the layer's trained parameters."""
        return {name: self.parameter(name)[0] for name in self.chosen.trained}


def new_gelu(walk: Walk, x: Ghost) -> Ghost:
    """`NewGELUActivation`: 0.5 · x · (1 + tanh(c · (x + 0.044715 · x³)))."""
    half = scale(walk, x)
    raised = add_number(walk, saves_output(walk, scale(walk, add(walk, x, scale(walk, cube(walk, x))))))
    return multiply(walk, half, raised)


def rotary_both(walk: Walk, arch: Architecture, query: Ghost, key: Ghost, width: int) -> tuple[Ghost, Ghost]:
    """`apply_rotary_pos_emb`; query and key stay referred to by the caller until it returns."""
    rotated_query = rotary(walk, arch, query, width)
    rotated_key = rotary(walk, arch, key, width)
    return rotated_query, rotated_key
