"""Whether a model's family and attention kernel allow packed documents, and sequences shared by several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from engine.architecture.facts import ROUTER_AUX_LOSS_COEF, Architecture, from_config
from engine.architecture.positions import text_of
from engine.config.attention import FLASH_CHOICES
from engine.config.check.data_rules import image_key
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import RunSpec
from engine.errors import UnknownArchitectureError, UsageError

STATEFUL_LAYERS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "rwkv", "ssm", "moe_mamba", "hybrid")
"""Layer types with a state that passes from token to token, which restarting position ids do not reset."""
STATEFUL_FAMILIES = frozenset(
    {
        "mamba",
        "mamba2",
        "falcon_mamba",
        "rwkv",
        "recurrent_gemma",
        "jamba",
        "bamba",
        "zamba",
        "zamba2",
        "falcon_h1",
        "nemotron_h",
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "qwen3_next",
        "plamo2",
        "xlstm",
        "minimax",
        "kimi_linear",
        "olmo_hybrid",
    }
)
"""Model types with such layers whatever their config says."""
NO_POSITION_IDS = frozenset({"xlnet"})
"""Model types that neither take position ids nor build their mask where the engine can hand them over."""


def why_documents_mix(facts: Mapping[str, Any]) -> str | None:
    """The reason as a sentence, if the config tells it; every model is tried when it is loaded
    (`engine.model.verify`)."""
    text = text_of(facts)
    model_type = str(text.get("model_type", facts.get("model_type", "unknown")))
    layers = {str(layer) for layer in text.get("layer_types") or ()}
    if model_type in STATEFUL_FAMILIES or layers & set(STATEFUL_LAYERS):
        return f"{model_type} carries a state from token to token, so packed documents would affect each other"
    if model_type in NO_POSITION_IDS:
        return f"{model_type} does not take position ids, so nothing marks where a packed document starts"
    return None


def refuse_unsafe_packing(facts: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise UsageError if a recipe packs documents that would influence each other; `facts` are the model's config."""
    reason = why_documents_mix(facts) if recipe.data.packing else None
    if reason is not None:
        raise UsageError(
            f"data.packing = true, but {reason}",
            expected="a model whose attention separates packed documents",
            fix="set data.packing = false",
        )


BLIND_TO_SLICES = NO_POSITION_IDS | {"openai-gpt", "bloom", "mpt", "codegen", "ctrl", "gpt_neo"}
"""Model types that take no position ids, or compute biases of positions from the mask: a slice would begin at 0."""

SINK_FAMILIES = frozenset({"gpt_oss"})
"""Model types with a sink for each head: a parameter beside keys and values."""

SLICEABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types that look at other positions in attention only, through a causal mask or a window."""


class Obstacle(NamedTuple):
    """A reason why sequences cannot be shared, and how to fix it, both as text for a message."""

    found: str
    fix: str


def refuse_sequence_parallel(facts: Mapping[str, Any], spec: RunSpec) -> None:
    """Raise UsageError if the profile asks for it and the model (its config: `facts`) or recipe does not allow it. Each
    rank has a slice of each sequence, so an attention mask would take length² on every rank. The engine checks the
    model itself, too (`engine.model.ulysses_attention.verify_ulysses_attention`)."""
    size = spec.profile.parallel.sequence
    if size == 1:
        return
    obstacles = [*_in_recipe(spec), *_in_model(facts, spec)]
    if obstacles:
        raise UsageError(
            f"parallel.sequence = {size}, but " + "; and ".join(obstacle.found for obstacle in obstacles),
            expected="a recipe and model with causal attention, without masks, with heads that can be distributed",
            fix="; ".join(dict.fromkeys(obstacle.fix for obstacle in obstacles)) + "; or set parallel.sequence = 1",
        )


def _in_recipe(spec: RunSpec) -> Iterator[Obstacle]:
    if spec.recipe.data.packing:
        yield Obstacle("data.packing = true needs a mask over the whole sequence", "set data.packing = false")
    key = image_key(spec.recipe)
    if key is not None:
        yield Obstacle(f"{key} is for images, which cannot be split", "train on text alone")


def _in_model(facts: Mapping[str, Any], spec: RunSpec) -> Iterator[Obstacle]:
    model_type = str(facts.get("model_type", "unknown"))
    text = facts.get("text_config") or facts
    strange = sorted({str(layer) for layer in text.get("layer_types") or ()} - SLICEABLE_LAYERS)
    if model_type in STATEFUL_FAMILIES or strange:
        layers = f" in layers of type {', '.join(strange)}" if strange else ""
        yield Obstacle(f"{model_type} uses other positions outside attention{layers}", "choose another model.id")
    elif model_type in BLIND_TO_SLICES or facts.get("alibi"):
        yield Obstacle(f"{model_type} does not take position ids", "choose another model.id")
    if model_type in SINK_FAMILIES:
        yield Obstacle(f"{model_type} has one attention sink per head", "choose another model.id")
    elif _is_eager(facts, spec):
        yield Obstacle(
            f"{model_type} runs with eager attention, which needs memory quadratic in the sequence length",
            'set model.attention = "flash" if the device supports it',
        )
    yield from _auxiliary_loss(facts, spec)
    yield from _window(facts, spec)
    yield from _heads(facts, spec)


def _auxiliary_loss(facts: Mapping[str, Any], spec: RunSpec) -> Iterator[Obstacle]:
    """The auxiliary loss is a product of means over a whole sequence, but each rank has only a slice."""
    weight, recipe = spec.recipe.moe.aux_loss_weight, spec.recipe
    if not {"num_experts", "num_local_experts"} & facts.keys():
        return
    if weight is None:
        weight = 0.0 if recipe.freezes_router else float(facts.get("router_aux_loss_coef", ROUTER_AUX_LOSS_COEF))
    if weight:
        yield Obstacle(
            f"the auxiliary loss (moe.aux_loss_weight = {weight:g}) is computed over whole sequences",
            "set moe.aux_loss_weight = 0",
        )


def _is_eager(facts: Mapping[str, Any], spec: RunSpec) -> bool:
    asked, arch = spec.recipe.model.attention, _known(facts)
    if asked != "auto":
        return asked == "eager"
    return arch is not None and (arch.default_attention == "eager" or arch.attention_softcap is not None)


def _window(facts: Mapping[str, Any], spec: RunSpec) -> Iterator[Obstacle]:
    arch, longest = _known(facts), spec.recipe.data.max_length
    window = arch.sliding_window if arch else facts.get("sliding_window")
    slides = any(arch.sliding_layers) if arch else True
    if window and slides and longest > int(window) and spec.recipe.model.attention not in FLASH_CHOICES:
        yield Obstacle(
            f"data.max_length = {longest} exceeds the model's sliding window of {window}, which needs a mask",
            f'set model.attention = "flash" if the device supports it, or data.max_length to {window}',
        )


def _heads(facts: Mapping[str, Any], spec: RunSpec) -> Iterator[Obstacle]:
    size = spec.profile.parallel.sequence
    heads, key_heads = heads_of(facts)
    if can_be_dealt(heads, key_heads, size):
        return
    devices = spec.profile.device.count * spec.profile.nodes.count
    possible = [
        str(smaller)
        for smaller in range(1, devices + 1)
        if devices % smaller == 0 and can_be_dealt(heads, key_heads, smaller)
    ]
    yield Obstacle(
        f"{heads} heads with {key_heads} key-value heads cannot be distributed over {size} ranks",
        f"set parallel.sequence to {' or '.join(possible)} in the profile",
    )


def can_be_dealt(heads: int, key_heads: int, size: int) -> bool:
    """Whether `size` ranks can get equally many query heads, with a whole number of key heads or a shared one each."""
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def heads_of(facts: Mapping[str, Any]) -> tuple[int, int]:
    """(query heads, key heads)."""
    arch = _known(facts)
    if arch is not None:
        return arch.heads, arch.kv_heads
    text = facts.get("text_config") or facts
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    return heads, int(text.get("num_key_value_heads") or heads)


def _known(facts: Mapping[str, Any]) -> Architecture | None:
    try:
        return from_config(facts)
    except UnknownArchitectureError:
        return None
