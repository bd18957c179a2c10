"""The attention kernels that a recipe can name, and the GPUs that each of them runs on.

Facts only, without torch: whether a kernel is installed, and whether it computes a certain model, is decided where the
model is loaded (`engine.model.attention`).

Try: `python -c "from engine.spec.attention_kernels import *; print(flash_kernels(9.0))"`
"""

from __future__ import annotations

from typing import Literal, NamedTuple

AttentionChoice = Literal[
    "auto", "flash", "flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen", "sdpa", "eager"
]
"""Values of model.attention. Those from "flash_attention_2" to "eager" name one kernel each."""


class FlashKernel(NamedTuple):
    """One implementation of flash attention: the package it comes from, and the GPUs it can be trained on."""

    package: str
    """The distribution to install; torch itself for "varlen"."""
    module: str
    """The module that transformers or the engine imports the kernel from."""
    first: float
    """The lowest compute capability on which the kernel's forward and backward pass run."""
    below: float
    """The lowest compute capability that is too high for the kernel."""


FLASH_KERNELS = {
    "flash_attention_2": FlashKernel("flash-attn", "flash_attn", 8.0, 13.0),
    "flash_attention_3": FlashKernel("flash-attn-3", "flash_attn_interface", 8.0, 10.0),
    "flash_attention_4": FlashKernel("flash-attn-4", "flash_attn.cute", 9.0, 13.0),
    "varlen": FlashKernel("torch", "torch.nn.attention.varlen", 8.0, 13.0),
}
"""The flash attention kernels by transformers' names; "varlen" is the one that comes with torch.

Sources: flash-attention's hopper/setup.py (3: sm80 and sm90a alone), flash_attn/cute/interface.py of flash-attn-4
(backward: "Supported: 9.x, 10.x, 11.x, 12.x"), torch's aten/src/ATen/native/transformers/cuda/flash_attn (sm80 on).
"""

FLASH_CHOICES = ("flash", *FLASH_KERNELS)
"""Values of model.attention that ask for some flash attention."""

HOPPER, BLACKWELL = 9.0, 10.0


def runs_on(kernel: str, capability: float) -> bool:
    """Whether the flash kernel named `kernel` runs on GPUs of this compute capability."""
    return FLASH_KERNELS[kernel].first <= capability < FLASH_KERNELS[kernel].below


def flash_kernels(capability: float) -> tuple[str, ...]:
    """The names of the flash kernels that run on GPUs of this compute capability, the one written for them first.

    Version 3 was written for Hopper and version 4 for Blackwell; version 2 and torch's own ("varlen") are the same
    kernel, written for Ampere.
    """
    order = ["flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen"]
    if HOPPER <= capability < BLACKWELL:
        order = ["flash_attention_3", "flash_attention_4", "flash_attention_2", "varlen"]
    elif capability >= BLACKWELL:
        order = ["flash_attention_4", "flash_attention_2", "varlen"]
    return tuple(kernel for kernel in order if runs_on(kernel, capability))
