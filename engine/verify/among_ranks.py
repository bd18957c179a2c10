"""Checks of the machine among ranks: a card for each, peer access, exact collectives and their bandwidth, and room for
NCCL's communicators. But for the first they are proofs of `tunedeck doctor --gpus`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from shutil import disk_usage
from typing import Any

import torch

from engine.device.base import Device
from engine.device.oom import classify, clear_frames
from engine.distributed.ranks import Ranks
from engine.distributed.votes import LostRankError
from engine.distributed.warm_up import run_each_collective
from engine.errors import EnvironmentProblem
from engine.verify.record import DisprovedError, Proof, ProvedRun

OUT_OF_MEMORY = "out of memory"
"""What `tried` returns for an out-of-memory error."""
SHARED_MEMORY = "/dev/shm"
BYTES_OF_A_PAIR = 10 * 10**6
"""What NCCL takes of /dev/shm for two GPUs that talk through it: a segment of 9,637,888 bytes in its reports."""
CARD_BYTES, HOST_BYTES = 256 * 2**20, 2**20
"""Bytes of the buffer of each collective, on CUDA cards (transfers are cut into many pieces) and simulated devices."""
VOTES = 20
"""Votes that are timed; their mean is reported."""


def exchange(ranks: Ranks, value: Any) -> list[Any]:
    """Vote, then gather `value` (JSON) of every rank, in the order of ranks. Raises PeerFailedError, LostRankError."""
    ranks.voted_group().ready()
    return ranks.all_gather_object(value)


def require_none(ranks: Ranks, complaint: str, when: str) -> None:
    """Raise DisprovedError on all ranks if one of them has a `complaint` (a text, empty if it has none); `when` begins
    the sentence. All ranks call this."""
    for rank, found in enumerate(exchange(ranks, complaint)):
        if found:
            raise DisprovedError(f"{when}, on rank {rank} {found}")


def tried(action: Callable[[], object]) -> str:
    """Run `action`; returns OUT_OF_MEMORY, or another error as a text, or an empty text. The error's tensors are freed.
    Raises LostRankError."""
    try:
        action()
    except LostRankError:
        raise
    except Exception as error:  # noqa: BLE001  (of any kind: the other ranks are told of it, none is left waiting)
        clear_frames(error)
        return OUT_OF_MEMORY if classify(error) else f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def refuse_shared_cards(device: Device, ranks: Ranks) -> None:
    """Raise EnvironmentProblem on all ranks if two of them work on one CUDA card. All ranks call this before their
    communicators are made, which NCCL refuses to do on one card in its own words."""
    card = str(torch.cuda.get_device_properties(device.torch_device).uuid)
    cards = ranks.all_gather_object([socket.gethostname(), card])
    for rank, (host, card) in enumerate(cards):
        first = next(other for other, (_, its) in enumerate(cards) if its == card)
        if first != rank:
            raise EnvironmentProblem(
                f"ranks {first} and {rank} both use GPU {card} of {host}",
                expected="one GPU for each rank",
                fix="choose GPUs with --devices, or lower device.count; see nvidia-smi -L",
            )


def several(run: ProvedRun) -> bool:
    """Whether the run has several ranks."""
    return run.context.ranks.size > 1


def _several_cards(run: ProvedRun) -> bool:
    return several(run) and run.context.device.kind == "cuda"


def prove_transfers(run: ProvedRun) -> str:
    """Ask the driver which cards of this machine reach each other directly, and the system whether /dev/shm has room
    for the transfers of the others."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", run.context.ranks.size))
    own, direct = _own_pairs(run, here)
    room, needed = disk_usage(SHARED_MEMORY).total, (own - direct) * here // 2 * BYTES_OF_A_PAIR
    told = exchange(run.context.ranks, [own, direct])
    pairs, reached = (sum(each) // 2 for each in zip(*told, strict=True))
    has = f"{SHARED_MEMORY} has {room / 1e6:,.0f} MB"
    words = f"peer access between {reached} of {pairs} pairs of GPUs on a machine; {has}"
    if room < needed:
        raise DisprovedError(f"{words}, but the other pairs need {needed / 1000000.0:,.0f} MB")
    return words


def _own_pairs(run: ProvedRun, here: int) -> tuple[int, int]:
    """(pairs of this rank's card with the other cards of the run on this machine, those with peer access), of `here`
    ranks on this machine. Cards that this process does not see are not counted."""
    own, seen = run.context.device.torch_device.index, torch.cuda.device_count()
    asked = run.spec.limits.devices if len(run.spec.limits.devices) == here else range(here)
    others = [index for index in asked if index != own and index < seen]
    return len(others), sum(torch.cuda.can_device_access_peer(own, other) for other in others)


def prove_collectives(run: ProvedRun) -> str:
    """Run every kind of collective on small whole numbers, then time some votes."""
    ranks = run.context.ranks
    votes = ranks.voted_group()
    try:
        _exact_seconds(run)
    finally:
        began = time.perf_counter()
        for _ in range(VOTES):
            votes.ready()
        vote_ms = 1000 * (time.perf_counter() - began) / VOTES
    return f"five kinds of collectives between {ranks.size} ranks are exact; a vote takes {vote_ms:.2f} ms"


def prove_bandwidth(run: ProvedRun) -> str:
    """Run every kind of collective twice on large buffers, and time the second time."""
    device, size = run.context.device, run.context.ranks.size
    buffer_bytes = CARD_BYTES if device.kind == "cuda" else HOST_BYTES
    large, ready = f"{buffer_bytes // 2**20} MiB", run.context.ranks.voted_group().ready
    for _ in range(2):
        seconds = _exact_seconds(
            run, f" at {large}", values=buffer_bytes // 4 // size, ready=ready, synchronize=device.synchronize
        )
    speeds = [f"{kind} {_gb_per_second(kind, buffer_bytes, size, took)}" for kind, took in seconds.items()]
    return f"collectives of {large} are exact: {', '.join(speeds)} (bus bandwidth)"


def _exact_seconds(run: ProvedRun, where: str = "", **options: Any) -> dict[str, float]:
    device = run.context.device
    with device.host_region():
        try:
            return run_each_collective(device.torch_device, **options)
        except EnvironmentProblem as wrong:
            raise DisprovedError(wrong.found + where) from wrong


def _gb_per_second(kind: str, buffer_bytes: int, size: int, seconds: float) -> str:
    """The bandwidth as NVIDIA's nccl-tests define it (busbw), which can be compared with that of the hardware at any
    number of ranks: the bytes that each link must carry, by the time taken."""
    share = {"broadcast": 1.0, "all-reduce": 2 * (size - 1) / size}.get(kind, (size - 1) / size)
    return f"{share * buffer_bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"


def prove_communicators(run: ProvedRun) -> str:
    """Compare the bytes held outside torch's allocator (CUDA context, NCCL's communicators, other processes) with those
    that the profile leaves for them. Called when all communicators exist."""
    outside, left = _outside_and_left(run)
    if outside > left:
        raise DisprovedError(f"{_gib(outside)} are held outside torch, but the profile leaves {_gib(left)} for that")
    return (
        f"{_gib(outside)} of {_gib(left)} reserved memory is held outside torch by communicators and the CUDA context"
    )


def _lower_capacity(run: ProvedRun) -> str:
    run.context.device.fit_capacity()
    outside, left = _outside_and_left(run)
    asked = run.spec.profile.device.reserve_gib + max(0, outside - left) / 2**30
    capacity = _gib(run.context.device.capacity_bytes)
    return f"training with {capacity}; to plan with this, set device.reserve_gib = {asked:.1f}"


def _outside_and_left(run: ProvedRun) -> tuple[int, int]:
    place = run.context.device.torch_device
    free_bytes, total_bytes = torch.cuda.mem_get_info(place)
    outside = total_bytes - free_bytes - torch.cuda.memory_reserved(place)
    return outside, max(0, total_bytes - run.spec.profile.device.capacity_bytes)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


SUMS = (
    "the run ends, because sums of gradients would be wrong; NCCL_P2P_DISABLE=1 avoids transfers that the host "
    "may corrupt"
)
ROOM = (
    "continuing with the existing communicators; give containers more shared memory: docker run --shm-size=2g "
    "or --ipc=host"
)
TRANSFERS = Proof("transfers", prove_transfers, lambda run: ROOM, _several_cards, votes=True)
COLLECTIVES = Proof("collectives", prove_collectives, lambda run: SUMS, several)
BANDWIDTH = Proof("bandwidth", prove_bandwidth, lambda run: SUMS, several, votes=True)
COMMUNICATORS = Proof("communicators", prove_communicators, _lower_capacity, _several_cards)
