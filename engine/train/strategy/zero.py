"""A run that its ranks share through DeepSpeed (`engine.distributed.deepspeed`): loaded, evaluated, saved, resumed.

Checkpoints hold what those of one process hold, put together on rank 0 tensor by tensor: weights in `weights/`,
optimizer state in `optimizer/`; beside narrower weights also DeepSpeed's fp32 copies, in `masters/`. So a run goes on
with any number of ranks and with any strategy.

Try: `tunedeck train -p demo-2 -r demo --set parallel.strategy=deepspeed`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedTokenizerBase

from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.catch_oom import catch_oom
from engine.device.oom import OutOfMemory
from engine.distributed.deepspeed import EndedByMemoryError, Zero, standing_in
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import Head, Whole
from engine.errors import MemoryExhaustedError, UsageError
from engine.evaluate.scores import Judge, judging, loss_sum
from engine.model.head import find_head
from engine.model.load import LoadedModel, load_model
from engine.model.loss import LossFunction, loss_of
from engine.spec.schema.run import RunSpec
from engine.train.step.context import Parts
from engine.train.step.optimizer import StepGuard, allocate_one, build_optimizer
from engine.train.strategy.checkpoint_gatherer import OPTIMIZER

HOST = torch.device("cpu")

MASTERS = "masters"
"""Folder of a checkpoint with fp32 copies of narrower weights."""

FILE_BYTES = 2**30
"""Rank 0 holds about so much of what it writes at once."""

RUNGS_BETWEEN_ATTEMPTS = ("cut", "checkpointing", "chunk_loss")
"""Rungs of the ladder that make the next attempt smaller. Trying the same again would cost a restart."""

PROMISE = (
    "deepspeed",
    "under DeepSpeed, memory that runs out on one rank ends the attempt on all: the run starts again from its last "
    "checkpoint with what was learned; no step is lost or applied twice",
    "checkpoint.every_steps bounds what is computed again",
)
"""Warning of a run."""


def load_with_deepspeed(
    spec: RunSpec, device: Device, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
) -> tuple[LoadedModel, LossFunction, StepGuard, Zero]:
    """The model, its loss and its optimizer, shared out. For ZeRO-3 every rank reads the model into host memory; no
    device ever holds more than one tensor beyond its part.

    Raises:
        MemoryExhaustedError: memory ran out, on this rank.
        EnvironmentProblem, UsageError: see `load_model`; or what learns has several dtypes.
        LostRankError: another rank could not go on.
    """
    made: list[tuple[LoadedModel, LossFunction, StepGuard, Zero]] = []
    failure = catch_oom(lambda: made.append(_load(spec, device, tokenizer, ranks)), device, "load")
    if failure is not None:
        raise MemoryExhaustedError(
            f"out of memory while the model was loaded for DeepSpeed, on rank {ranks.rank}: {failure.text}",
            fix="a profile with more memory, or parallel.strategy = \"sharded\"",
        )
    return made[0]


def _load(
    spec: RunSpec, device: Device, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
) -> tuple[LoadedModel, LossFunction, StepGuard, Zero]:
    train, stage = spec.recipe.train, 3 if spec.profile.parallel.shard == "parameters" else 2
    with device.host_region() if stage == 3 else nullcontext():
        loaded = load_model(spec, device, tokenizer, HOST if stage == 3 else None)
    _refuse_dtypes(loaded)
    for module in loaded.model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device.torch_device)
    device.adopt(loaded.model.buffers())
    # Before the weights are gone: which of them decay is told by their shapes.
    optimizer = build_optimizer(train, loaded.trainable())
    whole = Whole(loaded.model, Head(find_head(loaded.base).project))
    zero = Zero(whole, optimizer, ranks, device, stage=stage, max_grad_norm=train.max_grad_norm)
    for group, flat in zero.flat_parts():
        allocate_one(optimizer, group, flat)
    zero.link_state()
    with zero.head_gathered():
        loss = loss_of(train, loaded, device)
    whole.computes(loss)
    loss.through = zero.compute
    return loaded, loss, StepGuard(optimizer, loaded.trainable(), device), zero


def _refuse_dtypes(loaded: LoadedModel) -> None:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for _, parameter in loaded.trainable()})
    if len(dtypes) > 1 or dtypes[0] == "float16":
        raise UsageError(
            f'what learns is in {" and ".join(dtypes)}, which parallel.strategy = "deepspeed" does not train',
            expected="float32 or bfloat16 throughout",
            fix='set model.dtype = "float32", or parallel.strategy = "sharded"',
        )


class ZeroCollector:
    """Puts together on rank 0 what a checkpoint holds. Every rank makes one; rank 0 asks."""

    def __init__(self, parts: Parts, zero: Zero) -> None:
        self._parts, self._zero = parts, zero
        self._wholes: dict[Parameter, Tensor] = {}
        self._problem: Exception | None = None
        parts.ranks.duties |= {"gather": self._gather, "write_optimizer": self._write}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """On rank 0: inside, the model can be saved as if it were whole."""
        if self._zero.spreads_weights:
            self._parts.ranks.ask("gather")
        try:
            with standing_in(self._wholes):
                yield
        finally:
            self._wholes.clear()

    def write_optimizer(self, folder: Path) -> None:
        """On rank 0: optimizer state into `folder`, fp32 copies beside it. Raises OSError: a full disk."""
        self._problem = None
        folder.mkdir()
        self._parts.ranks.ask("write_optimizer", folder=str(folder))
        if self._problem is not None:
            raise self._problem

    def _gather(self) -> None:
        loaded = self._parts.loaded
        everything = loaded.kind == "model" or not loaded.base_exists_elsewhere
        wanted = [p for p in loaded.model.parameters() if everything or p.requires_grad]
        together(self._parts, "checkpoint", lambda: self._wholes.update(self._zero.on_first(wanted)))

    def _write(self, folder: str) -> None:
        named = self._parts.loaded.trainable()
        together(self._parts, "checkpoint", lambda: self._write_all(Path(folder), self._zero.states(named)))
        masters = Path(folder).with_name(MASTERS)
        together(self._parts, "checkpoint", lambda: self._write_all(masters, self._zero.masters(named)))

    def _write_all(self, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Rank 0 writes; the others, who take part in making each tensor, are not told of a full disk."""
        held: dict[str, Tensor] = {}
        files = 0
        for name, tensor in tensors:
            if not self._parts.ranks.is_first or self._problem is not None:
                continue
            held[name] = self._parts.device.download(tensor)
            if sum(each.nbytes for each in held.values()) >= FILE_BYTES:
                files += self._write_file(folder, files, held)
        if held:
            self._write_file(folder, files, held)

    def _write_file(self, folder: Path, number: int, held: dict[str, Tensor]) -> int:
        try:
            folder.mkdir(exist_ok=True)
            with self._parts.device.host_region():
                save_file(held, folder / f"part-{number:05d}.safetensors")
        except (OSError, SafetensorError) as error:
            self._problem = error
        held.clear()
        return 1


