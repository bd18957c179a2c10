"""How evenly a mixture's tokens are spread over its experts: a summary in step events, the whole matrix at evaluations,
warnings of layers that use few experts (collapsed) and of experts that get almost no tokens (dead).

A share is an expert's part of its layer's choices. The entropy of a layer's shares is scaled: 0 if every token goes to
the same k experts, 1 if all get the same. Shapes: L layers with experts, E experts of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.journal.directory import RunDirectory
from engine.journal.events import Journal, until_there_is_room
from engine.journal.files import write_atomically
from engine.model.expert_balance import ExpertBalance

COLLAPSED_BELOW = 0.25
"""Entropy below which a layer counts as collapsed."""
DEAD_BELOW = 0.1
"""An expert counts as dead below this part of an even share."""
LOGGED_STEPS = 20
"""Logged steps in a row after which a warning is given."""
FIX = "raise moe.aux_loss_weight, with moe.freeze_router = false to train the routers"


@dataclass
class ExpertCounters:
    """What a resume restores: choices since the last evaluation, streaks of collapsed layers and dead experts."""

    choices_LE: list[list[int]] = field(default_factory=list)
    """Summed since the last matrix was written; empty before the first step."""
    steps: int = 0
    """Number of steps in `choices_LE`."""
    collapsed_L: list[int] = field(default_factory=list)
    """Logged steps in a row in which each layer was collapsed."""
    dead_LE: list[list[int]] = field(default_factory=list)
    """Logged steps in a row in which each expert was dead."""
    warned: list[str] = field(default_factory=list)
    """Warnings already given, each as "CODE LAYER"."""

    def add(self, choices_LE: NDArray[np.int64]) -> None:
        before = np.array(self.choices_LE or np.zeros_like(choices_LE))
        self.choices_LE, self.steps = (before + choices_LE).tolist(), self.steps + 1


class ExpertWarning(NamedTuple):
    code: str
    text: str
    fix: str


@dataclass(frozen=True)
class ExpertUtilisation:
    """Shares, entropies and warnings of a model in which each token chooses `per_token` experts in each of `layers`."""

    layers: tuple[int, ...]
    """Numbers of the layers with experts."""
    per_token: int

    def summary(self, choices_LE: NDArray[np.int64]) -> dict[str, Any]:
        """One step: each expert's mean share over layers, smallest and largest share, lowest entropy with its layer."""
        shares_LE, entropy_L = shares(choices_LE), entropies(choices_LE, self.per_token)
        worst = int(entropy_L.argmin())
        return {
            "mean": [round(float(share), 5) for share in shares_LE.mean(0)],
            "least": round(float(shares_LE.min()), 5),
            "most": round(float(shares_LE.max()), 5),
            "entropy": round(float(entropy_L[worst]), 5),
            "layer": self.layers[worst],
        }

    def warnings(self, counters: ExpertCounters, choices_LE: NDArray[np.int64]) -> Iterator[ExpertWarning]:
        """Update the streaks after a logged step; yield the warnings that are due, each once in a run."""
        shares_LE = shares(choices_LE)
        collapsed_L = entropies(choices_LE, self.per_token) < COLLAPSED_BELOW
        dead_LE = shares_LE < DEAD_BELOW / shares_LE.shape[1]
        counters.collapsed_L = _streaks(counters.collapsed_L, collapsed_L)
        counters.dead_LE = _streaks(counters.dead_LE, dead_LE)
        for index, layer in enumerate(self.layers):
            if counters.collapsed_L[index] >= LOGGED_STEPS and _is_new(counters, "expert_collapse", layer):
                yield self._collapse(layer, shares_LE[index])
            dead = [expert for expert, streak in enumerate(counters.dead_LE[index]) if streak >= LOGGED_STEPS]
            if dead and _is_new(counters, "expert_dead", layer):
                yield self._dead(layer, dead, shares_LE.shape[1])

    def matrix(self, counters: ExpertCounters, step: int) -> dict[str, Any]:
        """The steps since the last evaluation as JSON: each expert's share and each layer's entropy."""
        choices_LE = np.array(counters.choices_LE)
        return {
            "step": step,
            "steps": counters.steps,
            "layers": list(self.layers),
            "experts_per_token": self.per_token,
            "shares": np.round(shares(choices_LE), 6).tolist(),
            "entropy": np.round(entropies(choices_LE, self.per_token), 6).tolist(),
        }

    def _collapse(self, layer: int, shares_E: NDArray[np.float64]) -> ExpertWarning:
        most = ", ".join(f"{expert} ({100 * shares_E[expert]:.0f} %)" for expert in shares_E.argsort()[::-1][:3])
        text = f"layer {layer} sends almost all tokens to the same experts for {LOGGED_STEPS} logged steps: {most}"
        return ExpertWarning("expert_collapse", text, FIX)

    def _dead(self, layer: int, dead: list[int], count: int) -> ExpertWarning:
        named = ", ".join(map(str, dead[:8])) + (" …" if len(dead) > 8 else "")
        text = (
            f"layer {layer}: {len(dead)} of {count} experts received less than {DEAD_BELOW:g} of an even share "
            f"of the tokens for {LOGGED_STEPS} logged steps: {named}"
        )
        return ExpertWarning("expert_dead", text, FIX)


