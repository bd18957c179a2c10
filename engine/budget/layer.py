"""One decoder layer, written like its modelling file so that a `Walk` through it meets the same live tensors."""

from __future__ import annotations

from engine.budget.adapter import Adapted, adapted
from engine.budget.architecture import Architecture
from engine.budget.attention import attend, rotary
from engine.budget.experts import mixture
from engine.budget.ghost import TOKEN, Ghost, Walk
from engine.budget.kinds import Kind
from engine.budget.operations import (
    FLOAT,
    activation,
    add,
    add_number,
    cast,
    copy,
    cube,
    half_linear,
    halves,
    layer_norm,
    linear,
    multiply,
    narrow,
    power_mean,
    saves_output,
    scale,
    scale_by_weight,
    split,
)
from engine.budget.parameter import Parameter
from engine.budget.parameters import layer_parameters, linear_shape
from engine.budget.setting import Setting
from engine.budget.static import rounded


class Layer:
    """Operations of one layer: which of its weights are trained or adapted decides what they save."""

    def __init__(self, walk: Walk, arch: Architecture, setting: Setting, kind: Kind) -> None:
        self.walk = walk
        self.arch = arch
        self.setting = setting
        self.chosen = kind.chosen
        self.cached: list[Ghost] | None = None
        """Where keys and values go while text is generated."""
        self.masked = kind.masked
        self.parameters = {parameter.name: parameter for parameter in layer_parameters(arch)}

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
        walk, (size, trained) = self.walk, self._weight(name)
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
        if arch.experts is not None:
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
        hidden = layer_norm(walk, x, *self._weight("ln_1"))
        output, _weights = self._joint_attention(hidden, "attn.c_attn", "attn.c_proj")
        hidden = add(walk, output, residual)
        residual = hidden
        hidden = layer_norm(walk, hidden, *self._weight("ln_2"))
        forward = self._gpt2_feed_forward(hidden)
        return add(walk, residual, forward)

    def _gpt2_feed_forward(self, x: Ghost) -> Ghost:
        """c_proj(gelu(c_fc(x))), with transformers' gelu of separate operations."""
        hidden = self.linear("mlp.c_fc", x)
        hidden = new_gelu(self.walk, hidden) if self.arch.activation == "gelu_new" else activation(self.walk, hidden)
        return self.linear("mlp.c_proj", hidden)

    def _trained_bytes(self) -> dict[str, int]:
        """Gradient bytes of the layer's trained parameters."""
        return {name: self._parameter(name)[0] for name in self.chosen.trained}

    def linear(self, module: str, x: Ghost) -> Ghost:
        """A linear layer, with peft's adapter beside it where it has one."""
        name = f"{module}.weight"
        if name not in self.chosen.adapted:
            return self._base(module, self.parameters[name], x)
        outputs, inputs = linear_shape(self.arch, self.parameters[name])
        layer = Adapted(outputs, inputs, f"{module}.bias" in self.parameters)
        # Nested, so that what the base gives is let go of as soon as the sum with it is made.
        return adapted(self.walk, self.setting, layer, x, self._base(module, self.parameters[name], x))

    def _base(self, module: str, parameter: Parameter, x: Ghost) -> Ghost:
        """The layer's own weight and bias."""
        weight, trained = self._weight(module)
        bias, bias_trained = self._bias(module)
        outputs, _ = linear_shape(self.arch, parameter)
        if self.setting.autocast:
            return half_linear(self.walk, x, outputs, parameter.elements, trained, bias if bias_trained else 0)
        unpacked = parameter.elements * self.setting.base_bytes if self.setting.quantized else 0
        return linear(self.walk, x, outputs, weight, trained, bias if bias_trained else 0, unpacked)

    def _weight(self, module: str) -> tuple[int, bool]:
        """Bytes of a module's weight gradient, and whether it is trained."""
        return self._parameter(f"{module}.weight")

    def _bias(self, module: str) -> tuple[int, bool]:
        """The same of its bias; nothing where it has none."""
        return self._parameter(f"{module}.bias")

    def _parameter(self, name: str) -> tuple[int, bool]:
        parameter = self.parameters.get(name)
        if parameter is None:
            return 0, False
        return rounded(parameter.elements * self.setting.base_bytes), name in self.chosen.trained


def rms_norm(walk: Walk, x: Ghost, rows: int, weight: int, trained: bool, width: int, *, wide: bool) -> Ghost:
    """`Qwen2RMSNorm.forward`, or with `wide` that of Gemma and gpt-oss; each of `rows` has a root of its own."""
    itemsize = x.itemsize
    x = cast(walk, x, FLOAT)
    x = multiply(walk, x, power_mean(walk, x, rows))
    if wide:
        return cast(walk, scale_by_weight(walk, x, weight, trained), itemsize)
    return scale_by_weight(walk, cast(walk, x, itemsize), weight, trained, width)


def new_gelu(walk: Walk, x: Ghost) -> Ghost:
    """`NewGELUActivation`: 0.5 · x · (1 + tanh(c · (x + 0.044715 · x³)))."""
    half = scale(walk, x)
    raised = add_number(walk, saves_output(walk, scale(walk, add(walk, x, scale(walk, cube(walk, x)))), x.itemsize))
    return multiply(walk, half, raised)


def rotary_both(walk: Walk, arch: Architecture, query: Ghost, key: Ghost, width: int) -> tuple[Ghost, Ghost]:
    """`apply_rotary_pos_emb`; query and key stay referred to by the caller until it returns."""
    rotated_query = rotary(walk, arch, query, width)
    rotated_key = rotary(walk, arch, key, width)
    return rotated_query, rotated_key
