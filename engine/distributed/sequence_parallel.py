"""Sequence parallelism: a rank holds some positions of every row, and around attention ranks exchange them for heads.

Attention mixes positions, but not heads. So before it every rank sends queries, keys and values of its positions for
the heads of other ranks, and receives those of its own heads at all positions; then the outputs are sent back (Ulysses;
Jacobs et al. 2023, arXiv 2309.14509). That is one all-to-all each way, also in backward, with a vote before each
(`engine.distributed.votes`). With fewer key heads than ranks, a key head is sent to several.

Shapes: B rows, P places (ranks of the group), S positions of one place, T = P·S all positions, H heads, h heads of one
place, D values of a head, F values sent per position, all heads of a place together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.ranks import COLLECTIVE_PATIENCE, Ranks
from engine.distributed.votes import VotedGroup, raising_lost_rank


@dataclass(eq=False)
class SequenceGroup:
    """The group of ranks that share sequences with this rank, and this rank's index in it (`place`)."""

    place: int
    size: int
    voted_group: VotedGroup
    group: dist.ProcessGroup

    def exchange(self, sent: Tensor) -> Tensor:
        """All-to-all: send part p of `sent` [P, ...] to place p; part p of the result came from there. Frees `sent`.

        torch.OutOfMemoryError: no room for the result. PeerFailedError: another rank failed before. LostRankError: one
        is gone.
        """
        received = torch.empty_like(sent)
        self.voted_group.ready()
        with raising_lost_rank():
            dist.all_to_all_single(received, sent, group=self.group)
        _free(sent)
        return received

    def sum_(self, values: Tensor) -> None:
        """Sum `values` over the group's ranks, in place. Raises the errors of `exchange`."""
        self.voted_group.ready()
        with raising_lost_rank():
            dist.all_reduce(values, group=self.group)


def join_sequence_group(ranks: Ranks, size: int, voted_group: VotedGroup | None = None) -> SequenceGroup:
    """This rank's group of `size` consecutive ranks. All ranks call this. If that is all of them, the existing group is
    used: each additional NCCL group takes memory. `voted_group` votes before collectives; default: the group's ranks.
    """
    if size == ranks.size:
        assert dist.group.WORLD is not None
        return SequenceGroup(ranks.rank, size, voted_group or ranks.voted_group(), dist.group.WORLD)
    votes = timedelta(seconds=ranks.patience_seconds)
    mine = None
    with raising_lost_rank():
        for first in range(0, ranks.size, size):
            members = list(range(first, first + size))
            group = dist.new_group(members, timeout=COLLECTIVE_PATIENCE * votes)
            voting = dist.new_group(members, timeout=votes, backend="gloo")
            if ranks.rank in members:
                mine = group, voting
    assert mine is not None
    return SequenceGroup(ranks.rank % size, size, voted_group or VotedGroup(mine[1], ranks.host_region), mine[0])


