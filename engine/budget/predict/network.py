"""Bytes that cross the network between the machines of a run.

Counted is what each machine must receive from the others, however the collectives are laid out: a collective that sums
or gathers N bytes over M machines brings each of them at least N * (M - 1) / M. Sharded weights are spread over all
devices of all machines, so they cross in every micro-batch; replicated ranks sum their gradients once in a step.

Try: `tunedeck plan -p 4xh100 -r full --set nodes.count=2 --json`
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.budget.architecture.facts import Architecture
from engine.budget.predict.parallel_layout import ParallelLayout, shards, summed_bytes
from engine.budget.trace.memory_config import MemoryConfig


@dataclass(frozen=True)
class NetworkTraffic:
    """Bytes that each machine receives from the others. Encoders for images are not counted."""

    machines: int
    weights_per_micro_batch: int
    """Gathered weights; 0 if weights are replicated."""
    gradients_per_micro_batch: int
    """Sums of gradients in fp32; 0 if weights are replicated."""
    gradients_per_step: int
    """Sums of gradients in fp32 of replicated ranks; 0 if weights are sharded."""

    def in_a_step(self, micro_batches: int) -> int:
        """Bytes that each machine receives in an optimizer step of `micro_batches` micro-batches."""
        return micro_batches * (self.weights_per_micro_batch + self.gradients_per_micro_batch) + self.gradients_per_step

    def as_json(self, micro_batches: int) -> dict[str, int]:
        """The field `network` of a plan whose steps have `micro_batches` micro-batches."""
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
    gathered, reduced = groups.gathered_in_micro_batch(), groups.reduced_in_micro_batch()
    return NetworkTraffic(machines, received(gathered), received(reduced), 0)
