"""The proof of cuDNN's attention, and how much faster it is than torch's flash kernel on this model's heads."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.model.cudnn_attention import SHORTEST, CudnnAttention, computed_by_cudnn, step_of
from engine.verify.kernels import Variant, attended, attention_kernel, attention_reference, heads_of
from engine.verify.record import Proof, ProvedRun, drawn, tolerance, worst_error

LENGTHS = (SHORTEST, SHORTEST + 64)
TIMED_TOKENS = 8192
"""Most tokens of the micro-batch that is timed; a GPU is busy with as many."""
REPEATS, REPEATED = 6, 64
"""Passes of which the fastest counts; tokens that are drawn, then repeated."""
MOST_OF_FLASH = 0.95
"""Largest share of the flash kernel's time that cuDNN's may take to be used."""


def _applies(run: ProvedRun) -> bool:
    cudnn, loaded = run.context.cudnn, run.context.loaded
    known = heads_of(run) is not None and loaded.base._can_set_attn_implementation()
    return cudnn is not None and cudnn.longest >= SHORTEST and loaded.attention == "sdpa" and known


def prove_cudnn(run: ProvedRun) -> str:
    """Compare output and gradients with attention in fp32, then time both kernels on as many tokens as the longest
    rows have, and the first pass of another shape, for which cuDNN builds a plan."""
    cudnn, limit, errors = _cudnn(run), tolerance(run.context.loaded.precision.compute), []
    by_cudnn = partial(_by_cudnn, run)
    for length in LENGTHS:
        found = attended(run, by_cudnn, length)
        expected = attended(run, partial(attention_reference, run, Variant()), length, torch.float32)
        errors.append(worst_error(found, expected, limit, f" at {length} tokens"))
    length = _multiple(min(cudnn.longest, TIMED_TOKENS))
    rows = TIMED_TOKENS // length
    flash = _seconds(run, attention_kernel(run, "sdpa", Variant()), rows, length)
    fast = _seconds(run, by_cudnn, rows, length)
    # Two lengths at which no plan exists yet: kernels that are compiled for the first of them serve the second.
    firsts = [_seconds(run, by_cudnn, rows, _multiple(length - 1 - number), passes=1) for number in (0, length // 8)]
    plan = max(0.0, min(firsts) - fast)
    told = f"{rows} x {length} tokens take {1000 * fast:.2f} ms per layer, with flash {1000 * flash:.2f}"
    if fast > MOST_OF_FLASH * flash:
        return f"cuDNN is not used: {told}"
    cudnn.use((flash - fast) / (rows * length**2), plan)
    return f"cuDNN is within {max(errors):.1e} of fp32, also in gradients; {told}; {plan:.2f} s for each new shape"


def _multiple(length: int) -> int:
    """The longest length of at most `length` tokens to which rows are padded."""
    return length - length % step_of(length)


def _seconds(run: ProvedRun, attend: Callable[..., Tensor], rows: int, length: int, passes: int = REPEATS) -> float:
    """Of forward and backward; the fastest of several passes."""
    device, heads, compute = run.context.device, heads_of(run), run.context.loaded.precision.compute
    assert heads is not None
    # A few tokens, repeated: what is drawn on the host would take longer than what is timed.
    few = [drawn((1, count, REPEATED, heads.features), compute, run, count) for count in heads[:2]]
    query, key = (each.repeat(rows, 1, -(-length // REPEATED), 1)[:, :, :length].requires_grad_() for each in few)
    value = key.detach().clone().requires_grad_()
    taken = []
    for _ in range(passes):
        device.synchronize()
        began = time.perf_counter()
        with torch.enable_grad():
            output = attend(query, key, value)
            torch.autograd.grad(output, (query, key, value), output.detach())
        device.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _by_cudnn(run: ProvedRun, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rows, _, length, _ = query.shape
    with computed_by_cudnn(rows, length):
        return attention_kernel(run, "sdpa", Variant())(query, key, value)


def _cudnn(run: ProvedRun) -> CudnnAttention:
    assert run.context.cudnn is not None, "applies() was not called"
    return run.context.cudnn


def _use_flash(run: ProvedRun) -> str:
    _cudnn(run).in_use = False
    return "attention uses torch's flash kernel"


CUDNN = Proof("cudnn", prove_cudnn, _use_flash, _applies)
"""Never taken from an earlier run: it measures."""
