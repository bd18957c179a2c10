"""Device memory in addition to the model's tensors: CUDA context, cuBLAS workspaces, and reserved but unusable blocks.

The figures are typical values until a run on this machine has measured them (`engine.budget.calibration`). Runs in host
memory, the metered device included, have no such memory.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.budget.calibration import is_expandable, residuals_for
from engine.spec.schema.profile import Profile
from engine.spec.schema.run import RunSpec

MIB = 2**20
CONTEXT_BYTES = 500 * MIB
"""CUDA context with torch's kernels loaded: 300 to 600 MiB were seen, growing as kernels load."""
HOPPER = 9.0
CUBLAS_BYTES = {True: 32 * MIB, False: 8 * MIB + 128 * 1024}
"""One cuBLAS workspace, on Hopper and newer, and elsewhere: torch's defaults (`parseChosenWorkspaceSize` in
aten/src/ATen/cuda/CublasHandlePool.cpp). cuBLASLt shares it."""
CUBLAS_FIXED_BYTES = 32 * MIB
"""One cuBLAS workspace with CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic runs set."""
CUBLAS_WORKSPACES = 2
"""torch keeps a workspace for each pair of cuBLAS handle and stream, and a handle for each thread. Forward runs in the
engine's thread, backward in autograd's."""
FRAGMENTED_SHARE = {True: 0.02, False: 0.06}
"""Reserved but unusable bytes as a share of allocated bytes, with expandable segments (True) and without (False).
Shares of 0 to 17 % were seen. Also used where only small runs were measured."""


class NonTorchMemory(NamedTuple):
    """Memory of one device in addition to the model's tensors: workspaces and CUDA context in bytes, and fragmentation
    as a share of the bytes that tensors take."""

    workspace_bytes: int
    """Bytes of cuBLAS' workspaces, which cuBLAS takes from torch's allocator at the first matrix product and keeps."""
    context_bytes: int
    """Bytes of the CUDA context that exceed the profile's reserve; only these count against capacity."""
    fragmented_share: float
    reserved_context_bytes: int = 0
    """Bytes of the CUDA context that fit into the profile's reserve."""

    def total(self, peak_bytes: int) -> int:
        """Non-torch bytes that count against capacity when torch allocates `peak_bytes`."""
        return self.workspace_bytes + self.context_bytes + int(self.fragmented_share * peak_bytes)

    def room_bytes(self, capacity_bytes: int) -> int:
        """The most bytes that torch may allocate at the peak for the total to be within `capacity_bytes`."""
        return int((capacity_bytes - self.workspace_bytes - self.context_bytes) / (1 + self.fragmented_share))

    def components(self, peak_bytes: int) -> dict[str, int]:
        """Non-torch bytes by component: `workspace`, `context` and `fragmentation`."""
        return {
            "workspace": self.workspace_bytes,
            "context": self.context_bytes,
            "fragmentation": int(self.fragmented_share * peak_bytes),
        }


def non_torch_memory(spec: RunSpec) -> NonTorchMemory:
    """Memory of one device in addition to the model's tensors, as earlier runs on this machine measured it; without
    such runs, typical values. Zero for devices other than CUDA.

    The profile's reserve is meant for the CUDA context, so the context counts against capacity only where it exceeds
    the reserve.
    """
    profile, device = spec.profile, spec.profile.device
    if device.kind != "cuda":
        return NonTorchMemory(0, 0, 0.0)
    seen = residuals_for(profile)
    typical_share = FRAGMENTED_SHARE[is_expandable(device.allocator)]
    if seen is not None:
        share = typical_share if seen.fragmented_share is None else seen.fragmented_share
        return _beside_reserve(profile, seen.workspace_bytes, seen.context_bytes, share)
    fixed = spec.recipe.train.deterministic
    one_bytes = CUBLAS_FIXED_BYTES if fixed else CUBLAS_BYTES[(device.compute_capability or 0.0) >= HOPPER]
    return _beside_reserve(profile, CUBLAS_WORKSPACES * one_bytes, CONTEXT_BYTES, typical_share)


def _beside_reserve(profile: Profile, workspace_bytes: int, context_bytes: int, share: float) -> NonTorchMemory:
    """Non-torch memory with a CUDA context of `context_bytes`, which fills the profile's reserve first. `share`:
    fragmentation as a share of the bytes that tensors take."""
    held = min(context_bytes, int(profile.device.reserve_gib * 2**30))
    return NonTorchMemory(workspace_bytes, context_bytes - held, share, held)
