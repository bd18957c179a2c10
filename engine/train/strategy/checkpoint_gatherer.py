"""Saves a run whose weights are spread over ranks: every rank writes a part of the weights and of the optimizer state.

The whole tensors of a full model are dealt out to the ranks, and each writes a file of them while it receives them, so
that the files are those of transformers and load anywhere. An adapter, which is one small file, is gathered on rank 0.
Optimizer state, which can be several times as large as the weights, is not sent: each rank writes the rows that it
holds, in the format of `torch.distributed.checkpoint`, and any number of ranks reads them back.

Each file is hashed by the rank that writes it, while it is written. Try: `pytest tests/distributed/test_sharded_runs.py
tests/distributed/test_sharded_saving.py`
"""

from __future__ import annotations

import errno
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from engine.device.catch_oom import catch_oom
from engine.device.oom import clear_frames
from engine.distributed.own_rows import own_rows
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.distributed.weight_broadcast import gather_on_rank0
from engine.distributed.weight_exchange import exchange
from engine.errors import EnvironmentProblem
from engine.model.full_model_file import METADATA, SavedPart, deal, entries_of, saved_parts, write_index
from engine.model.load import LoadedModel
from engine.model.loaded import local_part
from engine.model.tensor_file import FileTensor, Hashes, write_tensors
from engine.train.recovery.consensus import gather_failures, smallest_failed
from engine.train.step.optimizer_state import state_tensors
from engine.train.strategy.checkpoint_storage import OPTIMIZER_FOLDER, read_parts


