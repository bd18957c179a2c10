"""cuDNN's attention kernel in place of torch's flash kernel, where it is faster: forward and backward take about half
the time on an H100.

cuDNN builds a plan of execution for each new shape of queries and keys. So rows are padded to lengths that come again
(`rounded`), and a shape is left to the flash kernel until it has come so often that its plan is worth building: then at
most twice as much is lost as by knowing in advance which shapes will come again (the ski-rental rule; Karlin et al.,
Algorithmica 3, 1988).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.budget.trace.memory_config import may_take_cudnn
from engine.config.schema.run import RunSpec
from engine.device.base import Device
from engine.model.loaded import LoadedModel

SHORTEST = 512
"""Tokens of a row below which attention takes too little of a step's time to pad rows for it."""
LENGTHS_PER_OCTAVE = 64
"""So many lengths between one power of two and the next: padding adds at most 1/64 of the tokens."""
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""In this order: what cuDNN cannot compute, the others do."""


def rounded(length: int, longest: int) -> int:
    """The tokens to which rows of at most `length` tokens are padded, never more than `longest`, for which memory is
    planned."""
    step = step_of(length)
    padded = -(-length // step) * step
    return padded if padded <= longest else length


def step_of(length: int) -> int:
    """Tokens between one length and the next to which rows of about `length` tokens are padded."""
    return 1 if length < SHORTEST else max(8, 2 ** (length.bit_length() - 1) // LENGTHS_PER_OCTAVE)


@dataclass
class CudnnAttention:
    """Which micro-batches of a run cuDNN's kernel computes: none until `use` has been called."""

    longest: int
    """Tokens of the longest row of the data."""
    layers: int
    saved_seconds: float = 0.0
    """What one layer's forward and backward save, per row and square of the length."""
    plan_seconds: float = 0.0
    """What the plan for a new shape costs."""
    in_use: bool = False
    _lost_seconds: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))

    def use(self, saved_seconds: float, plan_seconds: float) -> None:
        """Let cuDNN compute the shapes for which that is worth it."""
        self.saved_seconds, self.plan_seconds, self.in_use = saved_seconds, plan_seconds, True

    def width(self, length: int) -> int:
        """The tokens to which the rows of a micro-batch are padded, of which the longest has `length`."""
        return rounded(length, self.longest) if self.in_use else length

    @contextmanager
    def micro_batch(self, rows: int, length: int) -> Iterator[None]:
        """Around forward and backward of a micro-batch of `rows` × `length` tokens, padding included."""
        if not self.in_use or length < SHORTEST or length % step_of(length):
            yield
            return
        shape = rows, length
        if self._lost_seconds[shape] < self.plan_seconds:
            self._lost_seconds[shape] += self.layers * self.saved_seconds * rows * length**2
            yield
            return
        with computed_by_cudnn(rows, length):
            yield


@contextmanager
def computed_by_cudnn(rows: int, length: int) -> Iterator[None]:
    """Inside the block cuDNN computes attention of `rows` sequences of `length` tokens that needs no mask, as far as it
    can; everything else is computed as before."""

    def attend(module: nn.Module, *states: Any, **options: Any) -> tuple[Tensor, None]:
        query, key, _, mask = states
        same = (query.shape[0], query.shape[2], key.shape[2]) == (rows, length, length)
        fits = mask is None and same and not options.get("dropout")
        with sdpa_kernel(BACKENDS, set_priority=True) if fits else nullcontext():
            return sdpa_attention_forward(module, *states, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def cudnn_attention(spec: RunSpec, device: Device, loaded: LoadedModel, longest: int) -> CudnnAttention | None:
    """For a run that `may_take_cudnn`, in half precision, with a model that does not attend to padding; else None.
    `longest`: tokens of the longest row of the data."""
    if device.torch_device.type != "cuda":
        return None
    capability, _ = torch.cuda.get_device_capability(device.torch_device)
    half = loaded.precision.compute in (torch.bfloat16, torch.float16)
    suits = half and loaded.attention == "sdpa" and not loaded.attends_to_padding
    if not suits or not may_take_cudnn(spec.recipe, spec.profile, capability):
        return None
    return CudnnAttention(longest, loaded.layers)
