"""Positions of tokens: where the documents of a micro-batch begin, and scaled rotary embeddings that do not depend on
the micro-batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, masking_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.architecture.positions import scaled_config, text_of
from engine.config.attention import FLASH_KERNELS
from engine.config.schema.recipe import RopeScaling
from engine.data.batch import Documents
from engine.errors import UsageError


def takes_starts(attention: str) -> bool:
    return attention in FLASH_KERNELS


def flash_options(module: torch.nn.Module, documents: Documents | None) -> dict[str, Any]:
    """Keyword arguments for the forward of `module` that tell flash kernels where documents begin (transformers'
    `FlashAttentionKwargs`); empty if it takes none, or `documents` has no positions (`starts_D1`)."""
    if documents is None or documents.starts_D1 is None or not takes_any_option(module):
        return {}
    starts_D1, longest = documents.starts_D1, documents.longest
    return {"cu_seq_lens_q": starts_D1, "cu_seq_lens_k": starts_D1, "max_length_q": longest, "max_length_k": longest}


def takes_any_option(module: torch.nn.Module) -> bool:
    """Whether the forward of `module` takes keyword arguments that it does not name, and passes them to its layers."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


_handed_over = False


def starts_are_handed_over() -> bool:
    """Whether the running forward pass was given `flash_options`, so that its kernel needs no mask."""
    return _handed_over


@contextmanager
def separate_documents(
    decoder: nn.Module,
    positions_BS: Tensor | None,
    *,
    apart: bool,
    handed_over: bool = False,
    masked: bool = False,
) -> Iterator[None]:
    """Inside the block, transformers' masks separate the documents of a row (`apart`), or treat a row as one document.
    `handed_over`: the kernel separates documents itself (`flash_options`), so masks never do, whatever `apart` says.

    A `decoder` that builds its mask without position ids (gpt-oss, Falcon, OPT, …) gets `positions_BS` there; the mask
    of ones that some of them make first counts as none, unless the caller gave a mask (`masked`)."""
    global _handed_over
    former = masking_utils.find_packed_sequence_indices

    def known(position_ids: Tensor) -> Tensor | None:
        if not apart or handed_over:
            return None
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    masking_utils.find_packed_sequence_indices, _handed_over = known, handed_over
    try:
        with _positions_in_masks(decoder, positions_BS, masked=masked) if apart else nullcontext():
            yield
    finally:
        masking_utils.find_packed_sequence_indices, _handed_over = former, False


MASKS = {
    function: inspect.signature(function)
    for name, function in vars(masking_utils).items()
    if name.startswith("create_")
    and inspect.isfunction(function)
    and "position_ids" in inspect.signature(function).parameters
}
"""transformers' functions that build a mask from position ids. Modelling files import them by name."""


@contextmanager
def _positions_in_masks(decoder: nn.Module, positions_BS: Tensor | None, *, masked: bool) -> Iterator[None]:
    """Inside the block, the mask functions that the modelling files of `decoder` call get `positions_BS` where they are
    called without."""

    def with_positions(function: FunctionType, *args: Any, **kwargs: Any) -> Any:
        given = MASKS[function].bind(*args, **kwargs)
        if given.arguments.get("position_ids") is None and positions_BS is not None:
            given.arguments["position_ids"] = positions_BS
        mask = given.arguments.get("attention_mask")
        if not masked and isinstance(mask, Tensor) and mask.ndim == 2:
            given.arguments["attention_mask"] = None
        return function(*given.args, **given.kwargs)

    files = {sys.modules[type(module).__module__] for module in decoder.modules()}
    former = [
        (file, name, function)
        for file in files
        for name, function in list(vars(file).items())
        if inspect.isfunction(function) and function in MASKS
    ]
    for file, name, function in former:
        setattr(file, name, partial(with_positions, function))
    try:
        yield
    finally:
        for file, name, function in former:
            setattr(file, name, function)


BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary scaling whose frequencies follow the longest sequence of a forward pass."""


def scale_positions(config: PreTrainedConfig, scaling: RopeScaling) -> None:
    """Write a recipe's rotary scaling into a config, in place. UsageError: the model has no rotary positions, or its
    config scales them already."""
    scaled, text = text_of(scaled_config(config.to_dict(), scaling)), config.get_text_config()
    text.rope_parameters = scaled["rope_parameters"]
    text.max_position_embeddings = scaled["max_position_embeddings"]


def expect_scaled(model: nn.Module, scaling: RopeScaling) -> None:
    """Raise UsageError if no part of a model computes the scaling that its config asks for."""
    if scaling.type not in {kind for _, _, kind in _rotations(model)}:
        raise UsageError(
            f"model.rope_scaling: {type(model).__name__} computes its positions without it",
            expected="a model whose rotary embedding reads rope_parameters of its config",
            fix="leave out model.rope_scaling",
        )


def fix_frequencies(model: nn.Module, length: int) -> list[str]:
    """Fix the frequencies of "dynamic" and "longrope" for `length` tokens; returns a notice for each type changed."""
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
                f"{kind} positions: every sequence uses the frequencies for data.max_length = {length}, "
                "because frequencies for the longest sequence of a micro-batch would make training depend on "
                "the micro-batch"
            )
        frequencies.copy_(fixed)
        setattr(module, f"{prefix}attention_scaling", scale)
        _switch_off(module, layer_type)
    return list(dict.fromkeys(notices))


def _rotations(model: nn.Module) -> Iterator[tuple[Any, str | None, str]]:
    """(module, type of layer, type of scaling) of every rotary embedding; None where layers share frequencies."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)] if kinds else []:
            yield module, layer_type, kind


def _switch_off(module: Any, layer_type: str | None) -> None:
    """Keep the present frequencies: for the type "default" transformers computes no new ones."""
    if layer_type is None:
        module.rope_type = "default"
    else:
        module.rope_type = {**module.rope_type, layer_type: "default"}
