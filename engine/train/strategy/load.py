"""Chooses the strategy of a run and loads the model as that strategy needs it.

Try: `tunedeck train -p demo-2 -r demo --set parallel.strategy=sharded --set parallel.sequence=2`
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from engine.device.base import Device
from engine.device.catch_oom import retry_on_oom
from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.model.load import LoadedModel, load_model
from engine.model.loss import LossFunction, loss_of
from engine.spec.schema.run import RunSpec
from engine.train.recovery.records import RecoveredOom
from engine.train.strategy.base import SingleDevice, Strategy
from engine.train.strategy.load_sharded import load_sharded
from engine.train.strategy.replicated import Replicated
from engine.train.strategy.sequence_parallel import SequenceParallel


def load_strategy(
    spec: RunSpec,
    device: Device,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    report: Callable[[RecoveredOom], None],
    report_retry: Callable[[OutOfMemory, str, int], None],
) -> Strategy:
    """Load the model and its loss with the strategy that the profile asks for; returns the strategy. All ranks call
    this.

    `report` is called with allocation failures that all ranks know of, `report_retry` with failures that only this rank
    knows of, as (failure, remedy, number of the attempt).

    Raises:
        MemoryExhaustedError: memory ran out in every attempt.
        UsageError, EnvironmentProblem: see `load_model`, `load_sharded` and `SequenceParallel`.
        LostRankError: another rank could not go on.
    """
    parallel = spec.profile.parallel
    strategy: Strategy
    if ranks.size > 1 and parallel.strategy == "sharded":
        strategy = load_sharded(spec, device, tokenizer, ranks, report, report_retry)
    else:
        loaded, loss = retry_on_oom(lambda: _model_and_loss(spec, device, tokenizer), "load", device, report_retry)
        if ranks.size > 1:
            strategy = Replicated(loaded, loss, ranks, device, report_retry)
        else:
            strategy = SingleDevice(loaded, loss, ranks)
    return SequenceParallel(strategy, spec) if parallel.sequence > 1 else strategy


def _model_and_loss(
    spec: RunSpec, device: Device, tokenizer: PreTrainedTokenizerBase
) -> tuple[LoadedModel, LossFunction]:
    loaded = load_model(spec, device, tokenizer)
    return loaded, loss_of(spec.recipe, loaded, device)