class ExpertMonitor:
    """Follows the use of experts through a run. `counters` returns the current counters, which checkpoints hold."""

    def __init__(
        self,
        utilisation: ExpertUtilisation | None,
        counters: Callable[[], ExpertCounters],
        directory: RunDirectory,
        journal: Journal,
    ) -> None:
        self._utilisation, self._counters = utilisation, counters
        self._directory, self._journal = directory, journal

    def after_step(self, choices_LE: NDArray[np.int64] | None) -> None:
        """Add a finished step's choices; None without watched experts. All ranks call this."""
        if choices_LE is not None:
            self._counters().add(choices_LE)

    def event_fields(self, choices_LE: NDArray[np.int64] | None) -> dict[str, Any]:
        """Additional fields of a step event; none if `choices_LE` is None."""
        if self._utilisation is None or choices_LE is None:
            return {}
        return {"expert_utilisation": self._utilisation.summary(choices_LE)}

    def warn(self, choices_LE: NDArray[np.int64] | None) -> None:
        """Update the counters after a logged step, and write the warnings that have become due."""
        if self._utilisation is not None and choices_LE is not None:
            for warning in self._utilisation.warnings(self._counters(), choices_LE):
                self._journal.warn(*warning)

    def after_evaluation(self, step: int, *, writes: bool) -> None:
        """Reset the counted choices; the rank that `writes` first writes their matrix. All ranks call this."""
        if self._utilisation is None:
            return
        counters = self._counters()
        if writes and counters.steps:
            matrix, path = self._utilisation.matrix(counters, step), self._directory.expert_matrix(step)
            until_there_is_room(lambda: _write(path, matrix))
        counters.choices_LE, counters.steps = [], 0


def utilisation_of(balance: ExpertBalance | None) -> ExpertUtilisation | None:
    """None if `balance` counts no choices."""
    if balance is None or not balance.watched:
        return None
    return ExpertUtilisation(balance.layers, balance.per_token)


def _write(path: Path, matrix: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(matrix) + "\n")


def shares(choices_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each expert's share [L, E] of its layer's choices; equal shares for a layer without choices."""
    totals_L1 = choices_LE.sum(1, keepdims=True)
    even = np.full(choices_LE.shape, 1.0 / choices_LE.shape[1])
    shares_LE: NDArray[np.float64] = np.divide(choices_LE, totals_L1, out=even, where=totals_L1 > 0)
    return shares_LE


def entropies(choices_LE: NDArray[np.int64], per_token: int) -> NDArray[np.float64]:
    """Entropy [L] of each layer's shares: 0 where all tokens choose the same `per_token` experts, 1 where all are
    chosen equally often or each token chooses all."""
    shares_LE = shares(choices_LE)
    logs_LE = np.log(shares_LE, out=np.zeros_like(shares_LE), where=shares_LE > 0)
    least, most = np.log(per_token), np.log(shares_LE.shape[1])
    if most <= least:
        return np.ones(len(shares_LE))
    scaled_L: NDArray[np.float64] = (-(shares_LE * logs_LE).sum(1) - least) / (most - least)
    return scaled_L.clip(0.0, 1.0)


def _streaks(before: Any, low: NDArray[np.bool_]) -> Any:
    """`before` plus one where `low`, else 0, as nested lists."""
    return np.where(low, np.array(before or np.zeros(low.shape, np.int64)) + 1, 0).tolist()


def _is_new(counters: ExpertCounters, code: str, layer: int) -> bool:
    """Whether the warning was not given for this layer before; notes it."""
    name = f"{code} {layer}"
    if name in counters.warned:
        return False
    counters.warned.append(name)
    return True
