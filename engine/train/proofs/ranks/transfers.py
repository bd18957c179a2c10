"""Proof: the GPUs of a machine reach each other's memory directly, or /dev/shm has room for transfers through the host.

Try: `tunedeck doctor --gpus`
"""

from __future__ import annotations

import os
from shutil import disk_usage

import torch

from engine.train.proofs.ranks.exchange import exchange
from engine.train.proofs.record import DisprovedError
from engine.train.setup import TrainingSetup

SHARED_MEMORY = "/dev/shm"
BYTES_OF_A_PAIR = 10 * 10**6
"""What NCCL takes of /dev/shm for two GPUs that talk through it: a segment of 9,637,888 bytes in its reports."""


def applies(setup: TrainingSetup) -> bool:
    """Whether several ranks train on CUDA cards."""
    return setup.context.ranks.size > 1 and setup.context.device.kind == "cuda"


def prove(setup: TrainingSetup) -> str:
    """Ask the driver which cards of this machine reach each other, and the system for the size of /dev/shm. All ranks
    call this; it votes. Returns what was shown, in a few words. Raises DisprovedError if transfers of this machine must
    go through /dev/shm and it has too little room in all."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", setup.context.ranks.size))
    own, direct = _own_pairs(setup, here)
    room, needed = disk_usage(SHARED_MEMORY).total, (own - direct) * here // 2 * BYTES_OF_A_PAIR
    told = exchange(setup.context.ranks, [own, direct])
    pairs, reached = (sum(each) // 2 for each in zip(*told, strict=True))
    words = f"peer access between {reached} of {pairs} pairs of GPUs of a machine; {SHARED_MEMORY} has {_mb(room)}"
    if room < needed:
        raise DisprovedError(f"{words}, and the other pairs need {_mb(needed)} there")
    return words


def fall_back(setup: TrainingSetup) -> str:
    """Do nothing, because the communicators that the run needs were made; returns what to do, in a few words."""
    return (
        "it goes on with the communicators that it has; give containers more shared memory: docker run --shm-size=2g "
        "or --ipc=host"
    )


def _own_pairs(setup: TrainingSetup, here: int) -> tuple[int, int]:
    """(pairs of this rank's card with the other cards of the run on this machine, those with peer access), of `here`
    ranks on this machine. Cards that this process does not see are not counted."""
    own, seen = setup.context.device.torch_device.index, torch.cuda.device_count()
    asked = setup.spec.limits.devices if len(setup.spec.limits.devices) == here else range(here)
    others = [index for index in asked if index != own and index < seen]
    return len(others), sum(torch.cuda.can_device_access_peer(own, other) for other in others)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
