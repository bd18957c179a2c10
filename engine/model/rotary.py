"""Scales a model's rotary positions as `model.rope_scaling` says, and keeps them independent of the micro-batch.

Two kinds of scaling look at the longest sequence of a forward pass: "dynamic", and "longrope" (Phi-3), which has one
set of frequencies for short and one for long sequences. What a sequence learns would then depend on its neighbours in
the micro-batch, and on an out-of-memory error that cuts it. So a run takes the frequencies for data.max_length
throughout.

Try: `python -m pytest tests/model/test_positions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.budget.architecture.positions import scaled_config, text_of
from engine.errors import UsageError
from engine.spec.schema.recipe import RopeScaling

BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary scaling whose frequencies follow the longest sequence of a forward pass."""


def scale_positions(config: PreTrainedConfig, scaling: RopeScaling) -> None:
    """Write a recipe's rotary scaling into a model's config, in place.

    Raises:
        UsageError: the model has no rotary positions, or its config scales them already.
    """
    scaled, text = text_of(scaled_config(config.to_dict(), scaling)), config.get_text_config()
    text.rope_parameters = scaled["rope_parameters"]
    text.max_position_embeddings = scaled["max_position_embeddings"]


def expect_scaled(model: nn.Module, scaling: RopeScaling) -> None:
    """Raise UsageError if no part of a model computes the scaling that its config asks for."""
    if scaling.type not in {kind for _, _, kind in _rotations(model)}:
        raise UsageError(
            f"model.rope_scaling: {type(model).__name__} computes its positions without it",
            expected="a model whose rotary embedding reads rope_parameters of its config",
            fix="leave model.rope_scaling out",
        )


def fix_frequencies(model: nn.Module, length: int) -> list[str]:
    """Fix the frequencies of "dynamic" and "longrope" rotary embeddings to those for sequences of `length` tokens,
    whatever a micro-batch contains. Returns a notice for each of these types whose frequencies are changed by this."""
    notices = []
    for module, layer_type, kind in list(_rotations(model)):
        if kind not in BY_LENGTH:
            continue
        prefix = f"{layer_type}_" if layer_type else ""
        frequencies: torch.Tensor = getattr(module, f"{prefix}inv_freq")
        compute = ROPE_INIT_FUNCTIONS[kind]
        fixed, scale = compute(module.config, frequencies.device, seq_len=length, layer_type=layer_type)
        if frequencies.device.type != "meta" and not torch.equal(fixed, frequencies):
            notices.append(
                f"{kind} positions: every sequence gets the frequencies for data.max_length = {length}; those for the "
                "longest sequence of a micro-batch would change what is learned with the micro-batch"
            )
        frequencies.copy_(fixed)
        setattr(module, f"{prefix}attention_scaling", scale)
        _switch_off(module, layer_type)
    return list(dict.fromkeys(notices))


def _rotations(model: nn.Module) -> Iterator[tuple[Any, str | None, str]]:
    """Yield (module, type of layer, type of scaling) of every rotary embedding; the type of layer is None where all
    layers share frequencies."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)] if kinds else []:
            yield module, layer_type, kind


def _switch_off(module: Any, layer_type: str | None) -> None:
    """Make a rotary embedding keep its present frequencies, by changing its type to "default", for which transformers
    computes no new ones. `layer_type`: the type of layer whose frequencies are meant; None where all layers share them.
    """
    if layer_type is None:
        module.rope_type = "default"
    else:
        module.rope_type = {**module.rope_type, layer_type: "default"}
