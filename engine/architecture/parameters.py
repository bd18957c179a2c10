"""Every parameter of a decoder and of a vision encoder, by dotted name and shape.

The names are those of transformers 5.23, so the patterns of a recipe (`train_only`, `freeze`, `also_train`, `targets`)
select here exactly what they select in the engine. tests/budget/test_parameters.py compares names and shapes with
models on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod

from engine.architecture.facts import Architecture
from engine.architecture.vision_encoder import VisionEncoder
from engine.config.name_patterns import PARTS, no_such_part


class Parameter:
    """`linear` marks the weight of a linear layer, which can get an adapter. The weights of all experts of a layer are
    one parameter [experts, outputs, inputs], or [experts, inputs, outputs] with `inputs_first`."""

    __slots__ = ("elements", "inputs_first", "linear", "name", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], linear: bool = False, inputs_first: bool = False) -> None:
        self.name = name
        self.shape = shape
        self.linear = linear
        self.inputs_first = inputs_first
        self.elements = prod(shape)

    @property
    def of_experts(self) -> bool:
        """Whether these are the weights of all experts, which can get an adapter for each."""
        return len(self.shape) == 3 and "experts" in self.name.split(".")

    def adapter_shapes(self, rank: int) -> list[tuple[int, int]]:
        """Of A and B, which peft keeps for all experts in one matrix each."""
        *experts, outputs, inputs = self.shape
        if self.inputs_first:
            outputs, inputs = inputs, outputs
        ranks = rank * prod(experts)
        return [(ranks, inputs), (outputs, ranks)]

    @property
    def module(self) -> str:
        """Dotted name of the module that the parameter belongs to."""
        return self.name.rpartition(".")[0]


def linear(name: str, inputs: int, outputs: int, bias: bool) -> list[Parameter]:
    """Parameters of a `torch.nn.Linear`: weight [outputs, inputs] and, if `bias`, the bias."""
    weight = Parameter(f"{name}.weight", (outputs, inputs), linear=True)
    return [weight, Parameter(f"{name}.bias", (outputs,))] if bias else [weight]


def vectors(name: str, size: int, *, bias: bool) -> list[Parameter]:
    """Parameters of a norm: the weight [size] and, if `bias` (a layer norm), the bias [size]."""
    return [Parameter(f"{name}.{part}", (size,)) for part in (("weight", "bias") if bias else ("weight",))]


HEAD = "lm_head.weight"


@lru_cache(maxsize=64)
def layer_parameters(arch: Architecture, dense: bool) -> tuple[Parameter, ...]:
    """Named relative to the layer ("self_attn.q_proj.weight"); `dense`: no experts."""
    if arch.layout == "gpt2":
        return tuple(_gpt2_layer(arch))
    return (*_attention(arch), *_feed_forward(arch, dense), *_norms(arch))


@lru_cache(maxsize=64)
def outer_parameters(arch: Architecture) -> tuple[Parameter, ...]:
    """Embeddings, last norm, and the head where it is not tied."""
    if arch.layout == "gpt2":
        vectors = [Parameter(f"transformer.ln_f.{kind}", (arch.hidden,)) for kind in ("weight", "bias")]
        tables = [
            Parameter("transformer.wte.weight", (arch.vocab, arch.hidden)),
            Parameter("transformer.wpe.weight", (arch.positions or 0, arch.hidden)),
        ]
    else:
        vectors = [Parameter(f"{arch.root}.norm.weight", (arch.hidden,))]
        tables = [Parameter(f"{arch.root}.embed_tokens.weight", (arch.vocab, arch.hidden))]
    head = [] if arch.tied else [Parameter(HEAD, (arch.vocab, arch.hidden), linear=True)]
    return (*tables, *vectors, *head)


def layer_prefix(arch: Architecture, layer: int) -> str:
    """Prefix of a layer's parameter names, such as "model.layers.3."."""
    return f"transformer.h.{layer}." if arch.layout == "gpt2" else f"{arch.root}.layers.{layer}."