@contextmanager
def filled(parts: Parts) -> Iterator[None]:
    """Inside, weights can be put back by name, also where no rank holds them whole."""
    if parts.zero is None:
        yield
        return
    everything = list(parts.loaded.model.parameters())
    with parts.zero.filled(everything if parts.loaded.kind == "model" else [p for _, p in parts.loaded.trainable()]):
        yield


def put_back(checkpoint: Path, parts: Parts, zero: Zero) -> None:
    """Optimizer state, and fp32 copies where there are some, of a run with any number of ranks and any strategy.

    Raises UsageError: it is that of other parameters.
    """
    named = dict(parts.loaded.trainable())
    wanted = {f"{name}::{state}" for name in named for state in zero.shared_states()}
    for key, tensor in _saved(checkpoint, wanted):
        name, _, state = key.rpartition("::")
        zero.set_state(named[name], state, tensor)
    for path in sorted((checkpoint / MASTERS).glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            zero.set_masters(named[name], tensor)
    parts.guard.forget()


def _saved(checkpoint: Path, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all that is wanted, one at a time, whoever wrote it."""
    in_parts = (checkpoint / OPTIMIZER).is_dir()
    reader = dcp.HuggingFaceStorageReader(str(checkpoint / OPTIMIZER if in_parts else checkpoint))
    metadata = reader.read_metadata().state_dict_metadata
    saved = {name for name in metadata if "::" in name}
    if saved != wanted:
        raise UsageError(
            f"checkpoint {checkpoint.name} holds optimizer state for other parameters",
            expected="the same model, method and optimizer as when the run started",
            fix="resume without changing them, or start a new run",
        )
    for name in sorted(wanted):
        facts: Any = metadata[name]
        one = {name: torch.empty(facts.size, dtype=facts.properties.dtype)}
        dcp.load(one, storage_reader=reader, no_dist=True)
        yield name, one[name]


def keep_company(judge: Judge, data: TokenData, parts: Parts) -> None:
    """Make `judge` compute its losses on all ranks, where no rank holds the weights. Every rank calls it."""
    asked: list[Callable[[], None]] = []

    def perform(kind: str, members: Sequence[int], action: Callable[[], None]) -> OutOfMemory | None:
        asked.append(action)
        parts.ranks.ask(kind, members=[int(member) for member in members])
        return None

    def duty(members: list[int]) -> None:
        action = asked.pop() if asked else lambda: loss_sum(judge, data, np.array(members))
        with judging(parts.loaded.model):
            together(parts, "evaluate", action)

    judge.perform = perform
    parts.ranks.duties["evaluate"] = duty


def together(parts: Parts, phase: str, action: Callable[[], object]) -> None:
    """Run what all ranks do at once, outside of steps. Raises EndedByMemoryError where memory runs out here."""
    failure = catch_oom(lambda: (action(), None)[1], parts.device, phase)
    if failure is not None:
        raise EndedByMemoryError(f"memory ran out in {phase} on rank {parts.ranks.rank}: {failure.text}")
