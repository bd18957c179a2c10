"""Puts sharded tensors together on many ranks at once: in each round every rank receives one whole tensor.

To save a model whose weights are spread over ranks, whole tensors are dealt out to the ranks, and each writes its own.
So no rank receives the whole model, and none holds more than one tensor and its parts of those of the round. Tensors
are moved through host memory.

Try: `pytest tests/distributed/test_sharded_saving.py`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.device.base import Device
from engine.distributed.host_gather import raising_lost_rank
from engine.distributed.ranks import Ranks
from engine.distributed.voted_group import VotedGroup


def exchange(
    rounds: Iterable[Sequence[Tensor]], ranks: Ranks, voted_group: VotedGroup, device: Device
) -> Iterator[Tensor]:
    """For each of `rounds`, a list with a tensor for each rank: yield this rank's tensor, whole and in host memory. In
    the last rounds there may be fewer tensors than ranks; the ranks without one take part and yield nothing. A tensor
    that is not sharded is copied on its rank. All ranks must iterate to the end, over the same rounds.

    Raises PeerFailedError, LostRankError.
    """
    for tensors in rounds:
        with device.host_region(), torch.no_grad():
            whole = _one_round(tensors, ranks, voted_group, device)
        if whole is not None:
            yield whole
            del whole


def _one_round(tensors: Sequence[Tensor], ranks: Ranks, voted_group: VotedGroup, device: Device) -> Tensor | None:
    sent = [_bytes_here(tensor, device) for tensor in tensors]
    sent += [torch.empty(0, dtype=torch.uint8)] * (ranks.size - len(sent))
    sizes = list(map(len, sent))
    parts = torch.cat(sent)
    del sent
    mine = tensors[ranks.rank] if ranks.rank < len(tensors) else None
    expected = _sizes_of_parts(mine, ranks.size)
    received = torch.empty(sum(expected), dtype=torch.uint8)
    voted_group.ready()
    with raising_lost_rank():
        dist.all_to_all_single(received, parts, expected, sizes)
    if mine is None:
        return None
    return received.view(mine.dtype).view(mine.shape) if isinstance(mine, DTensor) else device.staged(mine)


def _bytes_here(tensor: Tensor, device: Device) -> Tensor:
    """The bytes of this rank's part of a sharded tensor; none of a tensor that every rank has."""
    if not isinstance(tensor, DTensor):
        return torch.empty(0, dtype=torch.uint8)
    return device.staged(tensor.to_local()).contiguous().view(-1).view(torch.uint8)


def _sizes_of_parts(tensor: Tensor | None, ranks: int) -> list[int]:
    """Bytes of each rank's part of `tensor`. torch splits the first dimension into equal parts, of which the last ones
    may be smaller or empty."""
    if not isinstance(tensor, DTensor):
        return [0] * ranks
    rows = -(-len(tensor) // ranks)
    row_bytes = tensor.itemsize * (tensor.numel() // len(tensor))
    return [row_bytes * max(0, min(rows, len(tensor) - rows * rank)) for rank in range(ranks)]
