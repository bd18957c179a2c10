"""Chooses the attention kernel of a model from its config, its device and the packages that are installed.

Whether a package is installed is asked of transformers' own predicates: flash-attn and flash-attn-4 install modules of
one name, so finding the module says nothing. A package that is installed and does not import (built for another torch)
is passed over, with a notice. Which kernels prevent attention between packed documents is decided in
`engine.budget.architecture.packing_support`.

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
from engine.model.varlen import register_varlen, varlen_obstacle
from engine.spec.attention_kernels import (
    BLACKWELL,
    FLASH_CHOICES,
    FLASH_KERNELS,
    AttentionChoice,
    flash_kernels,
    runs_on,
)

POSITIONS_BY_AXIS = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types whose position ids have three axes, for images. They recognise packed documents only if the position ids
have a fourth axis, put before the three, with the positions in the text."""

CONSUMER_BLACKWELL = 12.0
"""Compute capability of Blackwell cards that are not for data centers."""

MOST_HEAD_DIM = 256
"""The widest heads of flash attention's kernels."""


class ChosenAttention(NamedTuple):
    """The attention kernel of a run."""

    name: str
    """Its name in transformers' attention interface."""
    notices: list[str]
    """Why a better kernel that is installed is not used."""


class Obstacle(NamedTuple):
    """The reason why a kernel cannot be used."""

    reason: str
    unexpected: bool
    """True if the kernel's package is installed, so that the user may expect it to be used."""


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
        EnvironmentProblem: flash attention was asked for, of any or of one kind, and cannot run here.
        UsageError: sdpa was asked for, but the architecture has none, or one without the model's soft-cap.
    """
    if asked == "eager":
        return ChosenAttention("eager", [])
    found: dict[str, Obstacle] = {}
    for kernel in _flash_candidates(asked, device, packing):
        obstacle = _flash_obstacle(kernel, config, device, dtype, deterministic)
        if obstacle is None:
            return ChosenAttention(kernel, _notices(found))
        found[kernel] = obstacle
    if asked in FLASH_CHOICES:
        raise _no_flash(asked, found, device)
    notices = _notices(found)
    if _sdpa_is_right(config):
        return ChosenAttention("sdpa", notices)
    if asked == "sdpa":
        raise UsageError(
            f'model.attention = "sdpa": {config.model_type} has no sdpa attention that computes what the model needs',
            fix='set model.attention = "auto"',
        )
    return ChosenAttention("eager", notices)


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


def _flash_candidates(asked: AttentionChoice, device: Device, packing: bool) -> list[str]:
    """The flash kernels to try, the best first; none for "sdpa", nor without CUDA unless one is asked for by name."""
    if asked in FLASH_KERNELS:
        return [asked]
    if asked == "sdpa" or device.torch_device.type != "cuda":
        return []
    kernels = flash_kernels(_capability(device))
    return [kernel for kernel in kernels if asked == "flash" or packing or kernel != "varlen"]


def _flash_obstacle(
    kernel: str, config: PreTrainedConfig, device: Device, dtype: torch.dtype, deterministic: bool
) -> Obstacle | None:
    """Return why a flash kernel cannot be used, or None if it can."""
    reason = (
        _obstacle_on_device(kernel, device, dtype) or _obstacle_in_model(kernel, config, device) or _missing(kernel)
    )
    if reason is not None:
        return Obstacle(reason, unexpected=False)
    problem = _import_problem(kernel) or (_nondeterminism(kernel, device) if deterministic else None)
    return None if problem is None else Obstacle(problem, unexpected=True)


def _obstacle_on_device(kernel: str, device: Device, dtype: torch.dtype) -> str | None:
    if device.torch_device.type != "cuda":
        return f"needs a CUDA device, this is {device.name}"
    capability = _capability(device)
    if not runs_on(kernel, capability):
        facts = FLASH_KERNELS[kernel]
        return f"runs on compute capability {facts.first:g} to below {facts.below:g}, {device.name} has {capability:g}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16 only, not {dtype}"
    return None


def _obstacle_in_model(kernel: str, config: PreTrainedConfig, device: Device) -> str | None:
    if not _supports(config, "_supports_flash_attn"):
        return f"transformers has none for {config.model_type}"
    compatible = _attribute(config, "_compatible_flash_implementations")
    if compatible is not None and kernel not in compatible:
        return f"transformers computes {config.model_type} with {' or '.join(compatible)} alone"
    if kernel == "varlen" and (obstacle := varlen_obstacle(config)) is not None:
        return obstacle
    width = head_dim(config)
    if width > MOST_HEAD_DIM or width % 8:
        return f"has heads of up to {MOST_HEAD_DIM} values, a multiple of 8; {config.model_type} has {width}"
    # flash_attn/cute/interface.py of flash-attn-4, _validate_head_dims.
    if kernel == "flash_attention_4" and 128 < width < MOST_HEAD_DIM and _capability(device) >= BLACKWELL:
        return f"has heads of up to 128 values, or of 256, on this device; {config.model_type} has {width}"
    return None


def _missing(kernel: str) -> str | None:
    """Return why a kernel's package does not count as installed, or None if it is there."""
    if kernel == "varlen":
        register_varlen()
        return None
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


def _nondeterminism(kernel: str, device: Device) -> str | None:
    """Return why a kernel's backward pass cannot be deterministic, or None if it can. torch's own follows
    `torch.use_deterministic_algorithms`."""
    if kernel == "varlen":
        return None
    # flash_attn/cute/interface.py of flash-attn-4: "deterministic backward not supported on SM 12.0".
    unable = kernel == "flash_attention_4" and _capability(device) >= CONSUMER_BLACKWELL
    facts = FLASH_KERNELS[kernel]
    if unable or not has_deterministic_backward(importlib.import_module(facts.module).flash_attn_varlen_func):
        return f"has no deterministic backward pass here ({facts.package})"
    return None


def _notices(found: dict[str, Obstacle]) -> list[str]:
    return [f"{kernel} is not used: {obstacle.reason}" for kernel, obstacle in found.items() if obstacle.unexpected]


def _no_flash(asked: str, found: dict[str, Obstacle], device: Device) -> EnvironmentProblem:
    reasons = "; ".join(f"{kernel} {obstacle.reason}" for kernel, obstacle in found.items())
    if not found:
        reasons = f"needs a CUDA device of compute capability 8.0 or newer, this is {device.name}"
    return EnvironmentProblem(f'model.attention = "{asked}": {reasons}', fix='set model.attention = "auto"')


def head_dim(config: PreTrainedConfig) -> int:
    """Return the number of values per attention head of the decoder that `config` describes."""
    text = config.get_text_config()
    own = getattr(text, "head_dim", None)
    return int(own) if own else int(text.hidden_size) // int(text.num_attention_heads)


def _capability(device: Device) -> float:
    major, minor = torch.cuda.get_device_capability(device.torch_device)
    return major + minor / 10


def _supports(config: PreTrainedConfig, flag: str) -> bool:
    """Return a flag such as `_supports_sdpa` of the model class for `config`; True for models with remote code, which
    transformers checks itself when it loads them."""
    model_class = _model_class(config)
    return True if model_class is None else bool(getattr(model_class, flag, False))


def _attribute(config: PreTrainedConfig, name: str) -> Any:
    """Return an attribute of the model class for `config`; None if the class does not have it, or is not known."""
    return getattr(_model_class(config), name, None)


def _model_class(config: PreTrainedConfig) -> Any:
    """Return transformers' model class for `config`; None for models with remote code."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return None
