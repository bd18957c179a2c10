"""Writes weights and optimizer state into checkpoints and reads the optimizer state back.

One process writes its optimizer state into the file `optimizer.safetensors`. If weights are sharded, every rank writes
a part: the whole tensors of a full model are dealt out to the ranks, and each writes a file of them while it receives
them, so that the files are those of transformers; an adapter, which is small, is gathered on rank 0; of the optimizer
state, which can be several times as large as the weights, each rank writes its own rows into the folder `optimizer/`,
in the format of `torch.distributed.checkpoint`. Any number of ranks reads either form. Each file is hashed by the rank
that writes it, while it is written.
"""

from __future__ import annotations

import errno
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from engine.device.oom import catch_oom, clear_frames
from engine.distributed.sharded_files import exchange, own_rows, part_of
from engine.errors import EnvironmentProblem, UsageError
from engine.model.loaded import local_part
from engine.model.result_files import METADATA, deal, entries_of, saved_parts, write_index
from engine.model.tensor_file import FileTensor, Hashes, read_tensors, saved_shapes, write_tensors
from engine.train.step.failures import gather_failures, smallest_failed
from engine.train.step.optimizer_state import REMAINDER, state_tensors

if TYPE_CHECKING:
    from engine.distributed.ranks import Ranks
    from engine.distributed.sharded import ShardedModel
    from engine.model.load import LoadedModel
    from engine.model.result_files import SavedPart

OPTIMIZER_FILE, OPTIMIZER_FOLDER = "optimizer.safetensors", "optimizer"


