"""Steps and runs on ranks that share a model through DeepSpeed: what its tests have in common. Not a test module."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device.metered import MeteredDevice
from engine.distributed.ranks import Ranks
from engine.train.monitor.journal import Journal
from engine.train.setup import Bench, set_up
from engine.train.step.context import Backoff
from engine.train.step.transaction import StepTransaction
from tests.distributed.steps import FULL, LORA, SAMPLES, STEPS, sharded, small_model, spec_of
from tests.train.harness import write_samples

WIDTH = 96
"""ZeRO-3 takes matrices of this model apart; smaller ones would stay gathered."""

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'tunedeck[deepspeed]'"
)


def deepspeed(kind: dict[str, Any], shard: str, *, tied: bool = False, **train: Any) -> dict[str, Any]:
    """Tables of a run under DeepSpeed (`shard`: "gradients" is ZeRO-2, "parameters" ZeRO-3)."""
    tables = sharded(kind, shard, tied=tied, **{"weight_decay": 0.1, "max_grad_norm": 0.5, **train})
    return {**tables, "parallel": {"strategy": "deepspeed", "shard": shard}}


CASES: dict[str, dict[str, Any]] = {
    "full, ZeRO-2": deepspeed(FULL, "gradients", tied=True),
    "full, ZeRO-3": deepspeed(FULL, "parameters"),
    "lora, ZeRO-2": deepspeed(LORA, "gradients"),
    "lora, ZeRO-3, layers recomputed": deepspeed(LORA, "parameters", tied=True, gradient_checkpointing=True),
}


class Zerobench:
    """A bench on one rank, or on the only one."""

    def __init__(self, folder: Path, ranks: Ranks, tables: dict[str, Any], *, capacity_bytes: int = 2**30) -> None:
        if ranks.is_first:
            write_samples(folder / SAMPLES)
        ranks.tell("written")
        self.told: list[Backoff] = []
        self.device = MeteredDevice(capacity_bytes)
        self._active = self.device.activate()
        self._active.__enter__()
        spec = spec_of(folder, ranks.size, small_model(folder, tables, width=WIDTH))
        self.bench: Bench = set_up(spec, self.device, Journal(None), self.told.append, ranks)
        self.transaction = StepTransaction(self.bench.parts)
        self.transaction.probe(1, self.bench.order.step(1))

    def close(self) -> None:
        """Leave the device."""
        self._active.__exit__(None, None, None)

    def steps(self) -> dict[str, Any]:
        """Take the first steps; losses, norms, micro-batches, and on rank 0 all that learns after them."""
        outcomes = [self.transaction.run(step, self.bench.order.step(step)) for step in range(1, STEPS + 1)]
        return {
            "losses": [outcome.loss for outcome in outcomes],
            "norms": [outcome.grad_norm for outcome in outcomes],
            "micro_batches": [[rank["micro_batches"] for rank in outcome.ranks] for outcome in outcomes],
            "weights": self.weights(),
        }

    def weights(self) -> torch.Tensor:
        """All that learns in one row; empty on other ranks than the first where none holds it whole."""
        parts = self.bench.parts
        learning = [parameter for _, parameter in parts.loaded.trainable()]
        if parts.zero and parts.zero.spreads_weights:
            learning = list(parts.zero.on_first(learning).values())
        with self.device.host_region():
            rows = [weight.detach().double().flatten() for weight in learning]
            return torch.cat(rows) if rows else torch.empty(0)