def parameter_count(arch: Architecture) -> int:
    """A tied head is counted once."""
    layers = (layer_parameters(arch, arch.is_dense(layer)) for layer in range(arch.layers))
    total = sum(map(elements, layers)) + elements(outer_parameters(arch))
    if arch.vision_encoder is None:
        return total
    return (
        total
        + arch.vision_encoder.layers * elements(vision_layer_parameters(arch.vision_encoder))
        + elements(vision_end_parameters(arch.vision_encoder))
    )


def elements(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.elements for parameter in parameters)


def _attention(arch: Architecture) -> list[Parameter]:
    """Projections and, in some families, norms of queries and keys, or sinks."""
    hidden, query, kv = arch.hidden, arch.query_width, arch.kv_width
    if arch.layout == "phi3":
        projections = linear("self_attn.qkv_proj", hidden, query + 2 * kv, False)
    else:
        projections = [
            *linear("self_attn.q_proj", hidden, query, arch.qkv_bias),
            *linear("self_attn.k_proj", hidden, kv, arch.qkv_bias),
            *linear("self_attn.v_proj", hidden, kv, arch.qkv_bias),
        ]
    extra = [Parameter(f"self_attn.{name}.weight", (arch.head_dim,)) for name in ("q_norm", "k_norm") if arch.qk_norm]
    if arch.layout == "gpt_oss":
        extra.append(Parameter("self_attn.sinks", (arch.heads,)))
    return [*projections, *linear("self_attn.o_proj", query, hidden, arch.output_bias), *extra]


def _feed_forward(arch: Architecture, dense: bool) -> list[Parameter]:
    """Gated feed-forward or, unless `dense`, router and experts (fused in transformers 5)."""
    hidden, width = arch.hidden, arch.intermediate
    if arch.layout == "phi3":
        return [
            *linear("mlp.gate_up_proj", hidden, 2 * width, False),
            *linear("mlp.down_proj", width, hidden, False),
        ]
    if not dense:
        return _expert_parameters(arch)
    return [
        *linear("mlp.gate_proj", hidden, width, arch.mlp_bias),
        *linear("mlp.up_proj", hidden, width, arch.mlp_bias),
        *linear("mlp.down_proj", width, hidden, arch.mlp_bias),
    ]


def _expert_parameters(arch: Architecture) -> list[Parameter]:
    """One tensor for all gate and up projections, one for all down projections."""
    assert arch.experts is not None
    count, width, hidden = arch.experts.count, arch.experts.intermediate, arch.hidden
    if arch.layout == "gpt_oss":  # stored transposed, with biases, and a router that is a layer of its own
        return [
            Parameter("mlp.router.weight", (count, hidden)),
            Parameter("mlp.router.bias", (count,)),
            Parameter("mlp.experts.gate_up_proj", (count, hidden, 2 * width), inputs_first=True),
            Parameter("mlp.experts.gate_up_proj_bias", (count, 2 * width)),
            Parameter("mlp.experts.down_proj", (count, width, hidden), inputs_first=True),
            Parameter("mlp.experts.down_proj_bias", (count, hidden)),
        ]
    return [
        Parameter("mlp.gate.weight", (count, hidden)),
        Parameter("mlp.experts.gate_up_proj", (count, 2 * width, hidden)),
        Parameter("mlp.experts.down_proj", (count, hidden, width)),
    ]


