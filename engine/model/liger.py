"""Liger's fused linear cross-entropy: where it applies, whether it works on this machine, and the call.

Liger's kernels are compiled by Triton when they are first launched, which takes a C compiler and a driver that fits. So
the kernel is tried on a few numbers before it is chosen: what fails there would otherwise end the run in its first
micro-batch.

For a trained head Liger sums the weight's gradient in fp32 and adds each chunk's as another fp32 tensor: at a peak it
holds 10 bytes per weight of the head, where `engine.model.chunked` holds one gradient in the weight's dtype. So it is
used for frozen heads alone. (liger-kernel 0.8, ops/fused_linear_cross_entropy.py)

Shapes: H hidden, V vocabulary, N tokens with a target.

Try: `python -m pytest tests/model/test_liger.py`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.utils.import_utils import is_liger_kernel_available

from engine.device.base import Device
from engine.device.oom import classify, is_sticky
from engine.model.head import OutputHead

FusedLoss = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""Sum of token losses from hidden states [N, H], head [V, H], targets [N], bias [V] or None, and label smoothing."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest allowed difference of loss and gradient in the trial between Liger's and torch's, relative to torch's, by
dtype."""

TRIAL_NHV = (24, 16, 40)
"""Sizes of the trial: two chunks of 16 tokens (chunk: N · H / V, rounded up to a power of two)."""


def liger_loss(head: OutputHead, hidden_NH: Tensor, targets_N: Tensor, label_smoothing: float) -> Tensor:
    """Compute the sum of token losses with Liger's fused linear cross-entropy; per-token losses are summed in fp32."""
    assert head.linear is not None
    scaled_NH = hidden_NH * head.scale if head.scale != 1.0 else hidden_NH
    return _fused(scaled_NH, head.linear.weight, targets_N, head.linear.bias, label_smoothing)


def liger_applies(head: OutputHead, device: Device) -> bool:
    """Whether Liger's kernel can compute the loss of this head: it is installed, the device is a GPU, and the head is a
    frozen plain linear layer without a soft-cap. Whether the kernel works here is tested by `liger_problem`."""
    return (
        device.kind == "cuda"
        and head.linear is not None
        and not any(parameter.requires_grad for parameter in head.linear.parameters())
        and head.softcap is None
        and bool(is_liger_kernel_available())
    )


def liger_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Compute loss and gradient of a few random numbers with Liger's kernel and with torch's; returns why Liger cannot
    be used here, or None if the two agree."""
    try:
        found = _trial(_fused, device, dtype)
    except Exception as error:  # of any kind: Triton compiles the kernel with what the machine has
        if classify(error) or is_sticky(error):
            raise
        return f"it fails on this machine: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    expected = _trial(_reference, device, dtype)
    for name, ours, theirs in zip(("loss", "gradient"), found, expected, strict=True):
        error_size, size = float((ours - theirs).norm()), float(theirs.norm())
        if not error_size <= TOLERANCE[dtype] * size:
            return f"its {name} is off by {error_size:.3g} of {size:.3g}"
    return None


def _trial(compute: FusedLoss, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(mean token loss, its gradient with respect to the hidden states [N, H]) for random numbers, in fp32 on the
    host."""
    tokens, width, vocabulary = TRIAL_NHV
    draw = torch.Generator().manual_seed(0)  # its own, so that the run's random states stay as they are
    hidden_NH = torch.randn(tokens, width, generator=draw).to(device, dtype).requires_grad_()
    weight_VH = torch.randn(vocabulary, width, generator=draw).to(device, dtype)
    targets_N = torch.randint(vocabulary, (tokens,), generator=draw).to(device)
    with torch.enable_grad():
        loss = compute(hidden_NH, weight_VH, targets_N, None, 0.0) / tokens
        loss.backward()
    assert hidden_NH.grad is not None
    return loss.detach().float().cpu(), hidden_NH.grad.float().cpu()


def _reference(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, _bias: Tensor | None, smoothing: float
) -> Tensor:
    logits_NV = hidden_NH.float() @ weight_VH.float().T
    return torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="sum", label_smoothing=smoothing)


def _fused(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, bias_V: Tensor | None, label_smoothing: float
) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(
        hidden_NH, weight_VH, targets_N, bias=bias_V, label_smoothing=label_smoothing, reduction="sum"
    )
    return loss.float()
