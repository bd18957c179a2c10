"""Chooses the attention kernel of a model; and the kernel "varlen", torch's flash attention for documents without a
mask."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import import_utils

from engine.config.attention import (
    FLASH_KERNELS,
    AttentionCard,
    AttentionChoice,
    AttentionNeeds,
    Obstacle,
    choose_kernel,
    no_deterministic_backward,
)
from engine.device.base import Device
from engine.device.determinism import has_deterministic_backward
from engine.errors import EnvironmentProblem, UsageError
from engine.model.config import classes_in, layer_configs, model_class
from engine.model.positions import starts_are_handed_over

NAME = "varlen"


def register_varlen() -> None:
    """Register the kernel and its mask with transformers; calling it again has no effect. torch has it since 2.10
    (`torch.nn.attention.varlen`), for CUDA in half precision; transformers does not know it."""
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, varlen_mask)


def varlen_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """sdpa's mask; None where the kernel is told where documents begin."""
    if starts_are_handed_over():
        return None
    mask: Tensor | None = sdpa_mask(*arguments, **options)
    return mask


def varlen_attention(
    module: torch.nn.Module,
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention for one layer; returns outputs [B, S, H, D] and None. `cu_seq_lens_q` and `max_length_q` are
    `starts_D1` and `longest` of `engine.data.batch.Documents`; without them sdpa computes it. UsageError if they are
    missing where masks do not separate packed documents."""
    if cu_seq_lens_q is None or max_length_q is None:
        if starts_are_handed_over():
            raise UsageError(
                f'model.attention = "varlen": {type(module).__name__} does not receive the starts of packed documents',
                fix='set model.attention = "sdpa"',
            )
        return sdpa_attention_forward(
            module, query_BHSD, key_BKSD, value_BKSD, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if dropout or options.get("softcap") is not None or options.get("s_aux") is not None:
        raise UsageError(
            f'model.attention = "varlen" does not support the dropout, soft-cap or sinks of {type(module).__name__}',
            fix='set model.attention = "auto"',
        )
    query_THD, key_TKD, value_TKD = (_flat(tensor) for tensor in (query_BHSD, key_BKSD, value_BKSD))
    width = value_TKD.shape[-1]
    if width < query_THD.shape[-1]:  # the kernel has one width for queries, keys and values
        value_TKD = torch.nn.functional.pad(value_TKD, (0, query_THD.shape[-1] - width))
    output_THD = varlen.varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **_grouped_heads(varlen.varlen_attn) if query_THD.shape[1] != key_TKD.shape[1] else {},
    )
    assert isinstance(output_THD, Tensor)
    batch, heads, length, _ = query_BHSD.shape
    return output_THD.view(batch, length, heads, -1)[..., :width], None


@functools.cache
def _grouped_heads(kernel: Callable[..., Any]) -> dict[str, Any]:
    """The argument that allows fewer key heads than query heads. torch 2.11 has none and allows them always."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


def _flat(tensor_BHSD: Tensor) -> Tensor:
    """All rows, one after another: [T, H, D] with T = B·S, in autocast's dtype if autocast is enabled."""
    device = tensor_BHSD.device.type
    if torch.is_autocast_enabled(device):
        tensor_BHSD = tensor_BHSD.to(torch.get_autocast_dtype(device))
    return tensor_BHSD.transpose(1, 2).flatten(0, 1)


POSITIONS_BY_AXIS = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types with three-axis position ids, for images: they recognise packed documents only by a fourth axis in front,
with the positions in the text."""


class ChosenAttention(NamedTuple):
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

    "auto" takes torch's varlen kernel for packed data alone: without packing sdpa runs the same kernel.
    EnvironmentProblem: flash attention was asked for and cannot run here. UsageError: "sdpa" was asked for, but the
    architecture lacks it, or lacks the soft-cap that the model needs.
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
            f'model.attention = "sdpa": {config.model_type} has no sdpa attention that supports this model',
            fix='set model.attention = "auto"',
        )
    if chosen.name == "varlen":
        register_varlen()
    return ChosenAttention(chosen.name, _notices(chosen.obstacles))


def attention_by_part(config: PreTrainedConfig, kernel: str) -> str | dict[str, str]:
    """The value of `attn_implementation` for transformers: `kernel` for the whole model, or a kernel for each part by
    its key in `config`, if the class of one, such as an audio encoder, has no such kernel: sdpa, else eager."""
    flag = "_supports_flash_attn" if kernel in FLASH_KERNELS else "_supports_sdpa"
    parts: dict[str, Any] = {key: getattr(config, key, None) for key in config.sub_configs}
    classes = {key: classes_in(MODEL_MAPPING, part) for key, part in parts.items() if type(part) in MODEL_MAPPING}
    others = {
        key: "sdpa" if part._supports_sdpa else "eager"
        for key, (part, *_) in classes.items()
        if not getattr(part, flag, True)
    }
    return {"": kernel, **dict.fromkeys(parts, kernel), **others} if others else kernel


def attends_to_later_tokens(model: torch.nn.Module) -> bool:
    """Whether later tokens may influence earlier ones. True unless every attention module declares itself causal; so
    also for models that build position biases from the mask (Bloom)."""
    declared = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return not declared or not all(declared)


def attention_needs(config: PreTrainedConfig) -> AttentionNeeds:
    """What decides which kernels a model can use: head size, soft-cap, attention dropout, its class's kernels."""
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
    if kernel == "varlen":
        return None  # part of torch, and deterministic where torch is told to be
    if (reason := _missing(kernel)) is not None:
        return Obstacle(reason, unexpected=False)
    problem = _import_problem(kernel) or (_nondeterminism(kernel) if deterministic else None)
    return None if problem is None else Obstacle(problem, unexpected=True)


def _missing(kernel: str) -> str | None:
    # Finding the module does not tell: flash-attn and flash-attn-4 install one of the same name.
    predicate = getattr(import_utils, f"is_flash_attn_{kernel[-1]}_available", None)
    if predicate is None:
        return "needs a newer transformers"
    return None if predicate() else f"needs the package {FLASH_KERNELS[kernel].package}, which is not installed"


def _import_problem(kernel: str) -> str | None:
    facts = FLASH_KERNELS[kernel]
    try:
        importlib.import_module(facts.module)
    # A package built for another torch, or without its compiler, fails in one of these ways.
    except (ImportError, OSError, RuntimeError) as error:
        return f"needs {facts.package}, which is installed but cannot be imported: {str(error).splitlines()[0]}"
    return None


def _nondeterminism(kernel: str) -> str | None:
    module = importlib.import_module(FLASH_KERNELS[kernel].module)
    return None if has_deterministic_backward(module.flash_attn_varlen_func) else no_deterministic_backward(kernel)


def _notices(found: dict[str, Obstacle]) -> list[str]:
    return [f"{kernel} is not used: {obstacle.reason}" for kernel, obstacle in found.items() if obstacle.unexpected]


def _no_flash(asked: str, found: dict[str, Obstacle], device: Device) -> EnvironmentProblem:
    reasons = "; ".join(f"{kernel} {obstacle.reason}" for kernel, obstacle in found.items())
    if not found:
        reasons = f"needs a CUDA device of compute capability 8.0 or newer, not {device.name}"
    return EnvironmentProblem(f'model.attention = "{asked}": {reasons}', fix='set model.attention = "auto"')


def head_dim(config: PreTrainedConfig) -> int:
    """Values per attention head of the decoder, of the widest where layers differ (Gemma 4); 0 for a model without
    attention heads, such as Mamba."""
    return max(_head_dim(layer) for layer in layer_configs(config.get_text_config()))


def _head_dim(layer: PreTrainedConfig) -> int:
    own, heads = getattr(layer, "head_dim", None), getattr(layer, "num_attention_heads", None)
    if own or not heads:
        return int(own or 0)
    return int(layer.hidden_size) // int(heads)


def _capability(device: Device) -> float:
    major, minor = torch.cuda.get_device_capability(device.torch_device)
    return major + minor / 10


def _supports(config: PreTrainedConfig, flag: str) -> bool:
    """A class flag such as `_supports_sdpa`; True for remote code, which transformers checks when it loads it."""
    found = model_class(config)
    return True if found is None else bool(getattr(found, flag, False))


def _attribute(config: PreTrainedConfig, name: str) -> Any:
    return getattr(model_class(config), name, None)
