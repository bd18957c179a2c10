"""What a device holds beside torch's tensors: its context, library workspaces, and blocks the allocator cannot use.

Figures for CUDA are guesses until this machine has been measured: BUDGET.md, "Constants to measure". Host memory has
none of them: the metered device counts tensors alone.
"""

from __future__ import annotations

from engine.spec.profile import Device

MIB = 2**20
CONTEXT_BYTES = 500 * MIB
"""CUDA context with torch's kernels loaded: 300 to 600 MiB were seen, growing as kernels load."""
HOPPER = 9.0
CUBLAS_BYTES = {True: 32 * MIB, False: 8 * MIB}
"""cuBLAS workspace, on Hopper and newer, and elsewhere (torch's defaults, aten/src/ATen/cuda/CublasHandlePool.cpp)."""
FRAGMENTED_SHARE = {True: 0.02, False: 0.06}
"""Reserved over allocated, with expandable segments and without: 0 to 17 % were seen; a middling value of each."""


def overhead(device: Device, peak_bytes: int) -> dict[str, int]:
    """The components `workspace`, `context` and `fragmentation` of one device."""
    if device.kind != "cuda":
        return {"workspace": 0, "context": 0, "fragmentation": 0}
    expandable = "expandable_segments:True" in (device.allocator or "")
    return {
        "workspace": CUBLAS_BYTES[(device.compute_capability or 0.0) >= HOPPER],
        "context": CONTEXT_BYTES,
        "fragmentation": int(FRAGMENTED_SHARE[expandable] * peak_bytes),
    }
