"""Attention kernels: those that a recipe can name, the GPUs that each runs on, and how a run's kernel is chosen. A plan
and the run itself choose by the same rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

AttentionChoice = Literal[
    "auto", "flash", "flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen", "sdpa", "eager"
]
"""Values of model.attention. Those from "flash_attention_2" to "eager" name one kernel each."""


class FlashKernel(NamedTuple):
    package: str
    """The distribution to install; torch itself for "varlen"."""
    module: str
    first: float
    """The lowest compute capability on which its forward and backward pass run."""
    below: float
    """The lowest compute capability that is too high for it."""


FLASH_KERNELS = {
    "flash_attention_2": FlashKernel("flash-attn", "flash_attn", 8.0, 13.0),
    "flash_attention_3": FlashKernel("flash-attn-3", "flash_attn_interface", 8.0, 10.0),
    "flash_attention_4": FlashKernel("flash-attn-4", "flash_attn.cute", 9.0, 13.0),
    "varlen": FlashKernel("torch", "torch.nn.attention.varlen", 8.0, 13.0),
}
"""The flash attention kernels by transformers' names; "varlen" comes with torch.

Sources: flash-attention's hopper/setup.py (3: sm80 and sm90a alone), flash_attn/cute/interface.py of flash-attn-4
(backward: "Supported: 9.x, 10.x, 11.x, 12.x"), torch's aten/src/ATen/native/transformers/cuda/flash_attn (sm80 on).
"""

FLASH_CHOICES = ("flash", *FLASH_KERNELS)

HOPPER, BLACKWELL = 9.0, 10.0


def runs_on(kernel: str, capability: float) -> bool:
    return FLASH_KERNELS[kernel].first <= capability < FLASH_KERNELS[kernel].below


def flash_kernels(capability: float) -> tuple[str, ...]:
    """The flash kernels for this compute capability, the one written for it first: version 3 is for Hopper, 4 for
    Blackwell; version 2 and torch's "varlen" are the same kernel, written for Ampere."""
    order = ["flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen"]
    if HOPPER <= capability < BLACKWELL:
        order = ["flash_attention_3", "flash_attention_4", "flash_attention_2", "varlen"]
    elif capability >= BLACKWELL:
        order = ["flash_attention_4", "flash_attention_2", "varlen"]
    return tuple(kernel for kernel in order if runs_on(kernel, capability))


CONSUMER_BLACKWELL = 12.0
"""Of Blackwell cards that are not for data centers."""

MOST_HEAD_DIM = 256
"""The widest heads of flash attention's kernels."""


class AttentionNeeds(NamedTuple):
    model_type: str
    head_dim: int
    has_flash: bool
    """Whether transformers offers flash attention for the model."""
    flash_only: tuple[str, ...] | None
    """The only flash kernels with which transformers can compute the model; None if any will do."""
    has_sdpa: bool
    softcap: bool
    """Whether attention scores are soft-capped, which sdpa and varlen do not support."""
    dropout: str
    """The key and value in the model's config, as text, if its attention weights have dropout; else empty."""


class AttentionCard(NamedTuple):
    name: str
    capability: float | None
    """Compute capability; None if unknown, or if the device is no CUDA card."""
    is_cuda: bool
    dtype: str
    """Dtype that attention is computed in: "bfloat16", "float16" or "float32"."""


class Obstacle(NamedTuple):
    reason: str
    unexpected: bool
    """True if the kernel's package is installed, so that the user may expect it to be used."""


class KernelChoice(NamedTuple):
    name: str | None
    """The kernel's name in transformers' attention interface; None if flash attention was asked for and cannot run."""
    obstacles: dict[str, Obstacle]
    """Why each kernel preferred to the chosen one cannot be used, by name."""


