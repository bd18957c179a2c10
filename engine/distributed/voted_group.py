"""Collectives that ranks launch together or not at all: before each, all of them vote that they are able to.

A rank that runs out of memory never reaches the collective in which its peers would wait. So every rank votes on the
host after it has allocated what the collective needs and before it launches it. A rank that failed anywhere before
votes that it failed: all ranks learn of it at the same collective, and none waits in one. After work that contains such
collectives all ranks vote once more, for a failure after the last collective. The ranks then exchange what failed
(`engine.train.recovery.consensus`).

The vote is four bytes that are allocated once, so it cannot fail for want of memory, and it has a time limit. Try:
`pytest tests/distributed/test_voted_group.py`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from engine.device.oom import clear_frames
from engine.distributed.host_gather import LostRankError, raising_lost_rank

READY, FAILED, REPEAT = range(3)
"""What a rank votes; the highest vote of all ranks counts."""


class PeerFailedError(Exception):
    """Another rank failed before the collective that this rank was about to launch."""

    def __init__(self, vote: int = FAILED) -> None:
        super().__init__("another rank failed")
        self.vote = vote


class RepeatWithVotesError(Exception):
    """The collectives of a micro-batch are not those of the micro-batches before, so that one vote for all of them is
    not enough. `VotedGroup.run_together` raises it on all ranks, which must repeat what they did."""


class VotedGroup:
    """A group of ranks that vote before each collective. All of them vote at the same places in the same order."""

    def __init__(
        self, group: dist.ProcessGroup, host_region: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`group`: a gloo group, whose time limit bounds each vote. `host_region`: the device's context for host
        allocations."""
        self.group = group
        # What is allocated in this region is never counted, so votes need not run inside it.
        with host_region():
            self._flag = torch.zeros(1, dtype=torch.int32)
        self._flag_here = self._flag.numpy()
        self.votes = 0
        """Number of votes so far."""

    def ready(self) -> None:
        """Vote that this rank is ready for the next collective. Allocates nothing.

        Raises:
            PeerFailedError: another rank failed, and will not take part in the collective.
            LostRankError: another rank does not answer within the group's time limit.
        """
        if vote := self._highest(READY):
            raise PeerFailedError(vote)

    def all_true(self, here: bool) -> bool:
        """Whether `here` is true on every rank. Raises the same errors as `ready`."""
        self.ready()
        return self._highest(READY if here else FAILED) == READY

    def run_together(self, action: Callable[[], None], join_others: Callable[[], None] | None = None) -> bool:
        """Run `action`, which calls `ready` before each of its collectives, on all ranks; returns whether no other rank
        failed.

        An error of `action` on this rank is raised after the other ranks were told of it. If another rank failed,
        returns False, and no tensor of the attempt is kept in memory. `join_others` is called before this rank tells of
        an error: it launches the collectives that the other ranks launch before their next vote. Raises
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
        """Vote `here`; returns the highest vote of all ranks."""
        self._flag_here[0] = here
        with raising_lost_rank():
            dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self.group)
        self.votes += 1
        return int(self._flag_here[0])
