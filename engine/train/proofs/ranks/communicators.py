"""Proof: what the CUDA context, the communicators of NCCL and other processes hold of a card, outside torch's
allocator, fits beside the run's capacity, which is what the profile's reserve is for.

Try: `tunedeck doctor --gpus`
"""

from __future__ import annotations

import torch

from engine.train.proofs.record import DisprovedError
from engine.train.setup import TrainingSetup


def applies(setup: TrainingSetup) -> bool:
    """Whether several ranks train on CUDA cards."""
    return setup.context.ranks.size > 1 and setup.context.device.kind == "cuda"


def prove(setup: TrainingSetup) -> str:
    """Compare the bytes held outside torch's allocator with those that the profile leaves for them. Called when all
    communicators exist. Returns what was shown, in a few words. Raises DisprovedError if they need more."""
    outside, left = _outside_and_left(setup)
    if outside > left:
        raise DisprovedError(f"{_gib(outside)} are held outside torch, and the profile leaves {_gib(left)} for that")
    return f"{_gib(outside)} are held outside torch by communicators and the CUDA context, of {_gib(left)} left for it"


def fall_back(setup: TrainingSetup) -> str:
    """Lower the capacity to what is left; returns what the run does instead, in a few words."""
    setup.context.device.fit_capacity()
    outside, left = _outside_and_left(setup)
    asked = setup.spec.profile.device.reserve_gib + max(0, outside - left) / 2**30
    capacity = _gib(setup.context.device.capacity_bytes)
    return f"it trains with {capacity}; device.reserve_gib = {asked:.1f} plans with that"


def _outside_and_left(setup: TrainingSetup) -> tuple[int, int]:
    """(bytes of this rank's card held outside torch's allocator, bytes that the profile leaves for it)."""
    place = setup.context.device.torch_device
    free_bytes, total_bytes = torch.cuda.mem_get_info(place)
    outside = total_bytes - free_bytes - torch.cuda.memory_reserved(place)
    return outside, max(0, total_bytes - setup.spec.profile.device.capacity_bytes)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
