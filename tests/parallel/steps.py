"""Optimizer steps on a crew of ranks, with allocations that fail: what the tests and the torture of ranks share.

Not a test module. Every rank builds the bench of the real engine on a metered device of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from engine.device.metered import MeteredDevice
from engine.parallel.ranks import Ranks
from engine.spec.run import RunSpec
from engine.train.journal import Journal
from engine.train.parts import Backoff
from engine.train.setup import Bench, set_up
from engine.train.transaction import StepTransaction
from tests.train.harness import make_spec, write_samples
from tests.train.rig import write_model

SAMPLES = "samples.jsonl"
STEPS = 2
FULL: dict[str, Any] = {"method": {"kind": "full"}}
LORA: dict[str, Any] = {"method": {"kind": "lora", "rank": 4}}


def spec_of(folder: Path, ranks: int, tables: dict[str, Any]) -> RunSpec:
    """A small run on `ranks` metered devices, with micro-batches of two sequences.

    `eps` is large enough that AdamW does not blow up the rounding of gradients near zero to whole learning rates.
    """
    train = {"micro_batch": 2, "batch_size": 10, "max_steps": 6, "eps": 1e-4, **tables.get("train", {})}
    asked = tables.get("parallel", {"strategy": "replicated"}) if ranks > 1 else {"strategy": "single"}
    tables = {name: table for name, table in tables.items() if name != "parallel"}
    spec = make_spec(folder / SAMPLES, memory_gib=1.0, **{**tables, "train": train})
    parallel = spec.profile.parallel.model_copy(update=asked)
    device = spec.profile.device.model_copy(update={"count": ranks})
    return spec.model_copy(
        update={"profile": spec.profile.model_copy(update={"device": device, "parallel": parallel})}
    )


def sharded(kind: dict[str, Any], shard: str, *, tied: bool = False, **train: Any) -> dict[str, Any]:
    """Tables of a run in shards (`shard`: "gradients" or "parameters"), on a model whose head may be tied."""
    # Rungs that move memory to the host change the level that "nothing left over" is measured from.
    ladder = {"ladder": ["retry", "defragment", "cut", "checkpointing", "chunk_loss"]}
    parallel = {"strategy": "sharded", "shard": shard}
    return {**kind, "parallel": parallel, "train": train, "backoff": ladder, "tied": tied}


def small_model(folder: Path, tables: dict[str, Any], *, layers: int = 2, width: int = 16) -> dict[str, Any]:
    """The same tables with a model in `folder` that is small enough for many steps."""
    tied = tables["tied"]
    model = {"id": str(write_model(folder / f"model-{layers}-{width}-{tied}", layers, width, tied=tied))}
    return {**{name: table for name, table in tables.items() if name != "tied"}, "model": model}


def whole_weights(work: Workbench) -> torch.Tensor:
    """All that learns, of all ranks, in one row. All ranks call it."""
    parts = work.bench.parts
    assert parts.sharded is not None
    with work.device.host_region(), torch.no_grad():
        return torch.cat([whole.full_tensor().double().view(-1) for whole in parts.sharded.wholes().values()])


class Workbench:
    """A bench on one rank that can be put back to its first state and stepped again."""

    def __init__(self, folder: Path, ranks: Ranks, tables: dict[str, Any], *, capacity_bytes: int = 2**30) -> None:
        if ranks.is_first:
            write_samples(folder / SAMPLES)
        ranks.tell("written")
        self.ranks, self.told = ranks, list[Backoff]()
        self.device = MeteredDevice(capacity_bytes)
        self._active = self.device.activate()
        self._active.__enter__()
        spec = spec_of(folder, ranks.size, tables)
        self.bench: Bench = set_up(spec, self.device, Journal(None), self.told.append, ranks)
        self.transaction = StepTransaction(self.bench.parts)
        self.transaction.probe(1, self.bench.order.step(1))
        with self.device.host_region():
            self._weights = [parameter.detach().clone() for parameter in self.transaction.work.parameters]
            self._state = deepcopy(self.bench.parts.optimizer.state_dict())
            self._knowledge = deepcopy(self.bench.parts.knowledge.as_json())

    def close(self) -> None:
        """Leave the device."""
        self._active.__exit__(None, None, None)

    def reset(self) -> None:
        """As it was after set-up."""
        parts = self.bench.parts
        with self.device.host_region(), torch.no_grad():
            for parameter, first in zip(self.transaction.work.parameters, self._weights, strict=True):
                parameter.copy_(first)
            for state, first in zip(
                parts.optimizer.state.values(), self._state["state"].values(), strict=True
            ):
                for key, tensor in first.items():
                    state[key].copy_(tensor)
        parts.guard.forget()
        parts.knowledge.adopt(deepcopy(self._knowledge))
        self.told.clear()

    def steps(self) -> dict[str, Any]:
        """Take the first steps; returns losses, norms and the weights after them."""
        outcomes = [self.transaction.run(step, self.bench.order.step(step)) for step in range(1, STEPS + 1)]
        with self.device.host_region():
            weights = torch.cat([p.detach().double().view(-1) for p in self.transaction.work.parameters])
        return {
            "losses": [outcome.loss for outcome in outcomes],
            "norms": [outcome.grad_norm for outcome in outcomes],
            "samples": [outcome.samples for outcome in outcomes],
            "weights": weights,
        }

    def faulty_steps(self, faults: dict[int, int]) -> dict[str, Any]:
        """The same steps; on rank r the faults[r]-th allocation fails. With them what was told, and bytes left over."""
        self.reset()
        self.ranks.tell("reset")
        held = self.device.memory().allocated_bytes
        self.device.fail_at(faults.get(self.ranks.rank))
        result = self.steps()
        self.device.fail_at(None)
        told = [(each.failed_rank, each.failure.phase, each.remedy.name) for each in self.told]
        return result | {"told": told, "left_bytes": self.device.memory().allocated_bytes - held}

    def allocations(self) -> int:
        """How many allocations the clean steps make on this rank."""
        self.reset()
        before = self.device.allocations
        self.steps()
        return self.device.allocations - before


def sample_of_faults(counts: Sequence[int], count: int, seed: int) -> list[dict[int, int]]:
    """Places to fail at: one rank, the other, and several at once, in turn."""
    drawn = random.Random(seed)
    every = list(range(len(counts)))
    who = [[rank] for rank in every] + [every]
    return [
        {rank: drawn.randint(1, counts[rank]) for rank in who[number % len(who)]} for number in range(count)
    ]
