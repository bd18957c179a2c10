"""Reads from a model's config how many positions it has, and applies `model.rope_scaling` to the config. Learned
positions (GPT-2, OPT) are rows of a table, with an end; at rotary positions that it was not trained on a model computes
poor outputs. Config keys are those of transformers 5.23 (`modeling_rope_utils.py`) and older."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.config.schema.recipe import Recipe, RopeScaling
from engine.errors import UsageError

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Config keys with the number of positions, the most usual first."""

ROTARY_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base")
"""A config with one of these keys has rotary positions that transformers can scale."""

OWN_SCALING = frozenset({"phi3"})
"""Rotary model types whose config takes no scaling but its own (longrope)."""

ROTARY_FAMILIES = frozenset(
    {"qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3", "gemma3_text"}
    | {"mixtral", "qwen3_moe", "gpt_oss"}
)
"""Model types that are rotary even if their config names no such key, because it leaves the defaults out."""

DEFAULT_POSITIONS = {"gpt2": 1024, "gpt_bigcode": 1024, "openai-gpt": 512, "biogpt": 1024}
"""Positions of configs that leave the number out."""

STRETCHED = {"yarn", "linear", "dynamic"}
"""Types of rotary scaling that reach `factor` times as many positions as the config's number for them."""


def text_of(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the decoder: of a vision-language model, its text_config."""
    return facts.get("text_config") or facts


def positions_of(facts: Mapping[str, Any]) -> int | None:
    """The longest supported sequence, in tokens; None if the config gives no limit (ALiBi, recurrent models)."""
    text = text_of(facts)
    model_type = str(text.get("model_type", ""))
    stated = next((int(text[key]) for key in POSITION_KEYS if text.get(key)), DEFAULT_POSITIONS.get(model_type))
    if stated is None or text.get("alibi"):
        return None
    rope = _flat_rope(text)
    if rope.get("rope_type") not in STRETCHED or not rope.get("factor"):
        return stated
    original = rope.get("original_max_position_embeddings")
    return max(stated, int(float(rope["factor"]) * int(original or stated)))


def table_of_positions(facts: Mapping[str, Any]) -> int | None:
    """Positions of a model with a table of them (GPT-2, OPT, GPT-J), which can compute no others; else None."""
    text = text_of(facts)
    rotary = can_be_scaled(facts) or text.get("model_type") in OWN_SCALING or _is_rotary_in_windows_alone(text)
    return None if rotary else positions_of(facts)


def can_be_scaled(facts: Mapping[str, Any]) -> bool:
    """Whether `model.rope_scaling` can scale the model's positions."""
    text = text_of(facts)
    model_type = str(text.get("model_type", ""))
    if model_type in OWN_SCALING or _is_rotary_in_windows_alone(text):
        return False
    return model_type in ROTARY_FAMILIES or any(text.get(key) for key in ROTARY_KEYS)


def scaled_config(facts: Mapping[str, Any], scaling: RopeScaling) -> dict[str, Any]:
    """A copy of the config with rotary scaling in transformers' keys. Gemma 3's layers with a sliding window are not
    changed, because distances within the window stay the same.

    Raises UsageError: no rotary positions that can be scaled, or scaled already in another way.
    """
    model_type = str(facts.get("model_type", "unknown"))
    positions = positions_of(facts)
    if not can_be_scaled(facts) or positions is None:
        raise UsageError(
            f"model.rope_scaling is not supported for {model_type}",
            expected="a model with rotary positions, of a family that transformers can scale",
            fix="leave out model.rope_scaling",
        )
    text = dict(text_of(facts))
    given, present = _given(scaling), _flat_rope(text)
    if all(present.get(key) == value for key, value in given.items()):
        return dict(facts)
    if present["rope_type"] != "default":
        raise UsageError(
            f"model.rope_scaling, but the config of {model_type} already scales its positions "
            f"({present['rope_type']}, up to {positions})",
            expected="a model whose positions are not scaled yet",
            fix="leave out model.rope_scaling",
        )
    if scaling.type == "yarn":
        given = {"original_max_position_embeddings": positions, **given}
        text["max_position_embeddings"] = int(given["original_max_position_embeddings"] * scaling.factor)
    text["rope_parameters"] = _merged(text, given)
    text.pop("rope_scaling", None)
    return {**facts, "text_config": text} if facts.get("text_config") else text


def refuse_long_sequences(facts: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise UsageError if data.max_length exceeds the model's positions after the recipe's rotary scaling, or that
    cannot be applied. `facts` are the model's config without it."""
    own, scaling, length = positions_of(facts), recipe.model.rope_scaling, recipe.data.max_length
    reached = positions_of(scaled_config(facts, scaling)) if scaling else own
    if reached is None or own is None or length <= reached:
        return
    if scaling is not None:
        original = scaling.original_max_position_embeddings or own
        raise UsageError(
            f"data.max_length = {length} exceeds the {reached} positions of model.rope_scaling ({original} x "
            f"{scaling.factor:g})",
            expected=f"{reached} or less",
            fix=f"set model.rope_scaling.factor = {_factor(length, original)}, or data.max_length = {reached}",
        )
    fix = f"set data.max_length = {own}"
    if can_be_scaled(facts) and _flat_rope(text_of(facts)).get("rope_type", "default") == "default":
        table = f'{{type = "yarn", factor = {_factor(length, own)}}}'
        fix += f", or scale the model's rotary positions with model.rope_scaling = {table}"
    raise UsageError(
        f"data.max_length = {length} exceeds the {own} positions of {recipe.model.id}",
        expected=f"{own} or less",
        fix=fix,
    )


def _factor(length: int, positions: int) -> str:
    """Smallest factor from `positions` to `length`, as text with at most two decimals."""
    return f"{max(1.01, math.ceil(100 * length / positions) / 100):g}"


def _given(scaling: RopeScaling) -> dict[str, Any]:
    """The keys that a recipe sets, as transformers names them."""
    given: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.original_max_position_embeddings is not None:
        given["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    return given


def _is_rotary_in_windows_alone(text: Mapping[str, Any]) -> bool:
    """Whether the layers that see the whole sequence have no positions."""
    rope = text.get("rope_parameters") or {}
    return "full_attention" in rope and not rope["full_attention"]


def _flat_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary keys of layers that see the whole sequence, with "rope_type" also where the config says "type".
    transformers 5 has them in rope_parameters (one table, or one per type of layer), older configs in rope_scaling."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope = dict(rope.get("full_attention", rope) or {})
    return {**rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _merged(text: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A rope_theta outside of rope_parameters is copied into them."""
    rope = dict(text.get("rope_parameters") or {})
    if "full_attention" in rope:
        return {**rope, "full_attention": {**rope["full_attention"], **given}}
    if "rope_theta" not in rope and text.get("rope_theta"):
        rope["rope_theta"] = text["rope_theta"]
    return {**rope, **given}
