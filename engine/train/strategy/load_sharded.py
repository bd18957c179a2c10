"""Loads the model of a run whose ranks each hold a part of the weights.

Rank 0 loads or initialises the model in its host memory; the other ranks build the same model from meta tensors. Group
by group, each rank then reads its own rows of the weights that are in files, and receives the others from rank 0.

Try: `tunedeck train -p demo-2 -r demo --set parallel.strategy=sharded`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerBase

from engine.budget.predict.shards import require_shards
from engine.device.base import Device
from engine.device.catch_oom import ATTEMPTS, catch_oom, retry_on_oom
from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel, groups_of
from engine.distributed.voted_group import VotedGroup
from engine.distributed.weight_broadcast import WeightFiller
from engine.distributed.weight_files import WeightFiles
from engine.model.head import find_head
from engine.model.load import LoadedModel, load_model
from engine.model.loaded import plain_name
from engine.model.loss import LossFunction, loss_of
from engine.model.model_with_loss import HeadWithLoss, ModelWithLoss
from engine.spec.schema.run import RunSpec
from engine.train.recovery.consensus import gather_failures, memory_exhausted
from engine.train.recovery.records import RecoveredOom
from engine.train.strategy.sharded import Sharded

HOST, NOWHERE = torch.device("cpu"), torch.device("meta")


def load_sharded(
    spec: RunSpec,
    device: Device,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    report: Callable[[RecoveredOom], None],
    report_retry: Callable[[OutOfMemory, str, int], None],
) -> Sharded:
    """Load the model in shards, with its loss. If memory runs out on one rank, all ranks start again, at most a few
    times.

    `report` is called with failures that all ranks know of, `report_retry` with failures that only this rank knows of,
    as (failure, remedy, number of the attempt).

    Raises:
        MemoryExhaustedError: memory ran out each time.
        UsageError, EnvironmentProblem: see `load_model`; raised on rank 0.
        UsageError: a file of weights is damaged; raised on the rank that reads it.
        EnvironmentProblem: torch is too old for shards; raised on all ranks.
        LostRankError: another rank could not go on.
    """
    require_shards()
    voted_group = ranks.voted_group()
    made: list[Sharded] = []
    for number in range(1, ATTEMPTS + 1):
        loaded = _built(spec, device, tokenizer, ranks, report_retry)

        files = WeightFiles(ranks, loaded.model.parameters())

        def spread(loaded: LoadedModel = loaded, files: WeightFiles = files) -> None:
            model, loss = _spread(spec, device, loaded, ranks, voted_group, files)
            made.append(Sharded(loaded, loss, ranks, model, device, report_retry))

        failure = catch_oom(partial(voted_group.run_together, spread), device, "load")
        failed = gather_failures(ranks, failure, None, device)
        if not failed:
            return made[0]
        made.clear()
        del loaded, spread
        device.release_cached()
        for oom in failed:
            report(RecoveredOom(0, oom, "retry" if number < ATTEMPTS else "give_up", number, rows_after=0))
    raise memory_exhausted(failed[0], "a profile with more memory or more devices")


def _built(
    spec: RunSpec,
    device: Device,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    report_retry: Callable[[OutOfMemory, str, int], None],
) -> LoadedModel:
    """Load the whole model into host memory on rank 0; build the same model from meta tensors on the other ranks."""
    read: list[LoadedModel] = []

    def read_first() -> None:
        with device.host_region():
            read.append(retry_on_oom(lambda: load_model(spec, device, tokenizer, HOST), "load", device, report_retry))

    ranks.run_on_rank0(read_first)
    return read[0] if read else load_model(spec, device, tokenizer, NOWHERE)


def _spread(
    spec: RunSpec, device: Device, loaded: LoadedModel, ranks: Ranks, voted_group: VotedGroup, files: WeightFiles
) -> tuple[ShardedModel, LossFunction]:
    head = HeadWithLoss(find_head(loaded.base).project)
    groups = groups_of(loaded.model, loaded.base.get_input_embeddings(), head, loaded.base._no_split_modules or ())
    with device.host_region():
        mesh = init_device_mesh(device.torch_device.type, (ranks.size,))
    root, fill = ModelWithLoss(loaded.model, head), WeightFiller(ranks, voted_group, device, files)
    sharded = ShardedModel(
        root,
        loaded.model,
        groups,
        mesh,
        voted_group,
        head=head,
        drops_weights=spec.profile.parallel.shard == "parameters",
        fill=fill,
        host_region=device.host_region,
    )
    loaded.loading = fill.summary()
    device.adopt(loaded.model.buffers())
    loaded.shards = {plain_name(name): part for name, part in sharded.local_parameters().items()}
    loaded.first_elements = {plain_name(name): first for name, first in sharded.first_elements().items()}
    with sharded.forward_only(gathers_head=True):
        loss = loss_of(spec.recipe, loaded, device)
    root.use(loss)
    return sharded, loss
