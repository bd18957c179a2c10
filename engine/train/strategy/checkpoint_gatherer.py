"""Saves a run whose weights are spread over ranks: weights are gathered on rank 0, every rank writes optimizer state.

Weights are gathered in rank 0's host memory and written to the same files as in a run on one device, so that they load
anywhere. Optimizer state, which can be several times as large as the weights, is written by every rank for itself
through `torch.distributed.checkpoint`, as safetensors, and read back by any number of ranks.

Try: `pytest tests/distributed/test_sharded_runs.py`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from engine.device.catch_oom import catch_oom
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.distributed.weight_broadcast import gather_on_rank0
from engine.model.load import LoadedModel
from engine.model.loaded import local_part
from engine.train.recovery.consensus import gather_failures, smallest_failed
from engine.train.step.optimizer_state import state_tensors
from engine.train.strategy.checkpoint_storage import OPTIMIZER_FOLDER, read_parts


class CheckpointGatherer:
    """Gathers weights on rank 0 for a checkpoint, and has every rank write its optimizer state. Every rank creates a
    gatherer; the one on rank 0 sends the others requests to take part."""

    def __init__(
        self, loaded: LoadedModel, optimizer: torch.optim.Optimizer, ranks: Ranks, sharded: ShardedModel
    ) -> None:
        self._loaded, self._optimizer, self._ranks, self._sharded = loaded, optimizer, ranks, sharded
        self._device = loaded.device
        self._wholes: dict[int, Tensor] = {}
        with self._device.host_region():
            self._host_mesh = init_device_mesh("cpu", (ranks.size,))
        ranks.handlers |= {"gather": self._gather, "write_optimizer": self._write_optimizer}

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context manager, on rank 0: inside, `LoadedModel.save` finds whole weights, gathered in host memory."""
        self._request("gather")
        self._loaded.copy_to_host = self._whole_on_host
        try:
            yield
        finally:
            self._loaded.copy_to_host = None
            self._wholes.clear()

    def write_optimizer(self, checkpoint: Path) -> None:
        """On rank 0: have every rank write its part of the optimizer state. Raises OSError, for example if the disk
        is full."""
        self._request("write_optimizer", folder=str(checkpoint / OPTIMIZER_FOLDER))

    def read_optimizer(self, checkpoint: Path) -> None:
        """On all ranks: load this rank's part of the optimizer state, from files that any number of ranks wrote."""
        with self._device.host_region(), torch.no_grad():
            read_parts(checkpoint, self._as_parts_of_wholes(), on_all_ranks=True)

    def _request(self, handler: str, **details: str) -> None:
        error: BaseException | None = self._ranks.request(handler, **details)
        if error is not None:
            raise error

    def _gather(self) -> MemoryError | None:
        def gather() -> None:
            for address, whole in gather_on_rank0(self._wanted(), self._ranks, self._sharded.voted_group, self._device):
                if whole is not None:
                    self._wholes[address] = whole

        failure = catch_oom(partial(self._sharded.voted_group.run_together, gather), self._device, "checkpoint")
        failed = gather_failures(self._ranks, failure, None, self._device)
        if failed:
            self._wholes.clear()
            return MemoryError(smallest_failed(failed).failure.text)
        return None

    def _wanted(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (data pointer of this rank's part, parameter) for each parameter to save: the trainable ones, or all of
        them in full fine-tuning or if the base model is stored nowhere else."""
        everything = self._loaded.kind == "model" or not self._loaded.base_exists_elsewhere
        for _, parameter in self._loaded.model.named_parameters():
            if everything or parameter.requires_grad:
                yield local_part(parameter).data_ptr(), parameter

    def _whole_on_host(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return self._wholes[local_part(tensor).data_ptr()]
        return self._device.staged(tensor)

    def _write_optimizer(self, folder: str) -> BaseException | None:
        with self._device.host_region():
            state = self._as_parts_of_wholes(self._host_mesh)
            writer = HuggingFaceStorageWriter(folder, save_distributed=True)
            try:
                save(state, storage_writer=writer)
            except CheckpointException as error:
                # torch raises this on all ranks; rank 0 decides what to do about it.
                return next(iter(error.failures.values()))[0]
        return None

    def _as_parts_of_wholes(self, host_mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
        """Optimizer state by the names that `state_tensors` gives (parameter and kind of state). The state of a part of
        a parameter becomes a DTensor with the parameter's full shape: a copy in host memory if `host_mesh` is given,
        else the live tensor. Scalars, such as the step counter, stay plain tensors."""
        wholes = self._sharded.full_parameters().values()
        state: dict[str, Tensor] = {}
        for (name, part), whole in zip(self._loaded.trainable(), wholes, strict=True):
            for key, tensor in state_tensors(self._optimizer, [(name, part)]):
                held = self._device.download(tensor) if host_mesh else tensor
                state[key] = _part_of(whole, held, host_mesh or whole.device_mesh) if held.dim() else held
        return state


def _part_of(whole: DTensor, part: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(
        part, mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
