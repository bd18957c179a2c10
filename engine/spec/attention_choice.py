"""Chooses a run's attention kernel; a plan and the run itself choose by the same rules.

The choice depends on the model, the device, and the kernels that work on this machine. For the last, the run imports
the kernels' packages (`engine.model.attention`), while a plan only reads which packages are installed
(`engine.budget.trace.memory_config`).

Try: `python -m pytest tests/model/test_attention.py tests/budget/test_packed_attention.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.spec.attention_kernels import (
    BLACKWELL,
    FLASH_CHOICES,
    FLASH_KERNELS,
    AttentionChoice,
    flash_kernels,
    runs_on,
)

CONSUMER_BLACKWELL = 12.0
"""Compute capability of Blackwell cards that are not for data centers."""

MOST_HEAD_DIM = 256
"""The widest heads of flash attention's kernels."""


class AttentionNeeds(NamedTuple):
    """The facts of a model that decide which attention kernels can compute it."""

    model_type: str
    head_dim: int
    has_flash: bool
    """Whether transformers offers flash attention for the model."""
    flash_only: tuple[str, ...] | None
    """The only flash kernels with which transformers can compute the model; None if any will do."""
    has_sdpa: bool
    """Whether transformers offers sdpa for the model."""
    softcap: bool
    """Whether attention scores are soft-capped, which sdpa and varlen do not support."""
    dropout: str
    """The key and value in the model's config, as text, if its attention weights have dropout; else empty."""


class AttentionCard(NamedTuple):
    """The facts of a device that decide which attention kernels run on it."""

    name: str
    capability: float | None
    """Compute capability; None if unknown, or if the device is no CUDA card."""
    is_cuda: bool
    dtype: str
    """Dtype that attention is computed in: "bfloat16", "float16" or "float32"."""


class Obstacle(NamedTuple):
    """The reason why a kernel cannot be used."""

    reason: str
    unexpected: bool
    """True if the kernel's package is installed, so that the user may expect it to be used."""


class KernelChoice(NamedTuple):
    """The kernel of a run."""

    name: str | None
    """The kernel's name in transformers' attention interface; None if flash attention was asked for and cannot run."""
    obstacles: dict[str, Obstacle]
    """Why kernels that are preferred to the chosen one cannot be used, by their names."""


def choose_kernel(
    asked: AttentionChoice,
    model: AttentionNeeds,
    card: AttentionCard,
    obstacle_here: Callable[[str], Obstacle | None],
    *,
    packing: bool,
    deterministic: bool,
) -> KernelChoice:
    """Choose the kernel for `model.attention = asked`. `obstacle_here(name)` returns what prevents a kernel on this
    machine, or None. `packing`: rows hold several documents; `deterministic`: the backward pass must be deterministic.

    "auto" chooses torch's own varlen kernel only for packed data: without packing, sdpa runs the same kernel. "sdpa" is
    returned where it is asked for, even if it cannot compute the model; the caller must refuse it.
    """
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
    """The names of the flash kernels to try, the best first. Empty for "sdpa", and empty without CUDA unless a kernel
    is asked for by name. Without `packing`, "auto" leaves out varlen."""
    if asked in FLASH_KERNELS:
        return [asked]
    if asked == "sdpa" or not card.is_cuda or card.capability is None:
        return []
    return [kernel for kernel in flash_kernels(card.capability) if asked == "flash" or packing or kernel != "varlen"]


def _obstacle(kernel: str, model: AttentionNeeds, card: AttentionCard, deterministic: bool) -> Obstacle | None:
    """Why a kernel cannot compute the model on this card even if it is installed; None if it can. `deterministic`: its
    backward pass must be deterministic."""
    reason = _obstacle_on_card(kernel, card) or _obstacle_in_model(kernel, model, card)
    consumer_card = (card.capability or 0) >= CONSUMER_BLACKWELL
    if reason is None and deterministic and kernel == "flash_attention_4" and consumer_card:
        # flash_attn/cute/interface.py of flash-attn-4: "deterministic backward not supported on SM 12.0".
        return Obstacle(no_deterministic_backward(kernel), unexpected=True)
    return None if reason is None else Obstacle(reason, unexpected=False)


def no_deterministic_backward(kernel: str) -> str:
    """Text for a message: why a deterministic run cannot use the flash kernel `kernel`."""
    return f"has no deterministic backward pass here ({FLASH_KERNELS[kernel].package})"


def _obstacle_on_card(kernel: str, card: AttentionCard) -> str | None:
    if not card.is_cuda:
        return f"needs a CUDA device, this is {card.name}"
    if card.capability is None or not runs_on(kernel, card.capability):
        facts, has = FLASH_KERNELS[kernel], "an unknown one" if card.capability is None else f"{card.capability:g}"
        return f"runs on compute capability {facts.first:g} to below {facts.below:g}, {card.name} has {has}"
    if card.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 or float16 only, not {card.dtype}"
    return None


def _obstacle_in_model(kernel: str, model: AttentionNeeds, card: AttentionCard) -> str | None:
    if not model.has_flash:
        return f"transformers has none for {model.model_type}"
    if model.flash_only is not None and kernel not in model.flash_only:
        return f"transformers computes {model.model_type} with {' or '.join(model.flash_only)} alone"
    if kernel == "varlen" and model.dropout:
        return f"has no dropout, {model.model_type} has {model.dropout}"
    if kernel == "varlen" and model.softcap:
        return f"has no soft-cap of the scores, which {model.model_type} needs"
    width = model.head_dim
    if width > MOST_HEAD_DIM or width % 8:
        return f"has heads of up to {MOST_HEAD_DIM} values, a multiple of 8; {model.model_type} has {width}"
    # flash_attn/cute/interface.py of flash-attn-4, _validate_head_dims.
    if kernel == "flash_attention_4" and 128 < width < MOST_HEAD_DIM and (card.capability or 0) >= BLACKWELL:
        return f"has heads of up to 128 values, or of 256, on this device; {model.model_type} has {width}"
    return None
