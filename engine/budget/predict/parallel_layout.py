"""How a run is spread over devices: the bytes of each rank, and those that cross the network between machines.

With the strategy `replicated`, each rank has all tensors and a buffer to sum gradients in; with `sharded`, an equal
part of them, and gather and reduce buffers (`engine.budget.predict.shards`). Sequence parallelism cuts each sequence
into equal parts; the buffers of its attention are in `engine.budget.trace.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from engine.architecture.facts import Architecture
from engine.budget.calibration import round_to_blocks
from engine.budget.predict.shards import Shards, held_by_a_rank, shards_of
from engine.budget.predict.static import Tensors, static_bytes, static_config
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.operations import FLOAT
from engine.config.schema.run import Profile, RunSpec

BUCKET_BYTES = 32 * 2**20
"""Size of the buffer in which replicated ranks sum gradients: large enough that the network's latency (20 us a message)
vanishes beside the transfer, small beside a model."""


class ParallelLayout(NamedTuple):
    ranks: int = 1
    sharded: bool = False
    gathers_each_time: bool = True
    """Gathered weights are freed after each use (ZeRO-3); if not, they stay from forward to backward (ZeRO-2)."""
    sequence: int = 1
    """Ranks that share one sequence."""

    @property
    def sequence_groups(self) -> int:
        """Number of groups of ranks that work on different sequences."""
        return max(1, self.ranks // self.sequence)

    def part(self, size_bytes: int) -> int:
        """Bytes that one rank has of tensors of `size_bytes`."""
        return -(-size_bytes // self.ranks) if self.sharded else size_bytes

    def positions(self, length: int) -> int:
        """Tokens that one rank gets of a sequence of `length` tokens."""
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
    """The layout of a profile; a single device ignores the strategy. Raises ValueError if the strategy is still
    "auto"."""
    ranks, parallel = profile.device.count * profile.nodes.count, profile.parallel
    if ranks == 1:
        return SINGLE_DEVICE
    if parallel.strategy == "auto":
        raise ValueError('parallel.strategy is "auto": call engine.budget.advise.parallel.settle_parallel first')
    sharded = parallel.strategy == "sharded"
    return ParallelLayout(ranks, sharded, parallel.shard == "parameters", parallel.sequence)


@lru_cache(maxsize=256)
def static_of_a_rank(arch: Architecture, config: MemoryConfig, layout: ParallelLayout) -> Tensors:
    """Bytes that one rank holds throughout the run, and of all its gradients."""
    if layout.sharded:
        return held_by_a_rank(arch, static_config(config), layout.ranks)
    return static_bytes(arch, config).total


def bucket_bytes(arch: Architecture, config: MemoryConfig, layout: ParallelLayout) -> int:
    """Bytes of the buffer in which replicated ranks sum gradients; 0 for other strategies."""
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
    gradients = static_bytes(arch, config).total.gradients
    return gradients // _trained_width(config)


def _trained_width(config: MemoryConfig) -> int:
    return config.adapter_bytes if config.lora else config.base_bytes


@dataclass(frozen=True)
class NetworkTraffic:
    """Bytes that each machine must receive from the others, without those of vision encoders. A collective that sums or
    gathers N bytes over M machines brings each at least N * (M - 1) / M."""

    machines: int
    weights_per_micro_batch: int
    """Gathered weights; 0 if replicated."""
    gradients_per_micro_batch: int
    """Sums of gradients in fp32; 0 if replicated."""
    gradients_per_step: int
    """Sums of gradients in fp32; 0 if sharded."""

    def in_a_step(self, micro_batches: int) -> int:
        """Bytes that each machine receives in an optimizer step."""
        return micro_batches * (self.weights_per_micro_batch + self.gradients_per_micro_batch) + self.gradients_per_step

    def as_json(self, micro_batches: int) -> dict[str, int]:
        """The field `network` of a plan."""
        return {
            "machines": self.machines,
            "weights_bytes_per_micro_batch": self.weights_per_micro_batch,
            "gradients_bytes_per_micro_batch": self.gradients_per_micro_batch,
            "bytes_per_step": self.in_a_step(micro_batches),
        }


def network_traffic(
    arch: Architecture, config: MemoryConfig, layout: ParallelLayout, machines: int
) -> NetworkTraffic | None:
    """The traffic between the `machines` of a run; None if it is one machine."""
    if machines == 1:
        return None

    def received(total_bytes: int) -> int:
        return total_bytes * (machines - 1) // machines

    groups = shards(arch, config, layout)
    if groups is None:
        # The sum is computed in parts, and then gathered.
        return NetworkTraffic(machines, 0, 0, 2 * received(summed_bytes(arch, config)))
    gathered, reduced = groups.micro_batch.gathered, groups.micro_batch.reduced
    return NetworkTraffic(machines, received(gathered), received(reduced), 0)
