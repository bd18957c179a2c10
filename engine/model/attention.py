"""Chooses the attention kernel of a model from its config and device.

Which kernels prevent attention between packed documents is decided in `engine.budget.architecture.packing_support`.

Try: `python -m pytest tests/model/test_packing.py`.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from engine.device.base import Device
from engine.errors import EnvironmentProblem, UsageError

AttentionChoice = Literal["auto", "flash", "sdpa", "eager"]

POSITIONS_BY_AXIS = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types whose position ids have three axes, for images. They recognise packed documents only if the position ids
have a fourth axis, put before the three, with the positions in the text."""


def resolve_attention(config: PreTrainedConfig, asked: AttentionChoice, device: Device, dtype: torch.dtype) -> str:
    """Choose the attention kernel; returns its name in transformers.

    Raises:
        EnvironmentProblem: flash was asked for and cannot run here.
        UsageError: sdpa was asked for, but the architecture has none, or one without the model's soft-cap.
    """
    if asked == "eager":
        return "eager"
    obstacle = _flash_obstacle(config, device, dtype)
    if asked == "flash":
        if obstacle:
            raise EnvironmentProblem(f'model.attention = "flash": {obstacle}', fix='set model.attention = "auto"')
        return "flash_attention_2"
    if asked == "auto" and obstacle is None:
        return "flash_attention_2"
    if _sdpa_is_right(config):
        return "sdpa"
    if asked == "sdpa":
        raise UsageError(
            f'model.attention = "sdpa": {config.model_type} has no sdpa attention that computes what the model needs',
            fix='set model.attention = "auto"',
        )
    return "eager"


def attends_to_later_tokens(model: PreTrainedModel) -> bool:
    """Whether later tokens may influence earlier ones: False if every attention module declares that it is causal.

    True also for models without such a declaration, such as those that build position biases from the mask (Bloom).
    """
    declared = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return not declared or not all(declared)


def _sdpa_is_right(config: PreTrainedConfig) -> bool:
    """Whether sdpa computes the model's attention: transformers has an sdpa kernel for the model, and the model has no
    attention soft-cap, which that kernel would leave out."""
    return _supports(config, "_supports_sdpa") and not getattr(config, "attn_logit_softcapping", None)


def _flash_obstacle(config: PreTrainedConfig, device: Device, dtype: torch.dtype) -> str | None:
    if device.torch_device.type != "cuda":
        return f"needs a CUDA device, this is {device.name}"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16 only, not {dtype}"
    if torch.cuda.get_device_capability(device.torch_device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    if not _supports(config, "_supports_flash_attn"):
        return f"transformers has none for {config.model_type}"
    return None


def _supports(config: PreTrainedConfig, flag: str) -> bool:
    """Return a flag such as `_supports_sdpa` of the model class for `config`; True for models with remote code, which
    transformers checks itself when it loads them."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            return bool(getattr(mapping[type(config)], flag, False))
    return True
