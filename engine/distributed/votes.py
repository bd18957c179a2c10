"""Votes among ranks: a small value of each gathered on the host within a time limit, and collectives that all ranks
launch or none."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from engine.device.oom import classify, clear_frames
from engine.errors import TunedeckError

SLOT_BYTES = 64 * 1024
"""Room for one rank's value: a learned budget with its remedies is about 2 KiB; 8 ranks stay at 0.5 MiB."""

HEADER_BYTES = 4


# torch 2.13 renamed all_gather_into_tensor and warns about the old name; torch 2.11 has only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LostRankError(TunedeckError):
    """Another rank is gone or does not answer; the run can only continue in a new attempt from the last checkpoint."""


@contextmanager
def raising_lost_rank() -> Iterator[None]:
    """Inside the block, errors of a collective become LostRankError: gloo and NCCL raise RuntimeError with many
    messages. Out-of-memory errors and errors after which the device is unusable pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        if classify(error) or isinstance(error, torch.AcceleratorError):
            raise
        raise LostRankError(
            f"another rank has ended, is suspended or is stuck: {str(error).splitlines()[0][:300]}",
            fix="the run continues from its last checkpoint",
        ) from error


class HostGather:
    """A gloo group with preallocated buffers for votes. All ranks of the group call `gather` in the same order. The
    buffers are allocated once, so a vote about an allocation failure cannot fail for want of memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._sent = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
        self._received = torch.zeros(SLOT_BYTES * group.size(), dtype=torch.uint8)
        self._sent_bytes = self._sent.numpy()
        self._received_bytes = self._received.numpy().reshape(group.size(), SLOT_BYTES)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON), by rank. LostRankError: no answer in time. ValueError: more than SLOT_BYTES."""
        text = json.dumps(value).encode("ascii")
        if len(text) > SLOT_BYTES - HEADER_BYTES:
            raise ValueError(f"a vote of {len(text)} bytes; a slot has {SLOT_BYTES}")
        self._sent_bytes[:HEADER_BYTES] = np.frombuffer(len(text).to_bytes(HEADER_BYTES, "little"), np.uint8)
        self._sent_bytes[HEADER_BYTES : HEADER_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        with raising_lost_rank():
            _all_gather(self._received, self._sent, group=self.group)
        return [_read(slot.tobytes()) for slot in self._received_bytes]


def _read(slot: bytes) -> Any:
    length = int.from_bytes(slot[:HEADER_BYTES], "little")
    return json.loads(slot[HEADER_BYTES : HEADER_BYTES + length])


READY, FAILED, REPEAT = range(3)
"""What a rank votes; the highest vote of all ranks counts."""


class PeerFailedError(Exception):
    """Another rank failed before the collective that this rank was about to launch."""

    def __init__(self, vote: int = FAILED) -> None:
        super().__init__("another rank failed")
        self.vote = vote


class RepeatWithVotesError(Exception):
    """A micro-batch has other collectives than those before, so one vote for all is not enough: all ranks must repeat
    what they did (raised by `VotedGroup.run_together`)."""


class VotedGroup:
    """A group of ranks that vote before each collective, at the same places in the same order. A rank that runs out of
    memory never reaches the collective in which its peers would wait. So every rank votes after it has allocated what
    the collective needs and before it launches it, and once more after the last; a rank that failed anywhere before
    votes so then."""

    def __init__(
        self, group: dist.ProcessGroup, host_region: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`group`: gloo; its time limit bounds each vote. `host_region`: the device's context for host allocations."""
        self.group = group
        # What is allocated in this region is never counted, so votes need not run inside it.
        with host_region():
            self._flag = torch.zeros(1, dtype=torch.int32)
        self._flag_here = self._flag.numpy()
        self.votes = 0

    def ready(self) -> None:
        """Vote that this rank is ready for the next collective. Allocates nothing. PeerFailedError: another rank
        failed, and will not take part. LostRankError: one does not answer in time."""
        if vote := self._highest(READY):
            raise PeerFailedError(vote)

    def all_true(self, here: bool) -> bool:
        """Whether `here` is true on every rank. Raises the same errors as `ready`."""
        self.ready()
        return self._highest(READY if here else FAILED) == READY

    def run_together(self, action: Callable[[], None], join_others: Callable[[], None] | None = None) -> bool:
        """Run `action`, which calls `ready` before each collective, on all ranks; returns whether no other rank failed.

        Its error is raised after the other ranks were told, and before that `join_others` launches the collectives that
        they launch up to their next vote. If another rank failed, no tensor of the attempt is kept in memory. Raises
        RepeatWithVotesError on all ranks if `action` raised it on one.
        """
        try:
            action()
            self.ready()
        except PeerFailedError as error:
            clear_frames(error)
            if error.vote == REPEAT:
                raise RepeatWithVotesError from None
            return False
        except LostRankError:
            raise
        except Exception as error:  # of any kind: the other ranks must not be left waiting
            if join_others is not None:
                join_others()
            if self._highest(REPEAT if isinstance(error, RepeatWithVotesError) else FAILED) == REPEAT:
                clear_frames(error)
                raise RepeatWithVotesError from None
            raise
        return True

    def _highest(self, here: int) -> int:
        self._flag_here[0] = here
        with raising_lost_rank():
            dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self.group)
        self.votes += 1
        return int(self._flag_here[0])


