"""Collectives that ranks launch together or not at all: before each, all of them vote that they are able to.

A rank that runs out of memory never reaches the collective its peers stand in. So every rank votes on the host after
it has allocated what the collective needs and before it launches it, and one that failed, wherever that was, votes so
in its place: the failure arrives on all ranks at the same collective, and none is left waiting in one. At the end of a
stretch of work that holds such collectives everyone votes once more, for a failure after the last of them. What failed
is told afterwards (`engine.train.recovery.consensus`).

The flag is four bytes that are allocated once: a vote cannot fail for want of memory, and it is bounded in time like
all talk on the host. Try: `pytest tests/distributed/test_voted_group.py`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from engine.device.oom import clear_frames
from engine.distributed.host_gather import LostRankError, raising_lost_rank


class PeerFailedError(Exception):
    """Another rank failed before the collective that this one was about to launch."""


class VotedGroup:
    """Ranks that launch collectives together. All of them vote at the same places in the same order."""

    def __init__(
        self, group: dist.ProcessGroup, host_region: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`group`: of gloo; its time limit bounds how long a vote waits. `host_region`: the device's."""
        self.group = group
        # Whatever is made there is never counted, so a vote need not be in it.
        with host_region():
            self._flag = torch.zeros(1, dtype=torch.int32)
        self._flag_here = self._flag.numpy()
        self.votes = 0
        """Cast so far."""

    def ready(self) -> None:
        """Vote that this rank is ready for the next collective. Allocates nothing.

        Raises:
            PeerFailedError: another rank is not, and will not take part in it.
            LostRankError: another rank does not answer within the group's time limit.
        """
        if self._any_failed(here=False):
            raise PeerFailedError("another rank failed")

    def broadcast_object(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor`, on the host, with that of the group's first rank. Raises as `ready` does."""
        self.ready()
        with raising_lost_rank():
            dist.broadcast(tensor, group=self.group, group_src=0)

    def run_together(self, action: Callable[[], None]) -> bool:
        """Run `action`, whose collectives are preceded by `ready`, on all ranks; True if no rank failed.

        What it raises here is raised here, once the others know; where another rank failed the answer is False, and
        nothing of the attempt is kept alive.
        """
        try:
            action()
            self.ready()
        except PeerFailedError as error:
            clear_frames(error)
            return False
        except LostRankError:
            raise
        except Exception:  # whatever it was: the others must not be left waiting
            self._any_failed(here=True)
            raise
        return True

    def _any_failed(self, *, here: bool) -> bool:
        self._flag_here[0] = here
        with raising_lost_rank():
            dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self.group)
        self.votes += 1
        return bool(self._flag_here[0])
