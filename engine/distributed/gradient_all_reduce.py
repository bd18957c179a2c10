"""Gradient all-reduce: sums the gradients of replicated ranks in one buffer, allocated once, over all trainable
parameters in a fixed order.

The model is not wrapped, so micro-batches run without collectives and ranks may differ in how many they need. A
parameter without a gradient on one rank counts as zero there; one without a gradient anywhere keeps None, because an
optimizer treats the two differently (AdamW decays on zero).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.budget.predict.parallel_layout import BUCKET_BYTES
from engine.distributed.votes import raising_lost_rank


@dataclass(frozen=True)
class _Piece:
    """Elements [start, end) of one parameter's gradient, at `offset` in the buffer."""

    index: int
    start: int
    end: int
    offset: int


class GradientAllReduce:
    """Sums gradients over all ranks. Every rank makes one, with the same parameters in the same order."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        """Allocate the buffer. Raises torch.OutOfMemoryError."""
        self._parameters = list(parameters)
        counts = [parameter.numel() for parameter in self._parameters]
        capacity = max(1, min(sum(counts), bucket_bytes // 4))
        self._buckets = _cut(counts, capacity)
        self._buffer = torch.zeros(capacity, dtype=torch.float32, device=self._parameters[0].device)
        self._present = torch.zeros(len(counts), dtype=torch.uint8)
        self._present_here = self._present.numpy()

    def agree(self) -> list[int]:
        """Parameters with a gradient on another rank and none here. Allocates nothing. All ranks call this."""
        here = [parameter.grad is not None for parameter in self._parameters]
        self._present_here[:] = here
        with raising_lost_rank():
            dist.all_reduce(self._present, op=dist.ReduceOp.MAX)
        return [index for index, mine in enumerate(here) if self._present_here[index] and not mine]

    def fill(self, missing: Sequence[int]) -> None:
        """Give the `missing` a zero gradient. Raises torch.OutOfMemoryError, after which the call may be repeated."""
        for index in missing:
            self._parameters[index].grad = torch.zeros_like(self._parameters[index])

    def sum(self) -> None:
        """Replace every gradient by its sum over all ranks. Allocates nothing. LostRankError: a rank is gone."""
        for bucket in self._buckets:
            pieces = [(self._gradient(piece), piece) for piece in bucket if self._present_here[piece.index]]
            if not pieces:
                continue
            for gradient, piece in pieces:
                self._slot(piece).copy_(gradient)
            with raising_lost_rank():
                dist.all_reduce(self._buffer)
            for gradient, piece in pieces:
                gradient.copy_(self._slot(piece))

    def _gradient(self, piece: _Piece) -> torch.Tensor:
        gradient = self._parameters[piece.index].grad
        assert gradient is not None
        return gradient.view(-1)[piece.start : piece.end]

    def _slot(self, piece: _Piece) -> torch.Tensor:
        return self._buffer[piece.offset : piece.offset + piece.end - piece.start]


def _cut(counts: Sequence[int], capacity: int) -> list[list[_Piece]]:
    """Parameters, in order, in buckets of `capacity` elements; a parameter may be split over several."""
    buckets: list[list[_Piece]] = [[]]
    used = 0
    for index, count in enumerate(counts):
        start = 0
        while start < count:
            if used == capacity:
                buckets.append([])
                used = 0
            end = min(count, start + capacity - used)
            buckets[-1].append(_Piece(index, start, end, used))
            used += end - start
            start = end
    return buckets


def broadcast_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite `tensors` with rank 0's values, so that replicas are equal bit for bit. Raises LostRankError."""
    with torch.no_grad(), raising_lost_rank():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
