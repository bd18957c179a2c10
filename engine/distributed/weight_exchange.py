"""Puts sharded tensors together to save them: in each round every rank that writes a file receives one whole tensor.

No rank receives the whole model, and none holds more than one tensor and its parts of those of the round, all in host
memory. `torch.distributed.checkpoint` would not hold to that: it sends no parts, but has every rank write its own, and
reads all of them again to join them; 0-dimensional tensors become zeros on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.device.base import Device
from engine.distributed.ranks import Ranks
from engine.distributed.votes import VotedGroup, raising_lost_rank


def own_rows(whole: DTensor) -> slice:
    """The rows (first dimension) of the whole tensor that this rank's shard holds; empty if there are fewer rows than
    ranks. torch gives each rank as many rows, the last ones fewer or none."""
    first, length = 0, len(whole)
    for dimension, placement in enumerate(whole.placements):
        if placement.is_shard():
            most = -(-len(whole) // whole.device_mesh.size(dimension))
            first = min(most * whole.device_mesh.get_local_rank(dimension), len(whole))
            length = min(most, len(whole) - first)
    return slice(first, first + length)


def part_of(whole: DTensor, part: Tensor) -> DTensor:
    """`part` as this rank's shard of a tensor that is sharded like `whole`."""
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def exchange(
    rounds: Iterable[Sequence[Tensor]], ranks: Ranks, voted_group: VotedGroup, device: Device
) -> Iterator[Tensor]:
    """For each of `rounds`, which holds a tensor for each of the first ranks: yield this rank's tensor, whole and in
    host memory; nothing on a rank without one. A tensor that is not sharded is copied on its rank. All ranks must
    iterate to the end, over the same rounds.

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
    """This rank's part of a sharded tensor as bytes, because gloo does not know every dtype; none of any other."""
    if not isinstance(tensor, DTensor):
        return torch.empty(0, dtype=torch.uint8)
    return device.staged(tensor.to_local()).contiguous().view(-1).view(torch.uint8)


def _sizes_of_parts(tensor: Tensor | None, ranks: int) -> list[int]:
    """Bytes of each rank's part of `tensor` (see `own_rows`)."""
    if not isinstance(tensor, DTensor):
        return [0] * ranks
    rows = -(-len(tensor) // ranks)
    row_bytes = tensor.itemsize * (tensor.numel() // len(tensor))
    return [row_bytes * max(0, min(rows, len(tensor) - rows * rank)) for rank in range(ranks)]