def _norms(arch: Architecture) -> list[Parameter]:
    """Two, or in Gemma 2 and 3 four."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if arch.norms_per_layer == 4:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return [Parameter(f"{name}.weight", (arch.hidden,)) for name in names]


def _gpt2_layer(arch: Architecture) -> list[Parameter]:
    """Weights of linear layers are Conv1D, [inputs, outputs]; norms have biases."""
    hidden, width = arch.hidden, arch.intermediate
    shapes = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, width),
        "mlp.c_proj": (width, hidden),
    }
    norms = [Parameter(f"{norm}.{kind}", (hidden,)) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")]
    weights = [Parameter(f"{name}.weight", shape, linear=True) for name, shape in shapes.items()]
    return [*norms, *weights, *(Parameter(f"{name}.bias", (shape[1],)) for name, shape in shapes.items())]


VISION_MODULES = ("model.visual", "model.vision_tower", "model.multi_modal_projector")
"""Names of vision encoders and projectors in all families."""
_INSIDE = tuple(f"{module}." for module in VISION_MODULES)


def in_vision_encoder(name: str) -> bool:
    """Whether a dotted name in the whole model belongs to a vision encoder or its projector."""
    return name.startswith(_INSIDE) or name in VISION_MODULES


PART_MODULES = {
    "vision": ("model.visual.patch_embed", "model.visual.blocks", "model.vision_tower"),
    "projector": ("model.visual.merger", "model.multi_modal_projector"),
}
"""Parts that method.freeze names, to the modules that make them up in families whose memory has a closed form."""

PROJECTOR_WORDS = (
    "projector", "merger", "connector", "aligner", "resampler", "abstractor", "qformer", "language_projection",
    "img_projection", "embed_vision", "image_newline",
)  # fmt: skip
"""A parameter outside the language model belongs to the projector if a part of its name contains one of these."""


def in_projector(name: str) -> bool:
    """Whether a parameter outside the language model connects the vision encoder to it, by its dotted name."""
    return any(word in name for word in PROJECTOR_WORDS)


def globs_of_parts(patterns: Iterable[str], arch: Architecture) -> tuple[str, ...]:
    """The patterns of method.freeze with the names of parts written out as globs. Raises UsageError for a part that the
    model does not have."""
    globs: list[str] = []
    for pattern in patterns:
        if pattern not in PARTS:
            globs.append(pattern)
        elif pattern == "language":
            globs += ["transformer" if arch.layout == "gpt2" else arch.root, HEAD.partition(".")[0]]
        elif arch.vision_encoder is None:
            raise no_such_part(pattern)
        else:
            globs += PART_MODULES[pattern]
    return tuple(globs)


def behind_vision_layers(name: str) -> bool:
    """Whether a parameter of `vision_end_parameters` is used after the encoder's layers, not before."""
    return "merger" in name or "projector" in name or "post_layernorm" in name


def vision_layer_prefix(encoder: VisionEncoder, layer: int) -> str:
    """Prefix of a layer's parameter names, such as "model.visual.blocks.3."."""
    return (
        f"model.vision_tower.encoder.layers.{layer}." if encoder.kind == "siglip" else f"model.visual.blocks.{layer}."
    )


@lru_cache(maxsize=64)
def vision_layer_parameters(encoder: VisionEncoder) -> tuple[Parameter, ...]:
    """Named relative to the layer."""
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
    """The first is the patch embedding's weight, the last are the merger's."""
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


@lru_cache(maxsize=16)
def parameter_names(arch: Architecture) -> tuple[str, ...]:
    """Names of all parameters; a tied head as well as the embedding, because patterns may name either."""
    names = [prefix + parameter.name for prefix, parameter in _parameters(arch)]
    return (*names, HEAD) if arch.tied else tuple(names)


@lru_cache(maxsize=16)
def adaptable_names(arch: Architecture) -> tuple[str, ...]:
    """Names of what can get an adapter: linear layers except the head, and the fused weights of experts."""
    linears = [prefix + one.module for prefix, one in _parameters(arch) if one.linear and one.name != HEAD]
    fused = [prefix + one.name for prefix, one in _parameters(arch) if one.of_experts]
    return (*linears, *fused)


@lru_cache(maxsize=16)
def parameters_by_name(arch: Architecture) -> dict[str, Parameter]:
    """Every parameter by its dotted name."""
    return {prefix + parameter.name: parameter for prefix, parameter in _parameters(arch)}


def _parameters(arch: Architecture) -> Iterator[tuple[str, Parameter]]:
    """(prefix, parameter) of every parameter; prefix + parameter.name is the dotted name."""
    for layer in range(arch.layers):
        for parameter in layer_parameters(arch, arch.is_dense(layer)):
            yield layer_prefix(arch, layer), parameter
    yield from (("", parameter) for parameter in outer_parameters(arch))
    if arch.vision_encoder is not None:
        for layer in range(arch.vision_encoder.layers):
            for parameter in vision_layer_parameters(arch.vision_encoder):
                yield vision_layer_prefix(arch.vision_encoder, layer), parameter
        yield from (("", parameter) for parameter in vision_end_parameters(arch.vision_encoder))
