"""One optimizer step as a transaction: it consumes its sequences and happens exactly once, or not at all.

`StepTransaction.run` plans micro-batches, accumulates their gradients (gradient accumulation), clips and steps. When an
allocation fails, all gradients of the step are dropped, random state and buffers go back, a remedy is chosen, and the
same sequences are redone.

A step is a sequence of stages (forward and backward, summing gradients, …). With several ranks each stage ends in a
vote on whether it succeeded on all of them; a failure on one ends the attempt of all, and all go on with the same
remedy. How ranks share the work is up to the strategy (`engine.train.strategy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batching.micro_batches import MicroBatch, plan_micro_batches
from engine.budget.predict.shapes import MicroBatchShape
from engine.device.oom import ATTEMPTS, catch_oom, free_failed_graph, retry_on_oom
from engine.distributed.votes import RepeatWithVotesError
from engine.errors import DivergedError
from engine.train.step.budget_growth import CeilingWatch
from engine.train.step.computation import StepComputation
from engine.train.step.failures import (
    RecoveredOom,
    all_gather_step_stats,
    gather_failures,
    memory_exhausted,
    smallest_failed,
)
from engine.train.step.ladder import back_off, current_settings
from engine.train.step.memory_breakdown import memory_breakdown
from engine.train.step.objective import StepTokens, plan_pairs

if TYPE_CHECKING:
    from engine.device.oom import MemoryBreakdown, OutOfMemory
    from engine.train.step.context import StepContext
    from engine.train.step.failures import (
        RankOom,
    )


@dataclass(frozen=True)
class StepOutcome:
    """One finished step. `loss` is the mean over target tokens; `applied` is false if the weights were not changed."""

    loss: float
    grad_norm: float
    """Of the gradients of all ranks, before clipping."""
    tokens: int
    """On all ranks, without padding."""
    target_tokens: int
    """Those that count for the loss."""
    micro_batches: int
    """Of the rank that had most."""
    micro_batch_rows: int
    """Sequences of the largest micro-batch on any rank."""
    samples: int
    """Sequences that were trained on, or had no target tokens; 0 if an fp16 overflow skipped the step."""
    data_wait_seconds: float
    """Of this rank."""
    applied: bool
    ran: tuple[MicroBatchShape, ...] = ()
    """This rank's micro-batches, in order."""
    overflowed: bool = False
    auxiliary_loss: float | None = None
    """Of a mixture of experts, without its weight; None where none is computed."""
    choices_LE: NDArray[np.int64] | None = None
    """How many tokens chose each expert of each layer, over all ranks; None if the use of experts is not watched."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the objective, by their names in step events; means over the step."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Each rank's measurements of the step; empty in a run of one process."""


class TimedPass(NamedTuple):
    tokens: int
    """Of the micro-batch on this rank, padding included; 0 if the samples were assigned to other ranks."""
    seconds: float
    """Until the device had finished, minus the time spent waiting for data."""


class CheckpointReloadRequired(Exception):
    """An optimizer step failed half-way and cannot be undone: the caller must reload the last checkpoint."""


class _StageFailedError(Exception):
    """Memory ran out on this rank in a stage of the step, and what the stage held is free again."""


Stage = Callable[[list[MicroBatch]], None]
"""A part of a step; its argument is this rank's plan of micro-batches."""


Tried = list[tuple[int, str]]
"""For each failed attempt at a step: the rank whose failure was acted upon, and the remedy."""