class WholeWeightsStorage:
    """Writes and reads the checkpoints of a process that holds whole weights and the whole optimizer state."""

    def __init__(self, loaded: LoadedModel, optimizer: torch.optim.Optimizer) -> None:
        self._loaded, self._optimizer, self._device = loaded, optimizer, loaded.device

    def write_weights(self, folder: Path) -> Hashes:
        """Write what `LoadedModel.save` writes into `folder`; returns the hashes of the files that were hashed while
        they were written. Only rank 0 calls this, inside `Ranks.run_on_rank0`; other ranks are asked to take part.
        Raises OSError, for example on a full disk."""
        return self._loaded.save(folder)

    def write_optimizer(self, checkpoint: Path) -> Hashes:
        """Write the optimizer state into the folder of a checkpoint, one tensor at a time, as `write_weights` writes
        weights."""
        return self._write_state(checkpoint / OPTIMIZER_FILE, self._state())

    def read_optimizer(self, checkpoint: Path) -> None:
        """On all ranks: load into the optimizer the state that `write_optimizer` wrote, on any number of ranks.

        Raises:
            UsageError: the saved state belongs to other parameters.
        """
        with self._device.host_region():
            read_parts(checkpoint, self._state())

    def _write_state(self, path: Path, state: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Hashes:
        """Write `state`, or this rank's shards of it, larger dtypes first as safetensors wants them."""
        local = {name: local_part(tensor) for name, tensor in state.items()}
        held = sorted(local.items(), key=lambda item: -item[1].dtype.itemsize)
        with self._device.host_region():
            entries = [FileTensor.like(name, tensor) for name, tensor in held]
            return {path: write_tensors(path, entries, (self._device.staged(each) for _, each in held), metadata)}

    def _state(self) -> dict[str, Tensor]:
        return dict(state_tensors(self._optimizer, self._loaded.trainable()))


class CheckpointGatherer(WholeWeightsStorage):
    """Writes and reads the checkpoints of sharded weights. Every rank creates one; the one on rank 0 sends the others
    requests to take part."""

    def __init__(
        self, loaded: LoadedModel, optimizer: torch.optim.Optimizer, ranks: Ranks, sharded: ShardedModel
    ) -> None:
        super().__init__(loaded, optimizer)
        self._ranks, self._sharded = ranks, sharded
        self._wholes: dict[int, Tensor] = {}
        ranks.handlers |= {
            "gather": self._gather,
            "write_weights": self._write_weights,
            "write_optimizer": partial(self._write, write=self._write_rows),
        }

    def write_weights(self, folder: Path) -> Hashes:
        model = self._loaded.model
        if isinstance(model, PreTrainedModel) and saved_parts(model) is not None:
            self._loaded.save_beside_weights(folder)
            return self._request("write_weights", folder)
        with self._gathered():
            return self._loaded.save(folder)

    def write_optimizer(self, checkpoint: Path) -> Hashes:
        folder = checkpoint / OPTIMIZER_FOLDER
        folder.mkdir()
        return self._request("write_optimizer", folder)

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

    def _whole_on_host(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return self._wholes[local_part(tensor).data_ptr()]
        return self._device.staged(tensor)

    def _gather(self) -> None:
        """Gather on rank 0 the sharded parameters to save: the trainable ones, or all of them in full fine-tuning or if
        the base model is stored nowhere else."""
        everything = self._loaded.kind == "model" or not self._loaded.base_exists_elsewhere
        wanted = [parameter for parameter in self._loaded.model.parameters()
                  if isinstance(parameter, DTensor) and (everything or parameter.requires_grad)]  # fmt: skip

        def gather() -> Hashes:
            rounds = ([parameter] for parameter in wanted)  # one whole tensor each, for rank 0
            wholes = exchange(rounds, self._ranks, self._sharded.voted_group, self._device)
            self._wholes.update((local_part(wanted[number]).data_ptr(), whole) for number, whole in enumerate(wholes))
            return {}

        try:
            self._together(gather)
        except MemoryError:
            self._wholes.clear()
            raise

    def _request(self, handler: str, folder: Path) -> Hashes:
        found: dict[str, str] = self._ranks.request(handler, folder=str(folder))
        return {folder / name: digest for name, digest in found.items()}

    def _write(self, folder: str, write: Callable[[Path], Hashes]) -> dict[str, str]:
        """Have all ranks call `write` with the folder; returns the hashes of all files, by file name."""
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

        def run() -> None:
            here["hashes"] = {path.name: digest for path, digest in action().items()}

        def attempt() -> None:
            try:
                self._sharded.voted_group.run_together(run)
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

    def _write_rows(self, folder: Path) -> Hashes:
        """Write the rows of optimizer state that this rank holds; rank 0 also writes scalars, such as step counters, of
        which every rank has the same."""
        held = {name: tensor for name, tensor in self._state().items()
                if local_part(tensor).numel() and (tensor.dim() or self._ranks.is_rank0)}  # fmt: skip
        if not held:
            return {}
        begins = {name: {"saved_offsets": _begin(tensor)} for name, tensor in held.items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
        path = folder / f"shard-{self._ranks.rank + 1:05d}-model-00001-of-00001.safetensors"
        return self._write_state(path, held, metadata)

    def _state(self) -> dict[str, Tensor]:
        """All optimizer state by name. The state of a part of a parameter is a DTensor with the parameter's full shape;
        scalars, such as the step counter, are plain tensors."""
        wholes = self._sharded.full_parameters().values()
        return {
            name: part_of(whole, tensor) if tensor.dim() else tensor
            for named, whole in zip(self._loaded.trainable(), wholes, strict=True)
            for name, tensor in state_tensors(self._optimizer, [named])
        }


def _begin(tensor: Tensor) -> list[int]:
    """The index in the whole tensor of the first element of this rank's part."""
    return [own_rows(tensor).start, *[0] * (tensor.dim() - 1)] if isinstance(tensor, DTensor) else []


def _in_file(parts: Sequence[SavedPart], wholes: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of the file that holds `parts`, of which `wholes` yields the model's tensors; then take part in
    the rounds in which only other ranks receive a tensor."""
    for part in parts:
        yield from part.in_file(next(wholes))
    deque(wholes, maxlen=0)


def read_parts(checkpoint: Path, present: dict[str, Tensor]) -> None:
    """Read a checkpoint's optimizer state, in one file or many, into the tensors of `present`, by name.

    Raises:
        UsageError: the saved state belongs to other parameters.
    """
    folder = checkpoint / OPTIMIZER_FOLDER
    folder = folder if folder.is_dir() else checkpoint
    # A checkpoint of a run on one device has its buffers in the same folder.
    require_same_parameters(checkpoint, {name for name in saved_shapes(folder) if "::" in name}, set(present))
    with torch.no_grad():
        read_tensors(folder, present)


def require_same_parameters(checkpoint: Path, saved: set[str], present: set[str]) -> None:
    """Raise UsageError unless the names of the saved and the current optimizer state are equal."""
    if {name.partition("::")[2] for name in present - saved} == {REMAINDER} and saved < present:
        raise _without_remainders(checkpoint)
    if saved != present:
        raise UsageError(
            f"checkpoint {checkpoint.name} has optimizer state for different parameters",
            expected="the same model, method and optimizer as at the start of the run",
            fix="resume without changing them, or start a new run",
        )


def _without_remainders(checkpoint: Path) -> UsageError:
    """The error for a checkpoint from before `train.rounding` existed, in a run that keeps remainders of bf16 weights:
    weights were rounded to nearest then, and their optimizer state was bf16."""
    return UsageError(
        f"checkpoint {checkpoint.name} was saved without remainders of bf16 weights",
        expected="the same rounding as at the start of the run",
        fix='set train.rounding = "nearest", train.state_dtype = "bfloat16" in run.toml, or start a new run',
    )
