"""Every parameter of a decoder by dotted name and shape.

The names are those of transformers 5.23, so that the patterns of a recipe (`train_only`, `freeze`, `also_train`,
`targets`) select here exactly what they select in the engine. `tests/budget/test_parameters.py` compares names and
shapes with a model built on the meta device.

Try: `python -m pytest tests/budget/test_parameters.py`
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from engine.budget.architecture.facts import Architecture
from engine.budget.architecture.parameter import Parameter, linear
from engine.budget.architecture.vision_parameters import vision_end_parameters, vision_layer_parameters

HEAD = "lm_head.weight"


@lru_cache(maxsize=64)
def layer_parameters(arch: Architecture, dense: bool) -> tuple[Parameter, ...]:
    """Parameters of one decoder layer, named relative to the layer ("self_attn.q_proj.weight"); `dense`: no experts."""
    if arch.layout == "gpt2":
        return tuple(_gpt2_layer(arch))
    return (*_attention(arch), *_feed_forward(arch, dense), *_norms(arch))


@lru_cache(maxsize=64)
def outer_parameters(arch: Architecture) -> tuple[Parameter, ...]:
    """Parameters outside the layers: embeddings, last norm, and the head where it is not tied."""
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
    """The prefix of a layer's parameter names, such as "model.layers.3.", with the dot at its end."""
    return f"transformer.h.{layer}." if arch.layout == "gpt2" else f"{arch.root}.layers.{layer}."


def parameter_count(arch: Architecture) -> int:
    """Number of parameters of the whole model; a tied head is counted once."""
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
    """Total number of values in these tensors."""
    return sum(parameter.elements for parameter in parameters)


def _attention(arch: Architecture) -> list[Parameter]:
    """One layer's parameters of attention: projections and, in some families, norms of queries and keys, or sinks."""
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
    """Parameters of a layer's gated feed-forward block or, unless `dense`, of its router and experts (fused in
    transformers 5)."""
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
    """Router, and fused experts: one tensor for all gate and up projections, one for all down projections."""
    assert arch.experts is not None
    count, width, hidden = arch.experts.count, arch.experts.intermediate, arch.hidden
    if arch.layout == "gpt_oss":  # stored transposed, with biases, and a router that is a layer of its own
        return [
            Parameter("mlp.router.weight", (count, hidden)),
            Parameter("mlp.router.bias", (count,)),
            Parameter("mlp.experts.gate_up_proj", (count, hidden, 2 * width)),
            Parameter("mlp.experts.gate_up_proj_bias", (count, 2 * width)),
            Parameter("mlp.experts.down_proj", (count, width, hidden)),
            Parameter("mlp.experts.down_proj_bias", (count, hidden)),
        ]
    return [
        Parameter("mlp.gate.weight", (count, hidden)),
        Parameter("mlp.experts.gate_up_proj", (count, 2 * width, hidden)),
        Parameter("mlp.experts.down_proj", (count, hidden, width)),
    ]


def _norms(arch: Architecture) -> list[Parameter]:
    """Weights of a layer's norms: two, or in Gemma 2 and 3 four."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if arch.norms_per_layer == 4:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return [Parameter(f"{name}.weight", (arch.hidden,)) for name in names]


def _gpt2_layer(arch: Architecture) -> list[Parameter]:
    """Parameters of a GPT-2 layer: weights of linear layers are Conv1D, [inputs, outputs]; norms have biases."""
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