class Collective(NamedTuple):
    """Kind ("all-gather" or "reduce-scatter"), parameter group, elements and dtype of the tensor across all ranks."""

    kind: str
    group: int
    elements: int
    dtype: torch.dtype


Order = tuple[Collective, ...]
"""The collectives of a micro-batch, in the order in which every rank launches them."""


class MicroBatchVotes:
    """Votes for the collectives of micro-batches; outside of micro-batches there is a vote before each collective.

    A vote is a round trip between hosts, and every micro-batch has the same collectives in the same order, three in a
    layer. Once that is recorded, one vote before each micro-batch is enough: a rank that fails inside knows in which
    collectives the others will wait, and joins them with data that none uses (`ShardedModel.join_others`). The next
    vote tells the failure, and all repeat the whole step. If another collective than recorded is due, the rank joins
    the recorded ones, and all repeat the attempt with a vote before each.
    """

    def __init__(self, voted_group: VotedGroup) -> None:
        self._voted_group = voted_group
        self._recorded: Order | None = None
        """Those of the last attempt in which each collective was voted on."""
        self._always = False
        self._once = False
        self._launched: list[Collective] | None = None
        """In this micro-batch; None outside of micro-batches."""
        self.checksum: int | None = None
        """Equal on two ranks if they know the same order; None if no order is known, or it varies."""

    def begin_attempt(self, *, once: bool) -> None:
        """Vote for each micro-batch (`once`: `checksum` must agree) or each collective. All ranks call this alike."""
        self._once, self._launched = once, None
        if not once:
            self._recorded = self.checksum = None

    def vote_always(self) -> None:
        """From now on vote before each collective: the order was found to vary."""
        self._always, self.checksum = True, None

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around forward and backward of a micro-batch. PeerFailedError: another rank failed before it.
        RepeatWithVotesError: other collectives were launched than in the micro-batches before."""
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
        """Vote after the last micro-batch of an attempt with few votes: a vote finds a rank that is gone within its
        time limit, before this rank waits on the device. Raises PeerFailedError."""
        if self._once:
            self._voted_group.ready()

    @contextmanager
    def launching(self, collective: Collective) -> Iterator[None]:
        """Around the launch of a collective, whose buffers are allocated. PeerFailedError: another rank failed, and
        will not take part. RepeatWithVotesError: another collective is due."""
        if not self._once or self._launched is None:
            self._voted_group.ready()
        elif self.due != collective:
            raise RepeatWithVotesError
        yield
        if self._launched is not None:
            self._launched.append(collective)

    @property
    def due(self) -> Collective | None:
        """The collective that the other ranks launch next whatever happens here; None if they vote first."""
        if not self._once or self._launched is None or self._recorded is None:
            return None
        number = len(self._launched)
        return self._recorded[number] if number < len(self._recorded) else None

    def _record(self, order: Order) -> None:
        if self._recorded is None:
            self._recorded, self.checksum = order, None if self._always else zlib.crc32(repr(order).encode())
        elif order != self._recorded:
            self.checksum = None
