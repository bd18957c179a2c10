"""The facts of a decoder that decide its memory, read from a `config.json` without its weights. Names and shapes of
parameters follow from them (`engine.architecture.parameters`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.architecture.families import FAMILIES, Family, Layout
from engine.architecture.vision_encoder import VISION_ENCODERS, VisionEncoder, read_vision_encoder
from engine.errors import UnknownArchitectureError, UsageError

GPT2_DROPOUT = 0.1
"""What transformers' GPT2Config has for each dropout that a config.json does not mention."""


ROUTER_AUX_LOSS_COEF = 0.001
"""What transformers' configs of mixtures have for the auxiliary loss's weight if a config.json does not mention it."""


@dataclass(frozen=True)
class Experts:
    """The feed-forward block of a mixture-of-experts layer."""

    count: int
    per_token: int
    intermediate: int
    """Intermediate size of one expert's feed-forward block."""
    auxiliary_loss: bool = True
    """Whether the model's own weight of the auxiliary loss (router_aux_loss_coef) is above 0."""


@dataclass(frozen=True)
class Architecture:
    """A causal decoder. Sizes are numbers of elements; head_dim is per head."""

    model_type: str
    layout: Layout
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    activation: str
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    wide_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    """Whether each layer attends only within the sliding window; empty for a model without a window."""
    rotary_share: float = 1.0
    """Share of each head's dimensions that the rotary embedding rotates, from 0 to 1."""
    rotary_tables: int = 1
    """Pairs of rotary tables that a forward pass makes: one for all layers, or one for each kind of layer."""
    buffers: int = 2
    """Number of small tensors that are not parameters: two of rotary frequencies per table, and Gemma's scale."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    positions: int | None = None
    """Rows of a learned position table (GPT-2); None for rotary positions."""
    experts: Experts | None = None
    dense_layers: tuple[bool, ...] = ()
    """Whether each layer of a mixture-of-experts model has no experts; empty if all have."""
    vision_encoder: VisionEncoder | None = None
    """The encoder of a vision-language model; all other fields describe the decoder."""
    rotary_by_row: bool = False
    """Each row of a batch has rotary tables of its own; if not, all rows share them."""
    attention_dropout: bool = False
    """The config applies dropout to attention weights in training."""
    residual_dropout: bool = False
    """The config applies dropout to hidden states before residual connections."""
    embedding_dropout: bool = False
    """The config applies dropout to the first layer's input."""
    default_attention: str = "sdpa"
    max_length: int | None = None
    """Tokens of the longest sequence that the model was made for; None if its config does not tell."""

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has a feed-forward block that is no mixture of experts."""
        return self.experts is None or any(self.dense_layers)

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has no experts."""
        return self.experts is None or (bool(self.dense_layers) and self.dense_layers[layer])

    @property
    def root(self) -> str:
        """Dotted name of the module that contains the decoder's layers."""
        return "model.language_model" if self.vision_encoder else "model"

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Output width of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


EXPERT_LAYOUTS: dict[Layout, tuple[str, str]] = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
}
"""Layouts of mixtures, and the config keys of their number of experts and of the experts' width."""


NO_PLAN = "train without a plan: micro-batches start small and adapt during the run"


def from_config(config: Mapping[str, Any]) -> Architecture:
    """Read a parsed config.json. Raises UnknownArchitectureError for an unknown family, and for a config that gives
    each layer values of its own; UsageError for one that is damaged."""
    try:
        return _from_config(config)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise UsageError(
            f"the model's config.json has a value that is invalid for its family: {type(error).__name__}: {error}",
            expected="the config.json that came with the weights",
            fix="download or export the model again",
        ) from error


def _from_config(config: Mapping[str, Any]) -> Architecture:
    model_type = str(config.get("model_type", ""))
    if model_type == "gpt2":
        return _from_gpt2(config)
    if model_type in VISION_ENCODERS:
        return _with_vision_encoder(model_type, config)
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnknownArchitectureError(
            f"no memory model for model_type {model_type!r}",
            expected=f"one of {', '.join(sorted({'gpt2', *FAMILIES, *VISION_ENCODERS}))}",
            fix=NO_PLAN,
        )
    if any((config.get("per_layer_config") or {}).values()):
        raise UnknownArchitectureError(
            f"the layers of this {model_type} model differ in size (per_layer_config)",
            expected="layers of the same size",
            fix=NO_PLAN,
        )
    stated = {key: value for key, value in config.items() if value is not None}
    return _from_llama_like(model_type, family, {**family.defaults, **stated})


def _with_vision_encoder(model_type: str, config: Mapping[str, Any]) -> Architecture:
    """Published Qwen configs keep the decoder's keys at the top; Gemma's, and those saved by transformers 5, in a table
    of their own. Tied embeddings are declared in either place."""
    text = dict(config.get("text_config") or {})
    decoder = _from_config({**config, **text, "model_type": VISION_ENCODERS[model_type][0]})
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    stated = "tie_word_embeddings" in config or "tie_word_embeddings" in text
    return replace(
        decoder,
        model_type=model_type,
        tied=tied if stated else decoder.tied,
        vision_encoder=read_vision_encoder(config, decoder.hidden),
    )


