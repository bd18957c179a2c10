"""What several devices that share a run hold, each: parts of the model, and buffers to gather and reduce in.

Replicated: everything, and the buffer gradients are summed in (`engine.distributed.gradient_all_reduce`). Sharded: an
equal part of weights, gradients and optimizer state, and what they travel through (`engine.budget.shards`). Sequence
parallelism cuts each sequence into equal parts; what travels around attention is in `engine.budget.exchange`.

Try: `tunedeck plan -p 4xh100 -r full`
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.operations import FLOAT
from engine.budget.setting import Setting
from engine.budget.shards import Shards, held_by_a_rank, shards_of
from engine.budget.static import Tensors, lasting, rounded, static_bytes
from engine.spec.schema.profile import Profile
from engine.spec.schema.run import RunSpec

BUCKET_BYTES = 32 * 2**20
"""Of the buffer in which gradients are summed over replicas; `engine.distributed.gradient_all_reduce` says the same."""


class Sharing(NamedTuple):
    """How a run is spread over devices."""

    ranks: int = 1
    sharded: bool = False
    gathers_each_time: bool = True
    """Weights are gathered for every use and dropped after it (ZeRO-3); else kept from forward to backward (ZeRO-2)."""
    sequence: int = 1
    """Ranks that share one sequence."""

    @property
    def rows_apart(self) -> int:
        """Groups of ranks that work on different sequences."""
        return max(1, self.ranks // self.sequence)

    def part(self, size_bytes: int) -> int:
        """A rank's part of tensors that are sharded."""
        return -(-size_bytes // self.ranks) if self.sharded else size_bytes

    def positions(self, length: int) -> int:
        """Tokens of a sequence that one rank holds."""
        return -(-length // self.sequence)


ALONE = Sharing()


def on_one_device(spec: RunSpec) -> RunSpec:
    """The same run by one process: that is how it is evaluated."""
    parallel = spec.profile.parallel.model_copy(update={"strategy": "single", "sequence": 1})
    device = spec.profile.device.model_copy(update={"count": 1})
    nodes = spec.profile.nodes.model_copy(update={"count": 1})
    profile = spec.profile.model_copy(update={"parallel": parallel, "device": device, "nodes": nodes})
    return spec.model_copy(update={"profile": profile})


def sharing_of(profile: Profile) -> Sharing:
    """Resolve a profile. One device shares with nobody, whatever its strategy."""
    ranks, parallel = profile.device.count * profile.nodes.count, profile.parallel
    if ranks == 1:
        return ALONE
    return Sharing(ranks, parallel.strategy == "sharded", parallel.shard == "parameters", parallel.sequence)


@lru_cache(maxsize=256)
def static_of_a_rank(arch: Architecture, setting: Setting, sharing: Sharing) -> Tensors:
    """What a rank holds at every moment, its gradients when they are complete."""
    if sharing.sharded:
        return held_by_a_rank(arch, lasting(setting), sharing.ranks)
    return static_bytes(arch, setting).total


def bucket_bytes(arch: Architecture, setting: Setting, sharing: Sharing) -> int:
    """The buffer for gradients that is there from the start to the end of a run; shards have none."""
    if sharing.ranks == 1 or sharing.sharded:
        return 0
    return min(BUCKET_BYTES, rounded(_trained_elements(arch, setting) * FLOAT))


def shards(arch: Architecture, setting: Setting, sharing: Sharing) -> Shards | None:
    """The groups of weights that are spread over ranks; None where they are not."""
    if not sharing.sharded:
        return None
    return shards_of(arch, lasting(setting), sharing.ranks, keeps=not sharing.gathers_each_time)


def _trained_elements(arch: Architecture, setting: Setting) -> int:
    """Values that learn, from the bytes of their gradients."""
    gradients = static_bytes(arch, setting).total.gradients
    return gradients // _trained_width(setting)


def _trained_width(setting: Setting) -> int:
    return setting.adapter_bytes if setting.lora else setting.base_bytes
