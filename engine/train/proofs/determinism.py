"""Proof: with `train.deterministic`, torch's deterministic algorithms are on; attention and loss repeat bit for bit.

Try: `pytest tests/train/proofs/test_kernels.py`
"""

from __future__ import annotations

import torch

from engine.train.proofs import attention, loss
from engine.train.proofs.record import DisprovedError
from engine.train.setup import TrainingSetup


def applies(setup: TrainingSetup) -> bool:
    """Whether the recipe sets `train.deterministic`."""
    return setup.spec.recipe.train.deterministic


def prove(setup: TrainingSetup) -> str:
    """Run the attention kernel and the loss twice on the same input. Returns what was shown, in a few words. Raises
    DisprovedError if a bit differs, or if torch's deterministic algorithms are off."""
    if not torch.are_deterministic_algorithms_enabled():
        raise DisprovedError("torch's deterministic algorithms are not switched on")
    if attention.applies(setup):
        attention.repeats(setup)
    loss.repeats(setup)
    return "attention and loss give the same bits twice"


def fall_back(setup: TrainingSetup) -> str:
    """Use the model's own attention and the plain loss, which are made of torch's operations; returns what the run does
    instead, in a few words."""
    setup.context.loaded.use_attention("eager")
    setup.context.loss.implementation = "plain"
    return "attention = eager, loss = plain"
