"""What several devices that share a run hold, each: parts of the model, and buffers to gather and reduce in.

Replicated: everything, and the buffer gradients are summed in (`engine.parallel.reduce`). Sharded (torch's FSDP2, one
group per layer, the embedding and the head apart): an equal part of weights, gradients and optimizer state; while a
group is at work its weights are there in full, the next one's arrive in a flat buffer, and gradients leave through an
fp32 one. `shard = "gradients"` keeps the gathered weights from forward to backward. Sequence parallelism cuts each
sequence into equal parts; what travels around attention is in `engine.budget.exchange`. The prediction of sharding
follows `torch/distributed/fsdp/_fully_shard` of torch 2.13 and is not measured yet.

Try: `tunedeck plan -p 4xh100 -r full`
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.kinds import Kind, stack_of
from engine.budget.operations import FLOAT
from engine.budget.setting import Setting
from engine.budget.static import Tensors, layer_tensors, rounded, static_bytes
from engine.spec.profile import Profile
from engine.spec.run import RunSpec

BUCKET_BYTES = 32 * 2**20
"""Of the buffer in which gradients are summed over replicas; `engine.parallel.reduce` says the same."""


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
    sharded = parallel.strategy == "sharded"
    return Sharing(ranks, sharded, parallel.shard == "parameters", parallel.sequence)


@lru_cache(maxsize=256)
def static_of_a_rank(arch: Architecture, setting: Setting, sharing: Sharing) -> Tensors:
    """What a rank holds at every moment, its gradients when they are complete."""
    total = static_bytes(arch, setting).total
    if not sharing.sharded:
        return total
    return Tensors(
        sharing.part(total.weights), sharing.part(total.adapters), sharing.part(total.gradients),
        sharing.part(total.optimizer),
    )


def bucket_bytes(arch: Architecture, setting: Setting, sharing: Sharing) -> int:
    """Of replicas: the buffer that is there from the start to the end of a run."""
    if sharing.ranks == 1 or sharing.sharded:
        return 0
    return min(BUCKET_BYTES, rounded(_trained_elements(arch, setting) * FLOAT))


@lru_cache(maxsize=256)
def buffers(arch: Architecture, setting: Setting, sharing: Sharing, phase: str) -> int:
    """Of shards: bytes one rank communicates through in a phase."""
    if not sharing.sharded:
        return 0
    return _gathered(arch, setting, sharing, phase) + _reduced(arch, setting, phase)


def _gathered(arch: Architecture, setting: Setting, sharing: Sharing, phase: str) -> int:
    """Weights in full: of the group at work beside the next one in its flat buffer, or of all groups and one buffer."""
    if phase in ("load", "optimizer_step"):
        return 0
    total = static_bytes(arch, setting).total
    layer = max(_group(arch, setting, kind) for kind in stack_of(arch, setting).kinds)
    table = rounded(arch.vocab * arch.hidden * setting.base_bytes)
    if not sharing.gathers_each_time and phase not in ("evaluate", "generate"):
        return total.weights + total.adapters + max(layer, table)
    if phase == "loss_backward":
        return table + max(layer, table)
    return 2 * table if phase == "embedding_backward" else 2 * max(layer, table if arch.tied else 0)


def _reduced(arch: Architecture, setting: Setting, phase: str) -> int:
    """Gradients on their way out, in fp32: one group's at a time."""
    static, per_element = static_bytes(arch, setting), FLOAT / setting.base_bytes
    if phase == "embedding_backward":
        return int(static.embedding_gradient * per_element)
    if phase not in ("layer_first", "layer_last"):
        return 0
    if setting.lora:
        per_element = FLOAT / setting.adapter_bytes
    layer = max(layer_tensors(arch, setting, kind.chosen).gradients for kind in stack_of(arch, setting).kinds)
    return int(max(layer, static.head_gradient) * per_element)


def _group(arch: Architecture, setting: Setting, kind: Kind) -> int:
    """Weights and adapters of one layer."""
    tensors = layer_tensors(arch, setting, kind.chosen)
    return tensors.weights + tensors.adapters


def _trained_elements(arch: Architecture, setting: Setting) -> int:
    """Values that learn, from the bytes of their gradients."""
    gradients = static_bytes(arch, setting).total.gradients
    return gradients // (setting.adapter_bytes if setting.lora else setting.base_bytes)
