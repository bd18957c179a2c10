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


class PeerFailedError(Exception):
    """Another rank failed before the collective that this rank was about to launch."""


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
        if self._any(False):
            raise PeerFailedError("another rank failed")

    def all_true(self, here: bool) -> bool:
        """Whether `here` is true on every rank. Raises the same errors as `ready`."""
        self.ready()
        return not self._any(not here)

    def run_together(self, action: Callable[[], None]) -> bool:
        """Run `action`, which calls `ready` before each of its collectives, on all ranks; returns whether no other rank
        failed.

        An error of `action` on this rank is raised after the other ranks were told of it. If another rank failed,
        returns False, and no tensor of the attempt is kept in memory.
        """
        try:
            action()
            self.ready()
        except PeerFailedError as error:
            clear_frames(error)
            return False
        except LostRankError:
            raise
        except Exception:  # of any kind: the other ranks must not be left waiting
            self._any(True)
            raise
        return True

    def _any(self, here: bool) -> bool:
        self._flag_here[0] = here
        with raising_lost_rank():
            dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self.group)
        self.votes += 1
        return bool(self._flag_here[0])
