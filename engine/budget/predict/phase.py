"""What is live in one phase of a step, as a function of the micro-batch's shape.

The phases of a step are made in `engine.budget.predict.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.budget.trace.polynomial import BYTE, BytesPolynomial, Shape, highest_value


@dataclass(frozen=True)
class PhaseCost:
    """Live bytes of one phase above the static bytes: known parts, and the alternatives for the rest."""

    gradients: int
    saved: BytesPolynomial
    """Activations kept for backward by the layers."""
    working: tuple[BytesPolynomial, ...]
    """What else is live, at each local maximum that may be the largest for some shape."""
    label: str
    """The component that the working bytes are shown as."""
    inputs: BytesPolynomial
    """The batch, its positions and masks."""
    buffers: int = 0
    """Gather and reduce buffers of several devices."""

    def sizes(self) -> list[BytesPolynomial]:
        """All that is live, for each alternative."""
        around = self.saved + self.inputs + (self.gradients + self.buffers) * BYTE
        return [around + working for working in self.working]

    def at(self, shape: Shape) -> int:
        """Bytes at a shape."""
        around = self.gradients + self.buffers + self.saved.at(shape) + self.inputs.at(shape)
        return around + highest_value(self.working, shape)

    def components(self, shape: Shape) -> dict[str, int]:
        """Bytes at a shape by component, without those that are zero."""
        activations, buffers = self.saved.at(shape), self.inputs.at(shape) + self.buffers
        parts = {"gradients": self.gradients, "activations": activations, "buffers": buffers}
        parts[self.label] = parts.get(self.label, 0) + highest_value(self.working, shape)
        return {name: size for name, size in parts.items() if size}


Phases = dict[str, tuple[PhaseCost, ...]]
"""Phase name = its alternatives, of which the largest at a shape counts."""


def costliest(costs: Sequence[PhaseCost], shape: Shape) -> PhaseCost:
    """The alternative that is the largest at a shape."""
    return max(costs, key=lambda cost: cost.at(shape))
