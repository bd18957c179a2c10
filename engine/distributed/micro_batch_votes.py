"""Votes on the collectives of micro-batches: one before each collective, or one before each micro-batch.

A vote is a round trip between the hosts, and a layer has three collectives in a micro-batch. They are the same
collectives in the same order in every micro-batch. So a rank that fails in the middle of one knows in which collectives
the others are going to wait, and can join them with data that no rank will use. Then one vote before each micro-batch
is enough: a failure inside is told in the next vote, and all ranks repeat the whole step, as after any failure.

The order is recorded while every collective is voted on. If another collective is due than was recorded, the rank does
not launch it: it joins the others in the recorded ones, and all ranks repeat the attempt with a vote before each.

How a rank joins is up to the sharded model (`engine.distributed.sharded`), when ranks vote less often up to the step
(`engine.train.recovery.ceiling_watch`). Try: `pytest tests/distributed/test_micro_batch_votes.py`
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from engine.distributed.voted_group import RepeatWithVotesError, VotedGroup


class Collective(NamedTuple):
    """One collective of a micro-batch: "all-gather" or "reduce-scatter", the index of the group of parameters, and the
    elements and dtype of the tensor that spans all ranks."""

    kind: str
    group: int
    elements: int
    dtype: torch.dtype


Order = tuple[Collective, ...]
"""The collectives of a micro-batch, in the order in which every rank launches them."""


class MicroBatchVotes:
    """Votes for the collectives of micro-batches; outside of micro-batches there is a vote before each collective."""

    def __init__(self, voted_group: VotedGroup) -> None:
        self._voted_group = voted_group
        self._recorded: Order | None = None
        """The collectives of the micro-batches of the last attempt in which each collective was voted on."""
        self._always = False
        self._once = False
        self._launched: list[Collective] | None = None
        """The collectives launched so far in this micro-batch; None outside of micro-batches."""
        self.checksum: int | None = None
        """A number that is equal on two ranks if they know the same order; None if no order is known, or it varies."""

    def begin_attempt(self, *, once: bool) -> None:
        """Begin an attempt at a step, with one vote for each micro-batch (`once`) or for each collective. All ranks
        call this with the same value; `once` requires that `checksum` is the same number on all of them."""
        self._once, self._launched = once, None
        if not once:
            self._recorded = self.checksum = None

    def vote_always(self) -> None:
        """From now on vote before each collective, because the order was found to vary."""
        self._always, self.checksum = True, None

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Context manager around forward and backward of a micro-batch.

        Raises:
            PeerFailedError: another rank failed before this micro-batch.
            RepeatWithVotesError: other collectives were launched than in the micro-batches before.
        """
        if self._once:
            self._voted_group.ready()
        self._launched = []
        yield
        if self.due is not None:
            raise RepeatWithVotesError
        if not self._once:
            self._record(tuple(self._launched))
        self._launched = None

    def end_micro_batches(self) -> None:
        """Vote once more after the last micro-batch of an attempt with few votes: a rank that is gone is found by a
        vote, within its time limit, before this rank waits for collectives on the device. Raises PeerFailedError."""
        if self._once:
            self._voted_group.ready()

    @contextmanager
    def launching(self, collective: Collective) -> Iterator[None]:
        """Context manager around the launch of a collective, whose buffers are allocated.

        Raises:
            PeerFailedError: another rank failed, and will not take part.
            RepeatWithVotesError: another collective is due in this micro-batch.
        """
        if not self._once or self._launched is None:
            self._voted_group.ready()
        elif self.due != collective:
            raise RepeatWithVotesError
        yield
        if self._launched is not None:
            self._launched.append(collective)

    @property
    def due(self) -> Collective | None:
        """The collective that the other ranks launch next whatever happens here, because there is no vote before it;
        None if they vote first."""
        if not self._once or self._launched is None or self._recorded is None:
            return None
        number = len(self._launched)
        return self._recorded[number] if number < len(self._recorded) else None

    def _record(self, order: Order) -> None:
        """Record the collectives of a micro-batch in which each was voted on."""
        if self._recorded is None:
            self._recorded, self.checksum = order, None if self._always else zlib.crc32(repr(order).encode())
        elif order != self._recorded:
            self.checksum = None