class CheckpointGatherer:
    """Writes weights and optimizer state with the help of every rank. Every rank creates a gatherer; the one on rank 0
    sends the others requests to take part."""

    def __init__(
        self, loaded: LoadedModel, optimizer: torch.optim.Optimizer, ranks: Ranks, sharded: ShardedModel
    ) -> None:
        self._loaded, self._optimizer, self._ranks, self._sharded = loaded, optimizer, ranks, sharded
        self._device = loaded.device
        self._wholes: dict[int, Tensor] = {}
        ranks.handlers |= {
            "gather": self._gather,
            "write_weights": self._write_weights,
            "write_optimizer": self._write_optimizer,
        }

    def write_weights(self, folder: Path) -> Hashes:
        """On rank 0: write the adapter or model into `folder`, with the help of all ranks. Raises OSError, for example
        if the disk is full."""
        model = self._loaded.model
        if isinstance(model, PreTrainedModel) and saved_parts(model) is not None:
            self._loaded.save_beside_weights(folder)
            return self._request("write_weights", folder)
        with self._gathered():
            return self._loaded.save(folder)

    def write_optimizer(self, checkpoint: Path) -> Hashes:
        """On rank 0: have every rank write its part of the optimizer state. Raises OSError, for example if the disk
        is full."""
        folder = checkpoint / OPTIMIZER_FOLDER
        folder.mkdir()
        return self._request("write_optimizer", folder)

    def read_optimizer(self, checkpoint: Path) -> None:
        """On all ranks: load this rank's part of the optimizer state, from files that any number of ranks wrote."""
        with self._device.host_region(), torch.no_grad():
            read_parts(checkpoint, self._as_parts_of_wholes(), on_all_ranks=True)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Context manager, on rank 0: inside, `LoadedModel.save` finds whole weights, gathered in host memory."""
        self._ranks.request("gather")
        self._loaded.copy_to_host = self._whole_on_host
        try:
            yield
        finally:
            self._loaded.copy_to_host = None
            self._wholes.clear()

    def _request(self, handler: str, folder: Path) -> Hashes:
        """Have every rank write files into `folder`; returns the hashes of all of them."""
        found: dict[str, str] = self._ranks.request(handler, folder=str(folder))
        return {folder / name: digest for name, digest in found.items()}

    def _gather(self) -> None:
        def gather() -> Hashes:
            for address, whole in gather_on_rank0(self._wanted(), self._ranks, self._sharded.voted_group, self._device):
                if whole is not None:
                    self._wholes[address] = whole
            return {}

        try:
            self._together(gather)
        except MemoryError:
            self._wholes.clear()
            raise

    def _write(self, folder: str, write: Callable[[Path], Hashes]) -> dict[str, str]:
        """Have all ranks call `write` with the folder; returns the hashes of the files of all ranks, by file name."""
        seen = self._ranks.all_gather_object(Path(folder).is_dir())
        if not all(seen):
            raise EnvironmentProblem(
                f"rank {seen.index(False)} does not see {folder}, where rank 0 writes a checkpoint",
                expected="a run directory that all machines share",
                fix="put the runs on a shared file system, and start the run again there",
            )
        return self._together(lambda: write(Path(folder)))

    def _together(self, action: Callable[[], Hashes]) -> dict[str, str]:
        """Run `action`, which returns hashes of files, on all ranks; returns all hashes by file name.

        Raises, on rank 0 alone:
            MemoryError: memory ran out on a rank.
            OSError: a rank could not write a file, for example because the disk is full.
        """
        here: dict[str, Any] = {"hashes": {}, "error": None}

        def attempt() -> None:
            try:
                self._sharded.voted_group.run_together(lambda: here.update(hashes=_by_name(action())))
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    raise
                here["error"] = [error.errno, error.strerror, str(error.filename)]
                clear_frames(error)

        failure = catch_oom(attempt, self._device, "checkpoint")
        failed = gather_failures(self._ranks, failure, None, self._device)
        found = self._ranks.all_gather_object(here)
        errors = [each["error"] for each in found if each["error"]]
        if self._ranks.is_rank0 and failed:
            raise MemoryError(smallest_failed(failed).failure.text)
        if self._ranks.is_rank0 and errors:
            raise OSError(*errors[0])
        return {name: digest for each in found for name, digest in each["hashes"].items()}

    def _write_weights(self, folder: str) -> dict[str, str]:
        model = self._loaded.model
        assert isinstance(model, PreTrainedModel)
        parts = saved_parts(model)
        assert parts is not None
        files = deal(parts, self._ranks.size)
        hashes = self._write(folder, partial(self._write_files, model, files))
        if self._ranks.is_rank0:
            write_index(Path(folder), files)
        return hashes

    def _write_files(self, model: PreTrainedModel, files: dict[str, list[SavedPart]], folder: Path) -> Hashes:
        """Write the files of this rank, while all ranks exchange the tensors of as many files as there are ranks."""
        state, hashes, size = model.state_dict(), Hashes(), self._ranks.size
        names = list(files)
        for first in range(0, len(names), size):
            group = [files[name] for name in names[first : first + size]]
            rounds = ([state[held[number].name] for held in group if number < len(held)]
                      for number in range(len(group[0])))  # fmt: skip
            wholes = exchange(rounds, self._ranks, self._sharded.voted_group, self._device)
            mine = group[self._ranks.rank] if self._ranks.rank < len(group) else []
            with self._device.host_region():
                tensors = _in_file(mine, wholes)
                if mine:
                    path = folder / names[first + self._ranks.rank]
                    hashes[path] = write_tensors(path, entries_of(mine), tensors, METADATA)
                else:
                    deque(tensors, maxlen=0)  # takes part in the rounds
        return hashes

    def _write_optimizer(self, folder: str) -> dict[str, str]:
        return self._write(folder, self._write_rows)

    def _write_rows(self, folder: Path) -> Hashes:
        """Write the rows of optimizer state that this rank holds; rank 0 also writes scalars, such as step counters, of
        which every rank has the same."""
        held = [(name, tensor, _begin(whole) if tensor.dim() else []) for name, tensor, whole in self._state()
                if tensor.numel() and (tensor.dim() or self._ranks.is_rank0)]  # fmt: skip
        if not held:
            return {}
        held.sort(key=lambda each: -each[1].dtype.itemsize)
        begins = {name: {"saved_offsets": begin} for name, _, begin in held}
        metadata = {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
        path = folder / f"shard-{self._ranks.rank + 1:05d}-model-00001-of-00001.safetensors"
        with self._device.host_region():
            entries = [FileTensor.like(name, tensor) for name, tensor, _ in held]
            return {path: write_tensors(path, entries, (self._device.staged(each) for _, each, _ in held), metadata)}

    def _state(self) -> Iterator[tuple[str, Tensor, DTensor]]:
        """Yield the name that `state_tensors` gives (parameter and kind of state), the state of this rank's part, and
        the whole parameter, for all optimizer state."""
        wholes = self._sharded.full_parameters().values()
        for (name, part), whole in zip(self._loaded.trainable(), wholes, strict=True):
            for key, tensor in state_tensors(self._optimizer, [(name, part)]):
                yield key, tensor, whole

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

    def _as_parts_of_wholes(self) -> dict[str, Tensor]:
        """Optimizer state by name. The state of a part of a parameter becomes a DTensor with the parameter's full
        shape; scalars, such as the step counter, stay plain tensors."""
        return {name: _part_of(whole, tensor) if tensor.dim() else tensor for name, tensor, whole in self._state()}


def _part_of(whole: DTensor, part: Tensor) -> DTensor:
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _begin(whole: DTensor) -> list[int]:
    """The index in `whole` of the first element of this rank's part."""
    return [own_rows(whole).start, *[0] * (whole.dim() - 1)]


def _in_file(parts: Sequence[SavedPart], wholes: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of the file that holds `parts`, of which `wholes` yields the model's tensors; then take part in
    the rounds in which only other ranks receive a tensor."""
    for part in parts:
        yield from part.in_file(next(wholes))
    deque(wholes, maxlen=0)


def _by_name(hashes: Hashes) -> dict[str, str]:
    return {path.name: digest for path, digest in hashes.items()}