def to_heads(group: SequenceGroup, tensors_BHSD: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[B, H, S, D] of all heads at this place's positions → [B, h, T, D] of this place's heads at all positions.
    Differentiable. Raises the errors of `SequenceGroup.exchange`, in backward too."""
    tensors_BhTD: tuple[Tensor, ...] = _apply(_ToHeads, group, *tensors_BHSD)
    return tensors_BhTD


def to_positions(group: SequenceGroup, tensor_BhTD: Tensor) -> Tensor:
    """The inverse of `to_heads`, for one tensor. Raises the same errors, in backward too."""
    tensor_BHSD: Tensor = _apply(_ToPositions, group, tensor_BhTD)
    return tensor_BHSD


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, *tensors_BHSD: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.heads = group, [tensor.shape[1] for tensor in tensors_BHSD]
        return tuple(_scatter_heads(group, tensors_BHSD))

    @staticmethod
    def backward(ctx: Any, *gradients_BhTD: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_gather_heads(ctx.group, gradients_BhTD, ctx.heads)


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, tensor_BhTD: Tensor) -> Tensor:
        ctx.group = group
        return _gather_heads(group, [tensor_BhTD], [tensor_BhTD.shape[1] * group.size])[0]

    @staticmethod
    def backward(ctx: Any, *gradients_BHSD: Tensor) -> tuple[None, Tensor]:
        return None, _scatter_heads(ctx.group, gradients_BHSD)[0]


def _scatter_heads(group: SequenceGroup, tensors_BHSD: Sequence[Tensor]) -> list[Tensor]:
    """Send every place its heads of all tensors, in one buffer; [B, h, T, D] for each. Positions are the buffer's
    outermost dimension, so the results are views of what was received."""
    shares = [_share(tensor.shape[1], group.size) for tensor in tensors_BHSD]
    widths = [heads * tensor.shape[-1] for (heads, _), tensor in zip(shares, tensors_BHSD, strict=True)]
    received_TBF = group.exchange(_packed_heads(tensors_BHSD, shares, widths, group.size)).flatten(0, 1)
    parts = received_TBF.split(widths, -1)
    return [part.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for part, (heads, _) in zip(parts, shares, strict=True)]


def _packed_heads(
    tensors_BHSD: Sequence[Tensor], shares: Sequence[tuple[int, int]], widths: Sequence[int], places: int
) -> Tensor:
    rows, _, positions, _ = tensors_BHSD[0].shape
    sent_PSBF = tensors_BHSD[0].new_empty((places, positions, rows, sum(widths)))
    for (heads, times), slot, tensor in zip(shares, sent_PSBF.split(list(widths), -1), tensors_BHSD, strict=True):
        by_place = tensor.unflatten(1, (places // times, heads)).permute(1, 3, 0, 2, 4).unsqueeze(1)
        slot.unflatten(-1, (heads, -1)).unflatten(0, (places // times, times)).copy_(by_place)
    return sent_PSBF


def _gather_heads(group: SequenceGroup, tensors_BhTD: Sequence[Tensor], all_heads: Sequence[int]) -> list[Tensor]:
    """Undo `_scatter_heads`: [B, H, S, D] for each, H in `all_heads`. A head sent to several places is summed."""
    widths = [tensor.shape[1] * tensor.shape[-1] for tensor in tensors_BhTD]
    received_PSBF = group.exchange(_packed_positions(tensors_BhTD, widths, group.size))
    joined = [
        _joined(part.unflatten(-1, (tensor.shape[1], -1)), _share(heads, group.size)[1])
        for part, tensor, heads in zip(received_PSBF.split(widths, -1), tensors_BhTD, all_heads, strict=True)
    ]
    _free(received_PSBF)
    return joined


def _packed_positions(tensors_BhTD: Sequence[Tensor], widths: Sequence[int], places: int) -> Tensor:
    rows, _, length, _ = tensors_BhTD[0].shape
    sent_PSBF = tensors_BhTD[0].new_empty((places, length // places, rows, sum(widths)))
    for slot, tensor in zip(sent_PSBF.split(list(widths), -1), tensors_BhTD, strict=True):
        slot.unflatten(-1, (tensor.shape[1], -1)).copy_(tensor.permute(2, 0, 1, 3).unflatten(0, (places, -1)))
    return sent_PSBF


def _joined(received_PSBhD: Tensor, times: int) -> Tensor:
    """[P, S, B, h, D] from all ranks as [B, H, S, D], always a copy, with positions before heads in memory as linear
    layers expect. `times`: ranks that hold copies of a head, which are summed."""
    if times > 1:
        received_PSBhD = received_PSBhD.unflatten(0, (-1, times)).sum(1)
    by_row = received_PSBhD.permute(2, 1, 0, 3, 4).clone(memory_format=torch.contiguous_format)
    return by_row.flatten(2, 3).transpose(1, 2)


def _free(buffer: Tensor) -> None:
    """At once: gloo's thread keeps a reference to the buffer for some time after the operation."""
    buffer.untyped_storage().resize_(0)


def _share(heads: int, places: int) -> tuple[int, int]:
    """(heads that one place computes, places that compute the same heads)."""
    return (heads // places, 1) if heads >= places else (1, places // heads)