def _from_llama_like(model_type: str, family: Family, facts: Mapping[str, Any]) -> Architecture:
    """Read the config of a family that shares Llama's key names."""
    try:
        heads, hidden = int(facts["num_attention_heads"]), int(facts["hidden_size"])
        tables = max(1, len(set(_sliding_layers(family, facts)))) if family.rotary_by_kind else 1
        biased = bool(facts.get(family.bias_key, False)) if family.bias_key else False
        return Architecture(
            model_type=model_type,
            layout=family.layout,
            vocab=int(facts["vocab_size"]),
            hidden=hidden,
            intermediate=int(facts.get("intermediate_size", 0)),
            layers=int(facts["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(facts.get("num_key_value_heads", heads)),
            head_dim=int(facts.get("head_dim", hidden // heads)),
            tied=bool(facts.get("tie_word_embeddings", False)),
            activation=str(facts.get("hidden_activation") or facts.get("hidden_act", "silu")),
            qkv_bias=family.qkv_bias or biased,
            output_bias=biased,
            mlp_bias=bool(facts.get(family.mlp_bias_key, False)) if family.mlp_bias_key else False,
            qk_norm=family.qk_norm,
            norms_per_layer=family.norms_per_layer,
            wide_norm=family.wide_norm,
            sliding_window=_window(facts),
            sliding_layers=_sliding_layers(family, facts),
            rotary_share=_rotary_share(facts),
            rotary_tables=tables,
            buffers=2 * tables + family.scaled_embedding,
            attention_softcap=facts.get("attn_logit_softcapping"),
            logit_softcap=facts.get("final_logit_softcapping"),
            experts=_experts(family.layout, facts) if family.layout in EXPERT_LAYOUTS else None,
            rotary_by_row=family.rotary_by_row,
            dense_layers=_dense_layers(facts) if family.layout == "qwen3_moe" else (),
            attention_dropout=bool(facts.get("attention_dropout")),
            residual_dropout=family.layout == "phi3" and bool(facts.get("resid_pdrop")),
            default_attention=family.default_attention,
            max_length=facts.get("max_position_embeddings"),
        )
    except KeyError as missing:
        raise UsageError(
            f"the {model_type} config has no {missing}",
            expected="a complete config.json",
            fix="check the folder named by model.id",
        ) from None


def _window(facts: Mapping[str, Any]) -> int | None:
    """The window in tokens; None if unused. Qwen2 configs have one that `use_sliding_window = false` switches off."""
    switched_off = "max_window_layers" in facts and not facts.get("use_sliding_window", False)
    return None if switched_off or facts.get("use_sliding_window") is False else facts.get("sliding_window")


def _sliding_layers(family: Family, facts: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has a window, by `layer_types` or the family's pattern; in Qwen models from max_window_layers
    on. Empty without a window. Raises UsageError if `layer_types` does not have one entry per layer."""
    layers = range(int(facts["num_hidden_layers"]))
    if _window(facts) is None:
        return ()
    if "layer_types" in facts:
        if len(facts["layer_types"]) != len(layers):
            raise UsageError(
                f"the model's config has {len(facts['layer_types'])} layer_types for {len(layers)} layers",
                expected="one for each layer",
                fix="correct num_hidden_layers or layer_types in its config.json",
            )
        return tuple(kind == "sliding_attention" for kind in facts["layer_types"])
    every = facts.get("sliding_window_pattern", family.full_every)
    first = int(facts.get("max_window_layers", 0)) if "use_sliding_window" in facts else 0
    return tuple(layer >= first and not (every and (layer + 1) % int(every) == 0) for layer in layers)


def _rotary_share(facts: Mapping[str, Any]) -> float:
    """The rotated share of each head: three quarters in Phi-4-mini. Since transformers 5 it is in rope_parameters."""
    rope = facts.get("rope_parameters") or {}
    return float(rope.get("partial_rotary_factor", facts.get("partial_rotary_factor", 1.0)))


def _dense_layers(facts: Mapping[str, Any]) -> tuple[bool, ...]:
    """Qwen3-MoE names dense layers in mlp_only_layers, and has experts in every decoder_sparse_step-th layer."""
    named, step = facts.get("mlp_only_layers", ()), int(facts.get("decoder_sparse_step", 1))
    dense = tuple(layer in named or (layer + 1) % step != 0 for layer in range(int(facts["num_hidden_layers"])))
    return dense if any(dense) else ()


def _experts(layout: Layout, facts: Mapping[str, Any]) -> Experts:
    """Mixtral, gpt-oss: num_local_experts and intermediate_size; Qwen3-MoE: num_experts and moe_intermediate_size."""
    count, width = EXPERT_LAYOUTS[layout]
    return Experts(
        count=int(facts[count] if count in facts else facts["num_local_experts"]),
        per_token=int(facts["num_experts_per_tok"]),
        intermediate=int(facts.get(width, facts.get("intermediate_size", 0))),
        auxiliary_loss=float(facts.get("router_aux_loss_coef", ROUTER_AUX_LOSS_COEF)) > 0,
    )


def _from_gpt2(config: Mapping[str, Any]) -> Architecture:
    """GPT-2 has key names of its own; every linear layer and norm has a bias."""
    hidden, heads = int(config["n_embd"]), int(config["n_head"])
    return Architecture(
        model_type="gpt2",
        layout="gpt2",
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        intermediate=int(config.get("n_inner") or 4 * hidden),
        layers=int(config["n_layer"]),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        tied=bool(config.get("tie_word_embeddings", True)),
        activation=str(config.get("activation_function", "gelu_new")),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        buffers=0,
        attention_dropout=float(config.get("attn_pdrop", GPT2_DROPOUT)) > 0,
        residual_dropout=float(config.get("resid_pdrop", GPT2_DROPOUT)) > 0,
        embedding_dropout=float(config.get("embd_pdrop", GPT2_DROPOUT)) > 0,
        positions=int(config.get("n_positions", 1024)),
        max_length=int(config.get("n_positions", 1024)),
    )
