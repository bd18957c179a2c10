"""How a run is spread over devices, and the static bytes of each device.

With the strategy `replicated`, each rank has all tensors and a buffer to sum gradients in
(`engine.distributed.gradient_all_reduce`). With `sharded`, each has an equal part of weights, gradients and optimizer
state, and gather and reduce buffers (`engine.budget.predict.shards`). Sequence parallelism cuts each sequence into
equal parts; the buffers of its attention are in `engine.budget.trace.ulysses_buffers`.

Try: `tunedeck plan -p 4xh100 -r full`
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture.facts import Architecture
from engine.budget.blocks import round_to_blocks
from engine.budget.predict.shards import Shards, held_by_a_rank, shards_of
from engine.budget.predict.static import Tensors, static_bytes, static_config
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.operations import FLOAT
from engine.spec.schema.profile import Profile
from engine.spec.schema.run import RunSpec

BUCKET_BYTES = 32 * 2**20
"""Size of the buffer in which replicated ranks sum gradients; the same as in
`engine.distributed.gradient_all_reduce`."""


class ParallelLayout(NamedTuple):
    """How a run is spread over devices."""

    ranks: int = 1
    sharded: bool = False
    gathers_each_time: bool = True
    """Weights are gathered for every use and freed after it (ZeRO-3); if not, they stay gathered from forward to
    backward (ZeRO-2)."""
    sequence: int = 1
    """Ranks that share one sequence."""

    @property
    def sequence_groups(self) -> int:
        """Number of groups of ranks that work on different sequences; the ranks of one group share theirs."""
        return max(1, self.ranks // self.sequence)

    def part(self, size_bytes: int) -> int:
        """Bytes that one rank has of tensors of `size_bytes`: an equal share if sharded, else all."""
        return -(-size_bytes // self.ranks) if self.sharded else size_bytes

    def positions(self, length: int) -> int:
        """Tokens that one rank gets of a sequence of `length` tokens, rounded up."""
        return -(-length // self.sequence)


SINGLE_DEVICE = ParallelLayout()


def on_one_device(spec: RunSpec) -> RunSpec:
    """The run spec changed to a single device, on which trained models are evaluated."""
    parallel = spec.profile.parallel.model_copy(update={"strategy": "single", "sequence": 1})
    device = spec.profile.device.model_copy(update={"count": 1})
    nodes = spec.profile.nodes.model_copy(update={"count": 1})
    profile = spec.profile.model_copy(update={"parallel": parallel, "device": device, "nodes": nodes})
    return spec.model_copy(update={"profile": profile})


def layout_of(profile: Profile) -> ParallelLayout:
    """The layout of a profile; a single device ignores the strategy. With several devices the strategy must be decided:
    ValueError if it is "auto"."""
    ranks, parallel = profile.device.count * profile.nodes.count, profile.parallel
    if ranks == 1:
        return SINGLE_DEVICE
    if parallel.strategy == "auto":
        raise ValueError('parallel.strategy is "auto": call engine.budget.advise.strategy.settle_parallel first')
    sharded = parallel.strategy == "sharded"
    return ParallelLayout(ranks, sharded, parallel.shard == "parameters", parallel.sequence)


@lru_cache(maxsize=256)
def static_of_a_rank(arch: Architecture, config: MemoryConfig, layout: ParallelLayout) -> Tensors:
    """Bytes that one rank holds throughout the run (weights, adapters, optimizer state), and bytes of all its
    gradients."""
    if layout.sharded:
        return held_by_a_rank(arch, static_config(config), layout.ranks)
    return static_bytes(arch, config).total


def bucket_bytes(arch: Architecture, config: MemoryConfig, layout: ParallelLayout) -> int:
    """Bytes of the buffer in which replicated ranks sum gradients for the whole run; 0 for other strategies."""
    if layout.ranks == 1 or layout.sharded:
        return 0
    return min(BUCKET_BYTES, round_to_blocks(summed_bytes(arch, config)))


def summed_bytes(arch: Architecture, config: MemoryConfig) -> int:
    """Bytes of all gradients in fp32, which replicated ranks sum in every step."""
    return _trained_elements(arch, config) * FLOAT


def shards(arch: Architecture, config: MemoryConfig, layout: ParallelLayout) -> Shards | None:
    """The groups of weights that are sharded over ranks; None if the strategy is not `sharded`."""
    if not layout.sharded:
        return None
    return shards_of(arch, static_config(config), layout.ranks, keeps=not layout.gathers_each_time)


def _trained_elements(arch: Architecture, config: MemoryConfig) -> int:
    """Number of trained values, computed from the bytes of their gradients."""
    gradients = static_bytes(arch, config).total.gradients
    return gradients // _trained_width(config)


def _trained_width(config: MemoryConfig) -> int:
    return config.adapter_bytes if config.lora else config.base_bytes
