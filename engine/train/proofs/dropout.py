"""Proof: the kernel that draws dropout's masks gives the reference's bits, for the dtypes and probabilities in use.

Try: `pytest tests/train/proofs/test_kernels.py`
"""

from __future__ import annotations

from engine.model.dropout import keyed_dropouts
from engine.model.dropout_kernel import difference, kernel_in_use, stop_using
from engine.model.dropout_masks import reference_drop
from engine.train.proofs.record import DisprovedError
from engine.train.setup import TrainingSetup


def applies(setup: TrainingSetup) -> bool:
    """Whether the model has dropout, and a kernel other than the reference draws its masks."""
    in_use = kernel_in_use(setup.context.device.torch_device) is not None
    return in_use and bool(keyed_dropouts(setup.context.loaded.model))


def facts(setup: TrainingSetup) -> list[str]:
    """Return an empty list: the outcome depends on nothing but device and versions, because the same shapes and dtypes
    are always compared."""
    return []


def prove(setup: TrainingSetup) -> str:
    """Compare the kernel with the reference, bit for bit. Returns what was shown, in a few words. Raises DisprovedError
    if a bit differs."""
    device = setup.context.device.torch_device
    kernel = kernel_in_use(device)
    assert kernel is not None, "applies() was not asked"
    problem = difference(kernel, reference_drop, device)
    if problem is not None:
        raise DisprovedError(problem)
    return "the dropout kernel draws the masks of the reference, bit for bit"


def fall_back(setup: TrainingSetup) -> str:
    """Draw masks with the reference; returns what the run does instead, in a few words."""
    stop_using(setup.context.device.torch_device)
    return "dropout takes eleven kernels instead of one, and more memory"