class StepTransaction:
    """Runs optimizer steps: each is applied exactly once, or an exception is raised and the weights are as before it
    (after CheckpointReloadRequired: once the checkpoint is loaded)."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.work = StepComputation(context)
        self.ceiling_watch = CeilingWatch(context)
        self.failures = 0
        """Allocation failures that the last step recovered from."""

    def run(self, step: int, samples: NDArray[np.int64]) -> StepOutcome:
        """Consume `samples` (indices into the data) in optimizer step `step`.

        DivergedError: the loss or the gradients are not finite. MemoryExhaustedError: no remedy is left. In both cases
        the step was not applied. CheckpointReloadRequired: the optimizer step failed half-way without a copy to go back
        to.
        """
        if not self._targets(samples):
            return StepOutcome(0.0, 0.0, self._tokens(samples), 0, 0, 0, len(samples), 0.0, applied=False)
        waited_before, began = self.work.data_wait_seconds, time.perf_counter()
        own_samples = self._share(samples)
        plan = self._run_with_recovery(
            step,
            own_samples,
            [
                *self._measuring(step, own_samples),
                lambda plan: self.work.accumulate(step, own_samples, plan, self._step_tokens(samples)),
                self.work.prepare_gradients,
                self.work.sync_and_clip,
                lambda _: self.work.apply(step),
            ],
        )
        self.ceiling_watch.record_step()
        overflowed = self._finish_step(step)
        stats = self._gather_stats(self._step_stats(plan, time.perf_counter() - began))
        choices_LE, objective = self.work.choices_LE, self.context.objective
        ranks_per_sample = self.context.strategy.ranks_per_sample
        return StepOutcome(
            loss=self.work.mean_loss,
            grad_norm=self.work.grad_norm,
            tokens=self._tokens(samples),
            target_tokens=self._targets(samples),
            micro_batches=max(each["micro_batches"] for each in stats),
            micro_batch_rows=max(each["largest_micro_batch"] for each in stats),
            samples=0 if overflowed else sum(each["samples"] for each in stats[::ranks_per_sample]),
            data_wait_seconds=self.work.data_wait_seconds - waited_before,
            applied=not overflowed,
            ran=self._shapes(plan, own_samples),
            overflowed=overflowed,
            auxiliary_loss=self.work.auxiliary_loss,
            choices_LE=None if choices_LE is None else self.context.ranks.sum_of_counts(choices_LE),
            metrics={} if objective is None else objective.metrics(self.work.metrics, samples),
            ranks=stats if self.context.ranks.size > 1 else [],
        )

    def _measuring(self, step: int, own_samples: NDArray[np.int64]) -> list[Stage]:
        """The stage before gradients of an objective that measures other sequences over the whole step."""
        objective = self.context.objective
        if objective is None or objective.measured_first is None:
            return []
        return [lambda _: self.work.measure_first(step, own_samples, objective, objective.measured_first)]

    def probe(self, step: int, samples: NDArray[np.int64]) -> TimedPass:
        """Run the most expensive micro-batch of `samples` and drop its gradients: what would run out of memory hours
        later does so now, and the budget is learned before the first step."""
        own_samples = self._share(samples)

        def costliest(plan: list[MicroBatch]) -> None:
            self.work.accumulate(step, own_samples, plan[:1], self._step_tokens(samples))

        waited_before = self.work.data_wait_seconds
        plan = self._run_with_recovery(step, own_samples, [costliest], "probe_")
        self.context.strategy.drop_gradients()
        self._gather_stats({})
        waited = self.work.data_wait_seconds - waited_before
        return TimedPass(plan[0].rows * plan[0].length if plan else 0, self.work.busy_seconds - waited)

    def _gather_stats(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's `facts` (JSON), by rank. Rank 0 also records the failures that ranks recovered from alone."""
        recoveries = self.context.local_recoveries
        stats = {**facts, "local_recoveries": recoveries.take()}
        gathered = all_gather_step_stats(self.context.ranks, self.context.budget, stats)
        recoveries.record([each.pop("local_recoveries") for each in gathered])
        return gathered

    def _step_stats(self, plan: list[MicroBatch], seconds: float) -> dict[str, Any]:
        """For the journal: micro-batches and sequences, busy and total time in seconds, peak and allocated bytes."""
        return {
            "micro_batches": sum(bool(group.members) for group in plan),
            "largest_micro_batch": _most_rows(plan),
            "samples": sum(group.rows for group in plan),
            "busy_seconds": round(self.work.busy_seconds, 4),
            "step_seconds": round(seconds, 4),
            "peak_bytes": self.work.peak_bytes,
            "allocated_bytes": self.context.device.memory().allocated_bytes,
        }

    def _run_with_recovery(
        self, step: int, samples: NDArray[np.int64], stages: Sequence[Stage], phase_prefix: str = ""
    ) -> list[MicroBatch]:
        """Cut `samples` into micro-batches and run `stages`, again with a remedy after each out-of-memory error, until
        all ranks succeed; returns the last attempt's micro-batches. `phase_prefix` precedes the phase's name in
        failures."""
        context = self.context
        tried: Tried = []
        retry_on_oom(lambda: context.rollback.take(step), "snapshot", context.device, self._reporter(step))
        plan = self._plan(samples)
        while True:
            failed = self._attempt(step, plan, stages, phase_prefix)
            if failed is None:
                self._recover(step, [], len(tried) + 1)
                plan = self._plan(samples)
                continue
            self.failures = len(tried)
            if not failed:
                context.guard.accept()
                return plan
            self.ceiling_watch.record_failure()
            self._recover(step, failed, len(tried) + 1)
            before = current_settings(context)
            remedy = self._back_off(step, failed, tried)
            plan = self._plan(samples)
            tried.append((smallest_failed(failed).rank, remedy))
            after = current_settings(context)
            change = {"before": before.value_of(remedy), "after": after.value_of(remedy)}
            self._report(step, failed, remedy, len(tried), rows_after=_most_rows(plan), **change)

    def _plan(self, samples: NDArray[np.int64]) -> list[MicroBatch]:
        context = self.context
        budget, lengths = context.budget, context.data.lengths[samples]
        patches = None if context.data.patches is None else context.data.patches[samples]
        plan_of = plan_pairs if self._unit == 2 else plan_micro_batches
        plan = plan_of(lengths, context.cost, budget.budget_bytes, budget.floor_tokens, patches, budget.launch_tokens)
        return context.strategy.begin_attempt(plan, far_from_ceiling=self.ceiling_watch.is_far(plan))

    def _shapes(self, plan: list[MicroBatch], samples: NDArray[np.int64]) -> tuple[MicroBatchShape, ...]:
        """(rows, length, target tokens) of this rank's micro-batches, without dummy ones."""
        return tuple(
            MicroBatchShape(
                group.rows,
                group.length,
                self._targets(samples[list(group.members)]),
                number > 0,
                self._patches(samples[list(group.members)]),
            )
            for number, group in enumerate(plan)
            if group.members
        )

    def _tokens(self, samples: NDArray[np.int64]) -> int:
        return int(self.context.data.lengths[samples].sum())

    def _patches(self, samples: NDArray[np.int64]) -> int | None:
        """Of all images; None for data without images."""
        patches = self.context.data.patches
        return None if patches is None else int(patches[samples].sum())

    def _targets(self, samples: NDArray[np.int64]) -> int:
        return int(self.context.data.target_counts[samples].sum())

    @property
    def _unit(self) -> int:
        """Sequences of a sample."""
        return 1 if self.context.objective is None else self.context.objective.unit

    def _step_tokens(self, samples: NDArray[np.int64]) -> StepTokens:
        tokens = max(1, self._tokens(samples))
        if self.context.objective is None:
            return StepTokens(max(1, self._targets(samples)), tokens)
        chosen = samples[self.context.data.desirable[samples]]
        return StepTokens(max(1, len(samples) // self._unit), tokens, max(1, self._targets(chosen)))

    def _share(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """This rank's samples. Both sequences of a pair go to the same rank."""
        rows = samples.reshape(-1, self._unit)
        lengths = self.context.data.lengths[samples].reshape(rows.shape).sum(1)
        return rows[self.context.strategy.assign_samples(lengths)].ravel()

    def _attempt(
        self, step: int, plan: list[MicroBatch], stages: Sequence[Stage], phase_prefix: str
    ) -> list[RankOom] | None:
        """Run `stages` until one fails on any rank; returns that stage's failures on all ranks, empty if all succeeded,
        or None if the attempt must be repeated although no rank failed (`Strategy.run_stage`)."""
        self.work.begin()
        for stage in stages:
            try:
                failure = self._run_stage(step, partial(stage, plan), phase_prefix)
            except RepeatWithVotesError:
                return None
            failed = gather_failures(self.context.ranks, failure, self.work.in_flight, self.context.device)
            if failed:
                return failed
        return []

    def _run_stage(self, step: int, stage: Callable[[], None], phase_prefix: str) -> OutOfMemory | None:
        """This rank's failure. Raises RepeatWithVotesError, see `Strategy.run_stage`."""
        failures: list[OutOfMemory] = []

        def caught() -> None:
            # Nothing of the failed attempt is held when this rank tells the others, and may have to join them.
            failure = catch_oom(stage, self.context.device, "", self._memory_breakdown)
            if failure is not None:
                failures.append(replace(failure, phase=phase_prefix + self.work.phase))
                raise _StageFailedError

        try:
            self.context.strategy.run_stage(caught)
        except _StageFailedError:
            return failures[0]
        except RepeatWithVotesError:
            for failure in failures:
                self._reporter(step)(failure, "retry", 1)
            raise
        return None

    def _report(
        self, step: int, failed: Sequence[RankOom], remedy: str, attempt: int, *, rows_after: int = 0, **change: Any
    ) -> None:
        for oom in failed:
            self.context.report(RecoveredOom(step, oom, remedy, attempt, rows_after, **change))

    def _finish_step(self, step: int) -> bool:
        """Drop the gradients and update the loss scale; returns whether an fp16 overflow skipped the step.
        DivergedError: the loss is not finite, or the gradients are not and the loss scale cannot be lowered."""
        context = self.context
        self.context.strategy.drop_gradients()
        if self.work.is_finite:
            context.scaler.succeeded()
            return False
        context.rollback.restore()
        if not np.isfinite(self.work.mean_loss):
            raise DivergedError(
                f"the loss of step {step} is {self.work.mean_loss}; the step was not applied",
                fix="lower train.learning_rate, or check the samples of this step for invalid values",
            )
        if not context.scaler.can_back_off:
            raise DivergedError(
                f"the gradients of step {step} are not finite ({self.work.grad_norm}); the step was not applied",
                fix="lower train.learning_rate or train.max_grad_norm",
            )
        context.scaler.overflowed()
        return True

    def _recover(self, step: int, failed: Sequence[RankOom], attempts: int) -> None:
        """On every rank, free the failed attempt and restore all state; repeated if memory runs out here as well.
        Called outside the exception handler, which would keep tensors. CheckpointReloadRequired: the optimizer step
        cannot be undone on some rank."""
        if all(self.context.ranks.all_gather_object(self._recover_here(step, attempts))):
            return
        self._report(step, failed, "reload", attempts)
        raise CheckpointReloadRequired

    def _recover_here(self, step: int, attempts: int) -> bool:
        for _ in range(ATTEMPTS):
            undone: list[bool] = []
            again = catch_oom(partial(self._undo, undone), self.context.device, "recover")
            if again is None:
                return undone[0]
            self._reporter(step)(again, "retry", attempts)
        return False

    def _undo(self, undone: list[bool]) -> None:
        self.context.strategy.drop_gradients()
        self.context.loss.offload.settle()
        free_failed_graph(self.context.device)
        self.context.strategy.recover()
        self.context.device.release_cached()
        undone.append(self.context.guard.restore())
        if undone[-1]:
            self.context.rollback.restore()

    def _reporter(self, step: int) -> Callable[[OutOfMemory, str, int], None]:
        return partial(self.context.local_recoveries.note, step=step)

    def _memory_breakdown(self) -> MemoryBreakdown:
        return memory_breakdown(self.context.loaded, self.context.guard, self.context.device)

    def _back_off(self, step: int, failed: Sequence[RankOom], tried: Tried) -> str:
        """Apply the remedy chosen by the rank with the cheapest failed micro-batch. MemoryExhaustedError: none left."""
        context, smallest = self.context, smallest_failed(failed)
        # A passing shortage on one device says nothing about another, so each rank has retries of its own.
        remedy = back_off(context, smallest, [name for rank, name in tried if rank == smallest.rank])
        if remedy is None:
            self._report(step, failed, "give_up", len(tried) + 1)
            raise memory_exhausted(smallest, context.suggest_fixes(smallest))
        return remedy


def _most_rows(plan: Sequence[MicroBatch]) -> int:
    return max((group.rows for group in plan), default=0)
