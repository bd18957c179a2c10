"""Host memory that offloads take: activations until backward needs them, and optimizer state between steps.

Ranks on one machine share its host memory, so the bytes are those of all of them. What a run needs on the host without
offloads (libraries, data, the model while it is loaded) is not counted. The activations are within 6 % of what the
engine moves (`tests/budget/test_host_memory.py`).

Try: `tunedeck plan -p 80gb -r full --set train.optimizer_offload=true`
"""

from __future__ import annotations

import os
from dataclasses import replace

from engine.budget.architecture.facts import Architecture
from engine.budget.predict.layer_traces import head_offloaded, layer_forward
from engine.budget.predict.parallel_layout import ParallelLayout, layout_of, static_of_a_rank
from engine.budget.predict.vision import vision_cost
from engine.budget.trace.layer_kinds import layer_stack
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.polynomial import BytesPolynomial, shape_of
from engine.spec.schema.profile import Profile


def host_capacity_bytes(profile: Profile) -> int:
    """Bytes of host memory of one machine: the profile's value, else that of this machine."""
    if profile.device.host_memory_gib is not None:
        return int(profile.device.host_memory_gib * 2**30)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_bytes(arch: Architecture, config: MemoryConfig, profile: Profile, rows: int, length: int) -> dict[str, int]:
    """Bytes on the host of one machine by what is offloaded, for micro-batches of `rows` sequences padded to `length`
    tokens; empty without offloads."""
    layout, found = layout_of(profile), dict[str, int]()
    if config.activation_offload:
        patches = rows * config.image_patches
        shape = shape_of(rows, layout.positions(length), config.chunk_tokens, patches=patches)
        found["activations"] = _activations(arch, config).at(shape)
    if config.optimizer_offload:
        found["optimizer"] = _optimizer(arch, config, layout)
    return {name: size * profile.device.count for name, size in found.items()}


def _activations(arch: Architecture, config: MemoryConfig) -> BytesPolynomial:
    """Bytes that one rank's forward pass saves on the host; for checkpointed layers, only their inputs."""
    total = head_offloaded(arch, config)
    for kind, count in layer_stack(arch, config).counts(0, arch.layers).items():
        trace = layer_forward(arch, config, kind)
        total += count * (trace.saved if config.checkpointing else trace.offloaded)
    if config.image_patches:
        total += vision_cost(arch, replace(config, activation_offload=False), False).kept
    return total


def _optimizer(arch: Architecture, config: MemoryConfig, layout: ParallelLayout) -> int:
    """Bytes of one rank's optimizer state, which lies on the host if it is offloaded."""
    return static_of_a_rank(arch, replace(config, optimizer_offload=False), layout).optimizer
