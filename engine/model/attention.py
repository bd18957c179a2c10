"""Which attention kernel a model runs with, and whether that kernel keeps packed documents apart.

Reads configs; touches no weights. Facts of transformers 5.23: `masking_utils.find_packed_sequence_indices` builds a
block mask from restarting position ids, for any batch size, when there is no attention mask;
`modeling_flash_attention_utils._is_packed_sequence` does so only for a batch of one, so `engine.model.loss` flattens
packed batches under flash. tests/model/test_packing.py holds it against real models.

Try: `python -m pytest tests/model/test_packing.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from engine.device.base import Device
from engine.errors import EnvironmentProblem, UsageError

Asked = Literal["auto", "flash", "sdpa", "eager"]

STATEFUL_LAYERS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "rwkv", "ssm", "moe_mamba", "hybrid")
"""Layer types that carry a state from token to token, which restarting position ids do not reset."""
STATEFUL_FAMILIES = frozenset({
    "mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2", "falcon_h1",
    "nemotron_h", "granitemoehybrid", "lfm2", "lfm2_moe", "qwen3_next", "plamo2", "xlstm", "minimax", "kimi_linear",
    "olmo_hybrid",
})
"""Model types with such layers whatever their config says."""
POSITION_BLIND_FAMILIES = frozenset({"bloom", "mpt", "codegen", "ctrl", "xlnet", "openai-gpt", "gpt_neo"})
"""Model types that take no position ids, or build their mask without them."""


POSITIONS_BY_AXIS = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types whose positions have three axes, for images. They see documents only in a fourth, that of the text, which
stands first."""


def why_documents_mix(config: PreTrainedConfig | Mapping[str, Any], attention: str) -> str | None:
    """None when documents of one packed row cannot see each other; otherwise the reason, as a sentence."""
    facts = config if isinstance(config, Mapping) else config.to_dict()
    model_type = str(facts.get("model_type", "unknown"))
    layers = {str(layer) for layer in facts.get("layer_types") or ()}
    if model_type in STATEFUL_FAMILIES or layers & set(STATEFUL_LAYERS):
        return f"{model_type} carries a state from token to token, so packed documents would run into each other"
    if model_type in POSITION_BLIND_FAMILIES or facts.get("alibi"):
        return f"{model_type} does not take position ids, so nothing marks where a packed document starts"
    if attention not in ("auto", "flash", "sdpa", "eager"):
        return f"attention {attention!r} is not known to keep packed documents apart"
    return None


def keeps_documents_apart(config: PreTrainedConfig | Mapping[str, Any], attention: str) -> bool:
    """Whether packing is safe with this model and attention."""
    return why_documents_mix(config, attention) is None


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
