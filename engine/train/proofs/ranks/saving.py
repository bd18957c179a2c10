"""Proof: weights and optimizer state that the ranks write into a checkpoint are read back bit for bit, each rank its
own part.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import EnvironmentProblem
from engine.train.proofs.ranks.exchange import exchange, require_none, tried
from engine.train.proofs.record import UndecidedError
from engine.train.setup import TrainingSetup
from engine.train.step.optimizer_state import state_tensors

MOST_BYTES = 8 * 2**30
"""Weights and optimizer state of more bytes on a rank are not written for a proof."""


def prove(setup: TrainingSetup) -> str:
    """Save the run's weights and optimizer state into a temporary folder, overwrite both in memory, and read them back.
    All ranks call this; it votes. Returns what was shown, in a few words.

    Raises:
        DisprovedError: on all ranks, if a bit of what one rank holds differs. What was overwritten is put back.
        UndecidedError: on all ranks, if one rank holds more than MOST_BYTES.
    """
    ranks, held = setup.context.ranks, _held(setup)
    sizes = exchange(ranks, sum(tensor.nbytes for tensor in held.values()))
    if max(sizes) > MOST_BYTES:
        raise UndecidedError(f"a rank holds {max(sizes) / 2**30:.0f} GiB, more than a proof writes")
    folder = Path(exchange(ranks, tempfile.mkdtemp(prefix="tunedeck-proof-") if ranks.is_rank0 else "")[0])
    try:
        _save_and_read(setup, folder, held)
    finally:
        if ranks.is_rank0:
            shutil.rmtree(folder, ignore_errors=True)
    return f"{sum(sizes) / 1e6:.1f} MB of weights and optimizer state are read back bit for bit"


def fall_back(setup: TrainingSetup) -> str:
    """Raise EnvironmentProblem, which ends the run, because a resumed run would go on from other weights."""
    raise EnvironmentProblem(
        "a checkpoint of this run is not read back as it was written",
        expected="equal bits on every rank",
        fix="check memory and disk of this machine; see tunedeck doctor --gpus",
    )


def _save_and_read(setup: TrainingSetup, folder: Path, held: dict[str, Tensor]) -> None:
    """Write `held`, this rank's weights and optimizer state, overwrite it, read it back, and put it back. Raises
    DisprovedError on all ranks if that fails, or a bit differs."""
    context, ranks = setup.context, setup.context.ranks
    storage = context.strategy.checkpoint_storage(context.optimizer)

    def save() -> None:
        storage.write_weights(folder / "weights")
        storage.write_optimizer(folder)

    with context.device.host_region():
        before = {name: tensor.detach().clone() for name, tensor in held.items()}
    failed = ranks.run_on_rank0(lambda: tried(save))
    require_none(ranks, failed, "while the checkpoint was written")
    try:
        with torch.no_grad():
            for tensor in held.values():
                tensor.fill_(1)
        read = tried(lambda: context.loaded.load_weights(folder / "weights"))
        require_none(ranks, read, "while weights were read back")
        require_none(ranks, tried(lambda: storage.read_optimizer(folder)), "while optimizer state was read back")
        require_none(ranks, _difference(held, before), "after a checkpoint was read back")
    finally:
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(before[name])


def _held(setup: TrainingSetup) -> dict[str, Tensor]:
    """This rank's trained weights and optimizer state, by name."""
    named = setup.context.loaded.trainable()
    return {**dict(named), **dict(state_tensors(setup.context.optimizer, named))}


def _difference(held: dict[str, Tensor], before: dict[str, Tensor]) -> str:
    for name, tensor in held.items():
        if not torch.equal(_bits(tensor), _bits(before[name])):
            return f"{name} differs"
    return ""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
