"""Memory in addition to the model's tensors on the device: CUDA context, cuBLAS workspaces and fragmentation there, and
host memory for what is offloaded.

Figures are typical values until a run on this machine has measured them (`engine.budget.calibration`). Runs in host
memory, the metered device included, have no such memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from engine.architecture.facts import Architecture
from engine.budget.calibration import is_expandable, residuals_for
from engine.budget.predict.layer_traces import head_offloaded, layer_forward
from engine.budget.predict.parallel_layout import ParallelLayout, layout_of, static_of_a_rank
from engine.budget.predict.recompute import recomputing_stack
from engine.budget.predict.vision import vision_cost
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.polynomial import BytesPolynomial, shape_of
from engine.config.files.cgroups import host_memory_bytes
from engine.config.schema.run import Profile, RunSpec

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
    """Memory of one device in addition to the model's tensors."""

    workspace_bytes: int
    """cuBLAS' workspaces, which it takes from torch's allocator at the first matrix product and keeps."""
    context_bytes: int
    """What of the CUDA context exceeds the profile's reserve; only this counts against capacity."""
    fragmented_share: float
    reserved_context_bytes: int = 0
    """What of the CUDA context fits into the profile's reserve."""

    def total(self, peak_bytes: int) -> int:
        """Bytes that count against capacity when torch allocates `peak_bytes`."""
        return self.workspace_bytes + self.context_bytes + int(self.fragmented_share * peak_bytes)

    def room_bytes(self, capacity_bytes: int) -> int:
        """The most bytes that torch may allocate for the total to be within `capacity_bytes`."""
        return int((capacity_bytes - self.workspace_bytes - self.context_bytes) / (1 + self.fragmented_share))

    def components(self, peak_bytes: int) -> dict[str, int]:
        return {
            "workspace": self.workspace_bytes,
            "context": self.context_bytes,
            "fragmentation": int(self.fragmented_share * peak_bytes),
        }


def non_torch_memory(spec: RunSpec) -> NonTorchMemory:
    """Memory beside tensors as earlier runs on this machine measured it, else typical values; zero for devices other
    than CUDA. The profile's reserve is meant for the CUDA context, which counts only where it exceeds it."""
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
    held = min(context_bytes, int(profile.device.reserve_gib * 2**30))
    return NonTorchMemory(workspace_bytes, context_bytes - held, share, held)


def host_capacity_bytes(profile: Profile) -> int:
    """Bytes of host memory of one machine: the profile's value, else what a process may use on this machine."""
    if profile.device.host_memory_gib is not None:
        return int(profile.device.host_memory_gib * 2**30)
    return host_memory_bytes()


def host_bytes(arch: Architecture, config: MemoryConfig, profile: Profile, rows: int, length: int) -> dict[str, int]:
    """Bytes on the host of one machine by what is offloaded (activations, optimizer), for micro-batches of `rows`
    sequences of `length` tokens; empty without offloads. Ranks share the host, so the bytes are those of all. What a
    run needs there anyway (libraries, data, loading) is not counted. Activations are within 6 % of what the engine
    moves (`tests/budget/test_host_memory.py`)."""
    layout, found = layout_of(profile), dict[str, int]()
    if config.activation_offload:
        patches = rows * config.image_patches
        shape = shape_of(rows, layout.positions(length), config.chunk_tokens, patches=patches)
        found["activations"] = _activations(arch, config).at(shape)
    if config.optimizer_offload:
        found["optimizer"] = state_on_host(arch, config, layout)
    return {name: size * profile.device.count for name, size in found.items()}


def _activations(arch: Architecture, config: MemoryConfig) -> BytesPolynomial:
    """Bytes that one rank's forward pass saves on the host; for checkpointed layers, only their inputs."""
    total = head_offloaded(arch, config)
    for kind, count in recomputing_stack(arch, config).counts(0, arch.layers).items():
        trace = layer_forward(arch, config, kind)
        total += count * (trace.saved if kind.recomputed else trace.offloaded)
    if config.image_patches:
        total += vision_cost(arch, replace(config, activation_offload=False), False).kept
    return total


def state_on_host(arch: Architecture, config: MemoryConfig, layout: ParallelLayout) -> int:
    """Bytes of one rank's optimizer state that optimizer offload keeps on the host."""
    return static_of_a_rank(arch, replace(config, optimizer_offload=False), layout).optimizer
