"""Chooses the attention kernel of a model from its config, its device and the packages that are installed.

transformers' own functions say whether a package is installed: flash-attn and flash-attn-4 install a module of the same
name, so finding the module does not tell which is there. A package that is installed but cannot be imported (it was
built for another torch) is not used, and a notice says so. Which kernels prevent attention between packed documents is
decided in `engine.budget.architecture.packing_support`.

Try: `python -m pytest tests/model/test_attention.py`.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import import_utils

from engine.device.base import Device
from engine.device.determinism import has_deterministic_backward
from engine.errors import EnvironmentProblem, UsageError
from engine.model.varlen import register_varlen
from engine.spec.attention_choice import (
    AttentionCard,
    AttentionNeeds,
    Obstacle,
    choose_kernel,
    no_deterministic_backward,
)
from engine.spec.attention_kernels import FLASH_KERNELS, AttentionChoice

POSITIONS_BY_AXIS = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types whose position ids have three axes, for images. They recognise packed documents only if the position ids
have a fourth axis, put before the three, with the positions in the text."""

class ChosenAttention(NamedTuple):
    """The attention kernel that a run uses, and notices for the user."""

    name: str
    """Its name in transformers' attention interface."""
    notices: list[str]
    """Why a better kernel that is installed is not used."""


def choose_attention(
    config: PreTrainedConfig,
    asked: AttentionChoice,
    device: Device,
    dtype: torch.dtype,
    *,
    packing: bool = False,
    deterministic: bool = False,
) -> ChosenAttention:
    """Choose the attention kernel for `model.attention = asked`.

    torch's own varlen kernel is chosen by "auto" for packed data alone: without packing sdpa runs the same kernel. With
    `deterministic`, only kernels whose backward pass can be deterministic are chosen.

    Raises:
        EnvironmentProblem: `asked` is flash attention (any kernel or a certain one), and it cannot run here.
        UsageError: `asked` is "sdpa", but the architecture has no sdpa attention, or has it without the soft-cap that
            the model needs.
    """
    model, card = attention_needs(config), _card(device, dtype)
    chosen = choose_kernel(
        asked,
        model,
        card,
        lambda kernel: _obstacle_here(kernel, deterministic),
        packing=packing,
        deterministic=deterministic,
    )
    if chosen.name is None:
        raise _no_flash(asked, chosen.obstacles, device)
    if chosen.name == "sdpa" and (model.softcap or not model.has_sdpa):
        raise UsageError(
            f'model.attention = "sdpa": {config.model_type} has no sdpa attention that computes what the model needs',
            fix='set model.attention = "auto"',
        )
    if chosen.name == "varlen":
        register_varlen()
    return ChosenAttention(chosen.name, _notices(chosen.obstacles))


def attends_to_later_tokens(model: PreTrainedModel) -> bool:
    """Whether later tokens may influence earlier ones: False if every attention module declares that it is causal.

    True also for models without such a declaration, such as those that build position biases from the mask (Bloom).
    """
    declared = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return not declared or not all(declared)


def attention_needs(config: PreTrainedConfig) -> AttentionNeeds:
    """Return what decides which attention kernels the model of `config` can use: head size, soft-cap, attention
    dropout, and the kernels that its transformers class supports."""
    text, only = config.get_text_config(), _attribute(config, "_compatible_flash_implementations")
    keys = [key for key in ("attention_dropout", "attn_pdrop") if getattr(text, key, None)]
    return AttentionNeeds(
        config.model_type,
        head_dim(config),
        has_flash=_supports(config, "_supports_flash_attn"),
        flash_only=None if only is None else tuple(only),
        has_sdpa=_supports(config, "_supports_sdpa"),
        softcap=bool(getattr(text, "attn_logit_softcapping", None)),
        dropout=f"{keys[0]} = {getattr(text, keys[0])}" if keys else "",
    )


def _card(device: Device, dtype: torch.dtype) -> AttentionCard:
    is_cuda = device.torch_device.type == "cuda"
    return AttentionCard(device.name, _capability(device) if is_cuda else None, is_cuda, str(dtype).split(".")[-1])


def _obstacle_here(kernel: str, deterministic: bool) -> Obstacle | None:
    """Return what prevents the flash kernel `kernel` in this process: its package is missing or cannot be imported, or
    with `deterministic` its backward pass is not deterministic. None if nothing does."""
    if kernel == "varlen":
        return None  # part of torch, and deterministic where torch is told to be
    if (reason := _missing(kernel)) is not None:
        return Obstacle(reason, unexpected=False)
    problem = _import_problem(kernel) or (_nondeterminism(kernel) if deterministic else None)
    return None if problem is None else Obstacle(problem, unexpected=True)


def _missing(kernel: str) -> str | None:
    """Return why a kernel's package does not count as installed, or None if it is installed."""
    predicate = getattr(import_utils, f"is_flash_attn_{kernel[-1]}_available", None)
    if predicate is None:
        return "needs a newer transformers"
    return None if predicate() else f"needs the package {FLASH_KERNELS[kernel].package}, which is not installed"


def _import_problem(kernel: str) -> str | None:
    """Return why a kernel's package does not import, or None if it does."""
    facts = FLASH_KERNELS[kernel]
    try:
        importlib.import_module(facts.module)
    # A package built for another torch, or without its compiler, fails in one of these ways.
    except (ImportError, OSError, RuntimeError) as error:
        return f"needs {facts.package}, which is installed and does not import: {str(error).splitlines()[0]}"
    return None


def _nondeterminism(kernel: str) -> str | None:
    """Return why a kernel's backward pass cannot be deterministic, or None if it can."""
    module = importlib.import_module(FLASH_KERNELS[kernel].module)
    return None if has_deterministic_backward(module.flash_attn_varlen_func) else no_deterministic_backward(kernel)


def _notices(found: dict[str, Obstacle]) -> list[str]:
    return [f"{kernel} is not used: {obstacle.reason}" for kernel, obstacle in found.items() if obstacle.unexpected]


def _no_flash(asked: str, found: dict[str, Obstacle], device: Device) -> EnvironmentProblem:
    reasons = "; ".join(f"{kernel} {obstacle.reason}" for kernel, obstacle in found.items())
    if not found:
        reasons = f"needs a CUDA device of compute capability 8.0 or newer, this is {device.name}"
    return EnvironmentProblem(f'model.attention = "{asked}": {reasons}', fix='set model.attention = "auto"')


def head_dim(config: PreTrainedConfig) -> int:
    """Return the number of values per attention head of the decoder that `config` describes; 0 for a model without
    attention heads, such as Mamba."""
    text = config.get_text_config()
    own, heads = getattr(text, "head_dim", None), getattr(text, "num_attention_heads", None)
    if own or not heads:
        return int(own or 0)
    return int(text.hidden_size) // int(heads)


def _capability(device: Device) -> float:
    major, minor = torch.cuda.get_device_capability(device.torch_device)
    return major + minor / 10


def _supports(config: PreTrainedConfig, flag: str) -> bool:
    """Return a flag such as `_supports_sdpa` of the model class for `config`; True for models with remote code, which
    transformers checks itself when it loads them."""
    model_class = _model_class(config)
    return True if model_class is None else bool(getattr(model_class, flag, False))


def _attribute(config: PreTrainedConfig, name: str) -> Any:
    """Return the attribute `name` of the model class for `config`; None if the class does not have it, or is not known.
    """
    return getattr(_model_class(config), name, None)


def _model_class(config: PreTrainedConfig) -> Any:
    """Return transformers' model class for `config`; None for models with remote code."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return None
