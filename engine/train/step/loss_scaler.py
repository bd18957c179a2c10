"""Loss scaling for fp16: the scale and the number of clean steps, which are restored when a step is undone and are
saved with the run state.

Same rule as torch.amp.GradScaler (start 2^16, halve on overflow, double after 2000 clean steps), without its tensors on
the device: the gradient norm, computed for clipping anyway, says whether a gradient overflowed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GROWTH_INTERVAL = 2000
SMALLEST_SCALE = 1.0
"""A gradient that is not finite although nothing was scaled up is no overflow of the scale: the data or the weights are
broken. torch's scaler would halve for ever."""


@dataclass
class LossScaler:
    """`scale` multiplies the loss before backward; it is always 1.0 if `enabled` is false."""

    enabled: bool
    scale: float = 1.0
    clean_steps: int = 0

    @classmethod
    def start(cls, enabled: bool) -> LossScaler:
        """A scaler at its initial scale: 2^16, or 1.0 if `enabled` is false."""
        return cls(enabled, 2.0**16 if enabled else 1.0)

    @property
    def can_back_off(self) -> bool:
        """Whether the scale can be lowered, which may make the gradients finite."""
        return self.enabled and self.scale > SMALLEST_SCALE

    def overflowed(self) -> None:
        """Halve the scale, after a step that was skipped because a gradient was not finite."""
        self.scale, self.clean_steps = self.scale / 2, 0

    def succeeded(self) -> None:
        """Count a step that was applied; doubles the scale after 2000 of them without an overflow."""
        self.clean_steps += 1
        if self.enabled and self.clean_steps >= GROWTH_INTERVAL:
            self.scale, self.clean_steps = self.scale * 2, 0

    def as_json(self) -> dict[str, Any]:
        """The scaler's fields, for a checkpoint."""
        return asdict(self)
