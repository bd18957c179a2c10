"""Proof: if memory runs out on one rank at any kind of place of a sharded step, all ranks learn of it, memory comes
back, weights stay as they are, and the same step then gives the same gradients.

The ranks fail in turn, first with a vote before each collective, then with one for all of them, where the rank that
failed joins the others in the rest (`engine.distributed.micro_batch_votes`). On a device that queues its work, the
other ranks have work queued meanwhile.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from engine.budget.predict.shards import recovers_with
from engine.device.base import Device
from engine.device.catch_oom import free_failed_graph
from engine.distributed.sharded import ShardedModel
from engine.errors import EnvironmentProblem
from engine.train.proofs.ranks.exchange import OUT_OF_MEMORY, exchange, require_none, tried
from engine.train.proofs.ranks.memory_places import PLACES, RunsOutAt
from engine.train.proofs.ranks.small_decoder import SmallDecoder, batch, shard
from engine.train.setup import TrainingSetup

LAYERS = 2
SECONDS_TO_FREE = 20.0
"""A thread of gloo or of autograd may free a buffer some time after its operation."""
QUEUED_PRODUCTS, QUEUED_WIDTH = 40, 4096
"""Matrix products that the other ranks queue: some hundred milliseconds of work for a GPU."""


def applies(setup: TrainingSetup) -> bool:
    """Whether the device has a cap, and the recovery of sharded weights is known for this version of torch."""
    return setup.context.measures and recovers_with(torch.__version__)


def prove(setup: TrainingSetup) -> str:
    """Run out of memory at each place, on one rank after another, and recover as a step does. All ranks call this; it
    votes. Returns what was shown, in a few words.

    Raises:
        DisprovedError: on all ranks, if a failure stayed unknown to a rank, memory stayed allocated, or weights or
            gradients changed on one.
    """
    trial = _Trial(setup)
    for once in (False, True):
        for number, place in enumerate(PLACES):
            trial.run(place, number % setup.context.ranks.size, once=once)
    return f"memory may run out in {', '.join(PLACES)}: weights and gradients stay equal, and memory comes back"


def fall_back(setup: TrainingSetup) -> str:
    """Raise EnvironmentProblem, which ends the run, because weights might be wrong after an out-of-memory error."""
    raise EnvironmentProblem(
        "sharded weights do not recover from an out-of-memory error on this machine",
        expected="equal weights and free memory on every rank",
        fix="use parallel.strategy=replicated where a device holds the model; see tunedeck doctor --gpus",
    )


class _Trial:
    """A small decoder in shards, with the gradients, weights and memory that it must come back to."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._device, self._ranks = setup.context.device, setup.context.ranks
        self._decoder = SmallDecoder(setup, torch.bfloat16, layers=LAYERS, lora=False)
        self._sharded: ShardedModel = shard(setup, self._decoder, drops_weights=True)
        self._ids_BS = batch(setup, self._ranks.rank)
        self._votes = self._ranks.voted_group()
        self._backward(once=False)
        self._gradients = self._taken()
        self._weights = [part.detach().clone() for part in self._sharded.local_parameters().values()]
        self._device.release_cached()
        self._allocated_bytes = self._device.memory().allocated_bytes

    def run(self, place: str, rank: int, *, once: bool) -> None:
        """Run out of memory at `place` on `rank`, recover, and compare. The ranks vote before each collective, or
        `once` for all. Raises DisprovedError on all ranks."""
        with self._pressure(place, rank):
            failure = tried(partial(self._attempt, once=once))
        told = exchange(self._ranks, failure)
        self._recover()
        when = f"after memory ran out in {place} on rank {rank}{', with one vote' if once else ''}"
        require_none(self._ranks, self._complaint(told, rank), when)
        self._backward(once=False)
        require_none(self._ranks, self._compared(), when)

    def _pressure(self, place: str, rank: int) -> AbstractContextManager[object]:
        if rank == self._ranks.rank:
            return RunsOutAt(PLACES[place], self._device)
        queue_work(self._device)
        return nullcontext()

    def _attempt(self, *, once: bool) -> None:
        join_others = partial(self._sharded.join_others, self._device, lambda *_: None)
        self._votes.run_together(partial(self._backward, once=once), join_others)
        self._device.synchronize()

    def _recover(self) -> None:
        self._sharded.drop_gradients()
        free_failed_graph(self._device)
        self._sharded.recover()
        self._device.release_cached()

    def _complaint(self, told: list[str], rank: int) -> str:
        """What is wrong on this rank after recovery, in words; empty if nothing is. `told` has each rank's outcome."""
        expected = [OUT_OF_MEMORY if each == rank else "" for each in range(len(told))]
        if told != expected:
            return f"the outcomes by rank are {told}, not {expected}"
        if not _until(lambda: self._device.memory().allocated_bytes <= self._allocated_bytes):
            return f"{self._device.memory().allocated_bytes - self._allocated_bytes:,} bytes stay allocated"
        parts = self._sharded.local_parameters()
        changed = [name for (name, part), was in zip(parts.items(), self._weights, strict=True) if not _same(part, was)]
        left = [name for name, part in parts.items() if part.grad is not None]
        return f"{changed[0]} has changed" if changed else f"{left[0]} has a gradient left" if left else ""

    def _compared(self) -> str:
        for name, gradient in self._taken().items():
            if not _same(gradient, self._gradients[name]):
                return f"the gradient of {name} has changed"
        return ""

    def _backward(self, *, once: bool) -> None:
        votes = self._sharded.votes
        votes.begin_attempt(once=once)
        with torch.enable_grad(), votes.micro_batch():
            self._decoder(self._ids_BS).backward()

    def _taken(self) -> dict[str, Tensor]:
        """This rank's parts of the gradients, which are dropped."""
        self._sharded.sync_gradients()
        parts = self._sharded.local_parameters()
        taken = {name: part.grad.clone() for name, part in parts.items() if part.grad is not None}
        self._sharded.drop_gradients()
        return taken


def queue_work(device: Device) -> None:
    """Give a device that queues its work some, so that the host runs ahead of it."""
    if device.asynchronous:
        product = torch.zeros((QUEUED_WIDTH, QUEUED_WIDTH), dtype=torch.bfloat16, device=device.torch_device)
        for _ in range(QUEUED_PRODUCTS):
            torch.mm(product, product, out=torch.empty_like(product))


def _until(reached: Callable[[], bool]) -> bool:
    """Wait until `reached` returns True, for SECONDS_TO_FREE at most; returns whether it did."""
    deadline = time.monotonic() + SECONDS_TO_FREE
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.detach(), other)
