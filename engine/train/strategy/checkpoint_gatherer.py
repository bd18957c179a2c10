"""What is saved of weights that are spread over ranks: weights put together on rank 0, optimizer state by all ranks.

Weights become the same files as those of a run on one device, through rank 0's host memory, so that they load anywhere.
Optimizer state, up to several times their size, is written by every rank for itself through
`torch.distributed.checkpoint`, as safetensors, and read back by any number of ranks.

Try: `pytest tests/distributed/test_sharded_runs.py`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from engine.device.catch_oom import catch_oom
from engine.distributed.sharded import Sharded
from engine.distributed.weight_broadcast import to_first
from engine.errors import UsageError
from engine.model.loaded import part_here
from engine.train.recovery.consensus import gather_failures, smallest_failed
from engine.train.step.context import Parts
from engine.train.step.optimizer import state_tensors

OPTIMIZER = "optimizer"
"""Folder of a checkpoint with every rank's optimizer state."""


class Collector:
    """Puts together on rank 0 what a checkpoint holds. Every rank makes one; rank 0 asks."""

    def __init__(self, parts: Parts, sharded: Sharded) -> None:
        self._parts, self._sharded = parts, sharded
        self._wholes: dict[int, Tensor] = {}
        with parts.device.host_region():
            self._host_mesh = init_device_mesh("cpu", (parts.ranks.size,))
        self._problem: BaseException | None = None
        parts.ranks.duties |= {"gather": self._gather, "write_optimizer": self._write_optimizer}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """On rank 0: inside, the model can be saved as if it were whole."""
        self._asked("gather")
        self._parts.loaded.stage = self._staged
        try:
            yield
        finally:
            self._parts.loaded.stage = None
            self._wholes.clear()

    def write_optimizer(self, folder: Path) -> None:
        """On rank 0: every rank writes its part of the optimizer state into `folder`. Raises OSError: a full disk."""
        self._asked("write_optimizer", folder=str(folder))

    def _asked(self, duty: str, **details: str) -> None:
        self._problem = None
        self._parts.ranks.ask(duty, **details)
        if self._problem is not None:
            raise self._problem

    def _gather(self) -> None:
        parts = self._parts

        def gather() -> None:
            for address, whole in to_first(self._wanted(), parts.ranks, self._sharded.joint, parts.device):
                if whole is not None:
                    self._wholes[address] = whole

        failure = catch_oom(lambda: self._sharded.joint.together(gather), parts.device, "checkpoint")
        failed = gather_failures(parts.ranks, failure, None, parts.device)
        if failed:
            self._wholes.clear()
            self._problem = MemoryError(smallest_failed(failed).failure.text)

    def _wanted(self) -> Iterator[tuple[int, Tensor]]:
        """(address here, tensor) of everything that is saved: adapters, and the base where it exists nowhere else."""
        loaded = self._parts.loaded
        everything = loaded.kind == "model" or not loaded.base_exists_elsewhere
        for _, parameter in loaded.model.named_parameters():
            if everything or parameter.requires_grad:
                yield part_here(parameter).data_ptr(), parameter

    def _staged(self, tensor: Tensor) -> Tensor:
        return self._wholes[part_here(tensor).data_ptr()] if isinstance(tensor, DTensor) else (
            self._parts.device.staged(tensor)
        )

    def _write_optimizer(self, folder: str) -> None:
        parts = self._parts
        with parts.device.host_region():
            state = as_wholes(parts, self._sharded, host_mesh=self._host_mesh)
            writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
            try:
                dcp.save(state, storage_writer=writer)
            except dcp.CheckpointException as error:
                # Told to all ranks by torch; rank 0 decides what is done about it.
                self._problem = next(iter(error.failures.values()))[0]


def as_wholes(parts: Parts, sharded: Sharded, *, host_mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    """Optimizer state by name, every tensor that belongs to a part of a parameter as part of a whole: copies on the
    host with `host_mesh`, else the live tensors."""
    wholes = list(sharded.wholes().values())
    state: dict[str, Tensor] = {}
    for (name, part), whole in zip(parts.loaded.trainable(), wholes, strict=True):
        for key, tensor in state_tensors(parts.optimizer, [(name, part)]):
            held = parts.device.download(tensor) if host_mesh else tensor
            state[key] = _part_of(whole, held, host_mesh or whole.device_mesh) if held.dim() else held
    return state


def _part_of(whole: DTensor, part: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(
        part, mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def read_optimizer(folder: Path, parts: Parts) -> None:
    """Put back the optimizer state that `folder` holds in any number of parts, into as many as there are now.

    Raises:
        UsageError: it is that of other parameters.
    """
    with parts.device.host_region(), torch.no_grad():
        present = as_wholes(parts, parts.sharded) if parts.sharded else (
            dict(state_tensors(parts.optimizer, parts.loaded.trainable()))
        )
        reader = dcp.HuggingFaceStorageReader(str(folder))
        # Beside the state of a run on one device lie its buffers.
        saved = {name for name in reader.read_metadata().state_dict_metadata if "::" in name}
        if saved != present.keys():
            raise UsageError(
                f"the checkpoint in {folder.name} holds optimizer state for other parameters",
                expected="the same model, method and optimizer as when the run started",
                fix="resume without changing them, or start a new run",
            )
        dcp.load(present, storage_reader=reader, no_dist=parts.sharded is None)
