"""Writes weights and optimizer state into checkpoints and reads the optimizer state back, for a process that holds all
of it.

The optimizer state of one process is one file, `optimizer.safetensors`. If weights are spread over ranks, it is a
folder, `optimizer/`, to which every rank writes (`engine.train.strategy.checkpoint_gatherer`). Both forms can be read
by a resumed run on any number of ranks.

Try: `pytest tests/train/test_resume.py tests/distributed/test_sharded_runs.py`
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from engine.errors import UsageError
from engine.model.load import LoadedModel
from engine.model.tensor_file import FileTensor, Hashes, write_tensors
from engine.train.step.optimizer_state import REMAINDER, state_tensors

OPTIMIZER_FILE = "optimizer.safetensors"
"""The file of the optimizer state in a checkpoint of a run in which every rank has all weights."""

OPTIMIZER_FOLDER = "optimizer"
"""The folder of the optimizer state in a checkpoint of a run in which every rank has a part of the weights."""


class CheckpointStorage(Protocol):
    """Writes weights and optimizer state into checkpoints and reads the optimizer state back. Rank 0 writes, with
    the help of the other ranks if each rank holds only a part."""

    def write_weights(self, folder: Path) -> Hashes:
        """Write what `LoadedModel.save` writes into `folder`; returns the hashes of the files that were hashed while
        they were written. Only rank 0 calls this, inside `Ranks.run_on_rank0`; other ranks are asked to take part.
        Raises OSError, for example on a full disk."""

    def write_optimizer(self, checkpoint: Path) -> Hashes:
        """Write the optimizer state into the folder of a checkpoint, as `write_weights` writes weights."""

    def read_optimizer(self, checkpoint: Path) -> None:
        """On all ranks: load into the optimizer the state that `write_optimizer` wrote, on any number of ranks.

        Raises:
            UsageError: the saved state belongs to other parameters.
        """


class LocalStorage:
    """The checkpoint storage of a process that holds whole weights and the whole optimizer state."""

    def __init__(self, loaded: LoadedModel, optimizer: torch.optim.Optimizer) -> None:
        self._loaded, self._optimizer = loaded, optimizer

    def write_weights(self, folder: Path) -> Hashes:
        """Write the adapter or model into `folder`."""
        return self._loaded.save(folder)

    def write_optimizer(self, checkpoint: Path) -> Hashes:
        """Write the optimizer state into the file `optimizer.safetensors` of the folder `checkpoint`, one tensor at a
        time."""
        device, path, state = self._loaded.device, checkpoint / OPTIMIZER_FILE, list(self._state().items())
        state.sort(key=lambda item: -item[1].dtype.itemsize)
        with device.host_region():
            entries = [FileTensor.like(name, tensor) for name, tensor in state]
            return {path: write_tensors(path, entries, (device.staged(tensor) for _, tensor in state))}

    def read_optimizer(self, checkpoint: Path) -> None:
        """Load the optimizer state from one file, or from a folder to which several ranks wrote."""
        if (checkpoint / OPTIMIZER_FOLDER).is_dir():
            with self._loaded.device.host_region():
                read_parts(checkpoint, self._state(), on_all_ranks=False)
            return
        with self._loaded.device.host_region():
            saved = load_file(checkpoint / OPTIMIZER_FILE)
        present = self._state()
        require_same_parameters(checkpoint, set(saved), set(present))
        with torch.no_grad():
            for name, tensor in present.items():
                tensor.copy_(saved[name])

    def _state(self) -> dict[str, Tensor]:
        return dict(state_tensors(self._optimizer, self._loaded.trainable()))


def read_parts(checkpoint: Path, present: dict[str, Tensor], *, on_all_ranks: bool) -> None:
    """Read a checkpoint's optimizer state, in one file or many, into the tensors of `present`, by name. With
    `on_all_ranks` all ranks call this together, and each reads its parts of sharded tensors.

    Raises:
        UsageError: the saved state belongs to other parameters.
    """
    folder = checkpoint / OPTIMIZER_FOLDER
    reader = HuggingFaceStorageReader(str(folder if folder.is_dir() else checkpoint))
    # A checkpoint of a run on one device has its buffers in the same folder.
    saved = {name for name in reader.read_metadata().state_dict_metadata if "::" in name}
    require_same_parameters(checkpoint, saved, set(present))
    with torch.no_grad():
        load(present, storage_reader=reader, no_dist=not on_all_ranks)


def require_same_parameters(checkpoint: Path, saved: set[str], present: set[str]) -> None:
    """Raise UsageError unless `saved` and `present`, the names of the saved and the current optimizer state, are
    equal."""
    if {name.partition("::")[2] for name in saved ^ present} == {REMAINDER}:
        raise _other_rounding(checkpoint, saved_exactly=present < saved)
    if saved != present:
        raise UsageError(
            f"checkpoint {checkpoint.name} holds optimizer state for other parameters",
            expected="the same model, method and optimizer as when the run started",
            fix="resume without changing them, or start a new run",
        )


def _other_rounding(checkpoint: Path, *, saved_exactly: bool) -> UsageError:
    """The error for a checkpoint that holds the remainders of bf16 weights (`saved_exactly`) while this run keeps none,
    or the reverse. Checkpoints from before `train.rounding` existed hold none: bf16 weights were rounded to nearest and
    their optimizer state was bf16."""
    key = 'train.rounding = "exact"' if saved_exactly else 'train.rounding = "nearest", train.state_dtype = "bfloat16"'
    return UsageError(
        f"checkpoint {checkpoint.name} was saved with{'' if saved_exactly else 'out'} remainders of bf16 weights",
        expected="the train.rounding that the run was started with",
        fix=f"set {key} in run.toml, or start a new run",
    )