def choose_kernel(
    asked: AttentionChoice,
    model: AttentionNeeds,
    card: AttentionCard,
    obstacle_here: Callable[[str], Obstacle | None],
    *,
    packing: bool,
    deterministic: bool,
) -> KernelChoice:
    """Choose the kernel for `model.attention = asked`; `obstacle_here(name)` returns what prevents a kernel on this
    machine. "auto" takes torch's varlen kernel only for packed rows: without packing, sdpa runs the same kernel. "sdpa"
    is returned where asked for, even if it cannot compute the model; the caller must refuse it."""
    if asked == "eager":
        return KernelChoice("eager", {})
    found: dict[str, Obstacle] = {}
    for kernel in flash_candidates(asked, card, packing=packing):
        obstacle = _obstacle(kernel, model, card, deterministic) or obstacle_here(kernel)
        if obstacle is None:
            return KernelChoice(kernel, found)
        found[kernel] = obstacle
    if asked in FLASH_CHOICES:
        return KernelChoice(None, found)
    # sdpa where it is asked for although it leaves something out: the caller refuses it.
    right = model.has_sdpa and not model.softcap
    return KernelChoice("sdpa" if right or asked == "sdpa" else "eager", found)


def flash_candidates(asked: AttentionChoice, card: AttentionCard, *, packing: bool) -> list[str]:
    """The flash kernels to try, best first. Empty for "sdpa", and without CUDA unless a kernel is asked for by name."""
    if asked in FLASH_KERNELS:
        return [asked]
    if asked == "sdpa" or not card.is_cuda or card.capability is None:
        return []
    return [kernel for kernel in flash_kernels(card.capability) if asked == "flash" or packing or kernel != "varlen"]


def _obstacle(kernel: str, model: AttentionNeeds, card: AttentionCard, deterministic: bool) -> Obstacle | None:
    """Why a kernel cannot compute the model on this card even if it is installed; None if it can."""
    reason = _obstacle_on_card(kernel, card) or _obstacle_in_model(kernel, model, card)
    consumer_card = (card.capability or 0) >= CONSUMER_BLACKWELL
    if reason is None and deterministic and kernel == "flash_attention_4" and consumer_card:
        # flash_attn/cute/interface.py of flash-attn-4: "deterministic backward not supported on SM 12.0".
        return Obstacle(no_deterministic_backward(kernel), unexpected=True)
    return None if reason is None else Obstacle(reason, unexpected=False)


def no_deterministic_backward(kernel: str) -> str:
    return f"has no deterministic backward pass here ({FLASH_KERNELS[kernel].package})"


def _obstacle_on_card(kernel: str, card: AttentionCard) -> str | None:
    if not card.is_cuda:
        return f"needs a CUDA device, this is {card.name}"
    if card.capability is None or not runs_on(kernel, card.capability):
        facts, has = FLASH_KERNELS[kernel], "an unknown one" if card.capability is None else f"{card.capability:g}"
        return f"needs compute capability {facts.first:g} to below {facts.below:g}, but {card.name} has {has}"
    if card.dtype not in ("bfloat16", "float16"):
        return f"supports only bfloat16 and float16, not {card.dtype}"
    return None


def _obstacle_in_model(kernel: str, model: AttentionNeeds, card: AttentionCard) -> str | None:
    if not model.has_flash:
        return f"transformers has no such attention for {model.model_type}"
    if model.flash_only is not None and kernel not in model.flash_only:
        return f"transformers supports only {' or '.join(model.flash_only)} for {model.model_type}"
    if kernel == "varlen" and model.dropout:
        return f"does not support dropout, which {model.model_type} has ({model.dropout})"
    if kernel == "varlen" and model.softcap:
        return f"does not support the soft-cap of scores that {model.model_type} needs"
    width = model.head_dim
    if width > MOST_HEAD_DIM or width % 8:
        return f"supports head sizes up to {MOST_HEAD_DIM}, in multiples of 8; {model.model_type} has {width}"
    # flash_attn/cute/interface.py of flash-attn-4, _validate_head_dims.
    if kernel == "flash_attention_4" and 128 < width < MOST_HEAD_DIM and (card.capability or 0) >= BLACKWELL:
        return f"supports head sizes up to 128, or 256, on this device; {model.model_type} has {width}"
    return None
