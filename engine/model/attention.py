"""Which attention kernel a model runs with. Which of them keep packed documents apart is `engine.budget.isolation`.

Reads configs; touches no weights.

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

Asked = Literal["auto", "flash", "sdpa", "eager"]

POSITIONS_BY_AXIS = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types whose positions have three axes, for images. They see documents only in a fourth, that of the text, which
stands first."""


def resolve_attention(config: PreTrainedConfig, asked: Asked, device: Device, dtype: torch.dtype) -> str:
    """transformers' name of the kernel to use.

    Raises:
        EnvironmentProblem: flash was asked for and cannot run here.
        UsageError: sdpa was asked for and the architecture has none that is right.
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


def looks_ahead(model: PreTrainedModel) -> bool:
    """False when every attention of the model says that it is causal: nothing on the right reaches a token.

    True also for models that do not say, such as those that build position biases from the mask (Bloom).
    """
    said = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return not said or not all(said)


def _sdpa_is_right(config: PreTrainedConfig) -> bool:
    """False where transformers has no sdpa, or has one that cannot apply the model's attention soft-cap."""
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
    """A class flag of the architecture; remote code, unknown here, is taken to have it and checked when loaded."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            return bool(getattr(mapping[type(config)], flag, False))
    return True
