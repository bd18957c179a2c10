"""Chooses the strategy of a run and loads the model as it needs it; and the strategy "replicated": every rank has the
whole model, gradients are summed over ranks. Its micro-batches contain no collectives, so ranks may run different
numbers of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerBase

from engine.budget.predict.shards import require_shards
from engine.config.schema.run import RunSpec
from engine.device.base import Device
from engine.device.oom import ATTEMPTS, OutOfMemory, catch_oom, retry_on_oom
from engine.distributed.gradient_all_reduce import GradientAllReduce, broadcast_tensors
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel, groups_of
from engine.distributed.sharded_files import WeightFiles, WeightFiller
from engine.distributed.votes import VotedGroup
from engine.evaluate.context import EvaluationContext, Questions
from engine.model.head import find_head
from engine.model.load import LoadedModel, load_model
from engine.model.loaded import plain_name
from engine.model.loss import HeadWithLoss, LossFunction, ModelWithLoss, loss_of
from engine.model.verify import require_causality
from engine.train.step.failures import RecoveredOom, gather_failures, memory_exhausted
from engine.train.step.interface import Strategy
from engine.train.strategy.checkpoint_storage import WholeWeightsStorage
from engine.train.strategy.evaluation import share_evaluation
from engine.train.strategy.sequence_parallel import SequenceParallel
from engine.train.strategy.sharded import Sharded

HOST, NOWHERE = torch.device("cpu"), torch.device("meta")

Reported = Callable[[RecoveredOom], None]
"""Called with an allocation failure that all ranks know of."""
Retried = Callable[[OutOfMemory, str, int], None]
"""Called with a failure that only this rank knows of, its remedy and the number of the attempt."""


class SingleDevice(Strategy):
    """One process, which holds the whole model and trains on every sample."""

    def prepare_gradients(self, losses: list[float]) -> list[float]:
        return losses

    def sync_gradients(self) -> None:
        return

    def checkpoint_storage(self, optimizer: torch.optim.Optimizer) -> WholeWeightsStorage:
        return WholeWeightsStorage(self.loaded, optimizer)


class Replicated(Strategy):
    """Every rank has the whole model and its optimizer. Micro-batches contain no collectives, so ranks may run
    different numbers of them."""

    def __init__(
        self,
        loaded: LoadedModel,
        loss: LossFunction,
        ranks: Ranks,
        device: Device,
        report_retry: Retried,
    ) -> None:
        """Copy rank 0's trainable weights and buffers to every rank, and allocate the buffer in which gradients are
        summed. MemoryExhaustedError: there is no room for it. LostRankError: another rank is gone."""
        super().__init__(loaded, loss, ranks)
        broadcast_tensors([*(parameter.data for parameter in self.parameters), *loaded.model.buffers()])
        self._all_reduce = retry_on_oom(lambda: GradientAllReduce(self.parameters), "load", device, report_retry)

    def prepare_gradients(self, losses: list[float]) -> list[float]:
        missing = self._all_reduce.agree()
        totals = self.ranks.sums(losses)
        self._all_reduce.fill(missing)
        return totals

    def sync_gradients(self) -> None:
        self._all_reduce.sum()

    def checkpoint_storage(self, optimizer: torch.optim.Optimizer) -> WholeWeightsStorage:
        return WholeWeightsStorage(self.loaded, optimizer)

    def join_evaluation(self, context: EvaluationContext, data: Questions, name: str = "") -> EvaluationContext:
        return share_evaluation(context, data, self.ranks, name=name)


def load_strategy(
    spec: RunSpec, device: Device, tokenizer: PreTrainedTokenizerBase, ranks: Ranks, report: Reported, retried: Retried
) -> Strategy:
    """Load the model and its loss with the strategy that the profile asks for. All ranks call this.

    Raises:
        MemoryExhaustedError: memory ran out in every attempt.
        UsageError, EnvironmentProblem: see `load_model`, `load_sharded` and `SequenceParallel`.
        LostRankError: another rank could not go on.
    """
    parallel = spec.profile.parallel
    strategy: Strategy
    if ranks.size > 1 and parallel.strategy == "sharded":
        strategy = load_sharded(spec, device, tokenizer, ranks, report, retried)
    else:
        loaded, loss = retry_on_oom(lambda: _model_and_loss(spec, device, tokenizer), "load", device, retried)
        if ranks.size > 1:
            strategy = Replicated(loaded, loss, ranks, device, retried)
        else:
            strategy = SingleDevice(loaded, loss, ranks)
    return SequenceParallel(strategy, spec) if parallel.sequence > 1 else strategy


def _model_and_loss(
    spec: RunSpec, device: Device, tokenizer: PreTrainedTokenizerBase
) -> tuple[LoadedModel, LossFunction]:
    loaded = load_model(spec, device, tokenizer)
    loss = loss_of(spec.recipe, loaded, device)
    require_causality(loaded)  # sharded weights cannot be run before the first step
    return loaded, loss


def load_sharded(
    spec: RunSpec, device: Device, tokenizer: PreTrainedTokenizerBase, ranks: Ranks, report: Reported, retried: Retried
) -> Sharded:
    """Load the model in shards, with its loss. If memory runs out on one rank, all ranks start again, a few times.

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
        loaded = _built(spec, device, tokenizer, ranks, retried)
        files = WeightFiles(ranks, loaded.model.parameters())

        def spread(loaded: LoadedModel = loaded, files: WeightFiles = files) -> None:
            model, loss = _spread(spec, device, loaded, ranks, voted_group, files)
            made.append(Sharded(loaded, loss, ranks, model, device, retried))

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
    spec: RunSpec, device: Device, tokenizer: PreTrainedTokenizerBase, ranks: Ranks, retried: Retried
) -> LoadedModel:
    """The whole model in host memory on rank 0; the same model of meta tensors on the other ranks."""
    read: list[LoadedModel] = []

    def read_first() -> None:
        with device.host_region():
            read.append(retry_on_oom(lambda: load_model(spec, device, tokenizer, HOST), "load", device, retried))

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
    drops = spec.profile.parallel.shard == "parameters"
    sharded = ShardedModel(
        root, loaded.model, groups, mesh, voted_group, head=head, drops_weights=drops, fill=fill,
        host_region=device.host_region,
    )  # fmt: skip
    loaded.loading = fill.summary()
    device.adopt(loaded.model.buffers())
    loaded.shards = {plain_name(name): part for name, part in sharded.local_parameters().items()}
    loaded.first_elements = {plain_name(name): first for name, first in sharded.first_elements().items()}
    with sharded.forward_only(gathers_head=True):
        loss = loss_of(spec.recipe, loaded, device)
    root.use(loss)
    return sharded, loss
