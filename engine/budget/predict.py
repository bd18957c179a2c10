"""The budget of one device: bytes per phase and component at a micro-batch, and the cost function the engine plans with.

Closed form, pure Python, well under a millisecond once an (architecture, setting) pair has been seen. Phases and
components carry the names of BUDGET.md on screen, in events and in --json.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.budget.architecture import Architecture
from engine.budget.setting import Setting, setting_of
from engine.budget.static import static_bytes
from engine.budget.step import Growth, step_growth
from engine.spec.run import RunSpec

COMPONENTS = (
    "weights", "adapters", "gradients", "optimizer", "activations", "recompute", "loss", "buffers",
    "workspace", "context", "fragmentation",
)
"""Rows of the table. Workspace, context and fragmentation are outside what torch allocates."""


@dataclass(frozen=True)
class Prediction:
    """Peak bytes that torch allocates, per phase and component, and on the device as a whole."""

    phases: dict[str, dict[str, int]]
    peak_bytes: int
    deciding_phase: str
    components: dict[str, int]
    """The deciding phase's row of the table."""
    device_bytes: int
    """What the driver would show: the peak plus context, workspaces and fragmentation."""


@dataclass(frozen=True)
class CostModel:
    """Predicted bytes of a micro-batch above what the run holds anyway. Monotone in both arguments."""

    static_bytes: int
    growths: tuple[Growth, ...]
    chunk_tokens: int

    def bytes(self, rows: int, length: int) -> int:
        """Bytes above `static_bytes` at the peak of a micro-batch of `rows` sequences padded to `length` tokens."""
        tokens, squares = rows * length, rows * length * length
        chunk = min(tokens, self.chunk_tokens)
        return max(g[0] + tokens * g[1] + squares * g[2] + chunk * g[3] for g in self.growths)


def cost_model(arch: Architecture, spec: RunSpec) -> CostModel:
    """The cost function of a run; cheap enough to be called for every candidate of every step."""
    return _cost_model(arch, setting_of(arch, spec))


@lru_cache(maxsize=256)
def _cost_model(arch: Architecture, setting: Setting) -> CostModel:
    total = static_bytes(arch, setting).total
    growths = {*step_growth(arch, setting).values(), Growth(total.gradients)}
    return CostModel(total.static, tuple(sorted(growths)), setting.chunk_tokens)


def predict(arch: Architecture, spec: RunSpec, *, rows: int, length: int) -> Prediction:
    """The whole table for a micro-batch of `rows` sequences of `length` tokens."""
    setting = setting_of(arch, spec)
    total = static_bytes(arch, setting).total
    held = {"weights": total.weights, "adapters": total.adapters, "optimizer": total.optimizer}
    phases = {"load": {"weights": total.weights, "adapters": total.adapters}}
    for phase, growth in step_growth(arch, setting).items():
        phases[phase] = {**held, "activations": growth.at(rows, length, setting.chunk_tokens)}
    phases["optimizer_step"] = {**held, "gradients": total.gradients}
    sums = {phase: sum(parts.values()) for phase, parts in phases.items()}
    deciding = max(sums, key=sums.__getitem__)
    return Prediction(phases, sums[deciding], deciding, phases[deciding], sums[deciding])
