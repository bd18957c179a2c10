"""Collectives that ranks launch together or not at all: before each, all of them vote that they are able to.

A rank that runs out of memory never reaches the collective its peers stand in. So every rank votes on the host after
it has allocated what the collective needs and before it launches it, and one that failed, wherever that was, votes so
in their place: the failure arrives on all ranks at the same collective, and none is left waiting in one. At the end of
a stretch of work that holds such collectives everyone votes once more, for a failure after the last of them.

What is done about a failure is `engine.train`'s affair. Try: `pytest tests/parallel/test_joint.py`
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from engine.parallel.votes import losing_a_rank_ends_it


class PeerFailedError(Exception):
    """Another rank failed, and said so: the attempt is over here, too. Its details travel in a vote of their own."""


class Joint:
    """The ranks that launch collectives together. All of them cast the same votes in the same order."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: of gloo; by default the one all ranks are in. Its time limit bounds how long a vote waits. Make it
        in the device's host region, or the first vote counts as an allocation."""
        self._group = group
        self._word = torch.zeros(1, dtype=torch.int32)
        # The same memory: to read and to write it is no operation of torch, which could fail.
        self._here = self._word.numpy()
        self.votes = 0
        """How many were cast so far."""

    def vote(self, failed: bool = False) -> None:
        """Tell the others whether this rank failed, and hear whether any did. Allocates nothing.

        Raises:
            PeerFailedError: at least one rank failed, this one or another.
            LostRankError: a rank did not vote within the group's time limit.
        """
        self.votes += 1
        self._here[0] = failed
        with losing_a_rank_ends_it():
            dist.all_reduce(self._word, op=dist.ReduceOp.MAX, group=self._group)
        if self._here[0]:
            raise PeerFailedError("another rank ran out of memory")

    def close(self, failed: bool) -> None:
        """The last vote of a stretch of work: on ranks that failed in it, and on those that came to its end."""
        try:
            self.vote(failed)
        except PeerFailedError:
            return
