"""What a device holds beside torch's tensors: its context, library workspaces, and blocks the allocator cannot use.

Figures for CUDA are guesses until a run on this machine has measured them (`engine.budget.calibration`). Host memory
has none of them: the metered device counts tensors alone.
"""

from __future__ import annotations

from engine.budget.calibration import is_expandable, residuals_for
from engine.spec.profile import Profile

MIB = 2**20
CONTEXT_BYTES = 500 * MIB
"""CUDA context with torch's kernels loaded: 300 to 600 MiB were seen, growing as kernels load."""
HOPPER = 9.0
CUBLAS_BYTES = {True: 32 * MIB, False: 8 * MIB}
"""cuBLAS workspace, on Hopper and newer, and elsewhere (torch's defaults, aten/src/ATen/cuda/CublasHandlePool.cpp)."""
FRAGMENTED_SHARE = {True: 0.02, False: 0.06}
"""Reserved over allocated, with expandable segments and without: 0 to 17 % were seen; a middling value of each."""


def overhead(profile: Profile, peak_bytes: int) -> dict[str, int]:
    """The components `workspace`, `context` and `fragmentation` of one device."""
    device = profile.device
    if device.kind != "cuda":
        return {"workspace": 0, "context": 0, "fragmentation": 0}
    seen = residuals_for(profile)
    if seen is not None:
        fragmentation = int(seen.fragmented_share * peak_bytes)
        return {"workspace": seen.workspace_bytes, "context": seen.context_bytes, "fragmentation": fragmentation}
    return {
        "workspace": CUBLAS_BYTES[(device.compute_capability or 0.0) >= HOPPER],
        "context": CONTEXT_BYTES,
        "fragmentation": int(FRAGMENTED_SHARE[is_expandable(device.allocator)] * peak_bytes),
    }
