"""`PhaseCost`: the live bytes of one phase of a step, as a function of the micro-batch's shape.

`engine.budget.predict.step` computes the phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.budget.trace.polynomial import BYTE, NO_BYTES, BytesPolynomial, Shape, highest_value


@dataclass(frozen=True)
class PhaseCost:
    """Live bytes of one phase above the static bytes: parts that are live throughout, plus the largest of `working`."""

    gradients: int
    saved: BytesPolynomial
    """Activations that layers have saved for backward."""
    working: tuple[BytesPolynomial, ...]
    """Bytes of all other tensors, at each local maximum that may be the largest for some shape."""
    label: str
    """The component under which `components` reports the working bytes."""
    inputs: BytesPolynomial
    """The batch, its positions and masks."""
    buffers: int = 0
    """Gather and reduce buffers of several devices."""

    def sizes(self) -> list[BytesPolynomial]:
        """All live bytes of the phase above the static bytes: one polynomial for each entry of `working`."""
        around = self.saved + self.inputs + (self.gradients + self.buffers) * BYTE
        return [around + working for working in self.working]

    def at(self, shape: Shape) -> int:
        """The phase's peak bytes at a shape, above the static bytes."""
        around = self.gradients + self.buffers + self.saved.at(shape) + self.inputs.at(shape)
        return around + highest_value(self.working, shape)

    def components(self, shape: Shape) -> dict[str, int]:
        """The phase's peak bytes at a shape, above the static bytes, by component; components of zero bytes are left
        out. The scratch of attention's backward pass is counted under `buffers`."""
        working = max(self.working, key=lambda size: size.at(shape), default=NO_BYTES)
        scratch = working.per_block_token * shape.blocks
        buffers = self.inputs.at(shape) + self.buffers + scratch
        parts = {"gradients": self.gradients, "activations": self.saved.at(shape), "buffers": buffers}
        parts[self.label] = parts.get(self.label, 0) + working.at(shape) - scratch
        return {name: size for name, size in parts.items() if size}


Phases = dict[str, tuple[PhaseCost, ...]]
"""For each phase name the moments that may be its peak; the largest at a shape counts."""


def costliest(costs: Sequence[PhaseCost], shape: Shape) -> PhaseCost:
    """The one of several costs of a phase that has the most bytes at a shape."""
    return max(costs, key=lambda cost: cost.at(shape))
