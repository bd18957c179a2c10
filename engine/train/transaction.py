"""One optimizer step as a transaction: it consumes its sequences and happens exactly once, or not at all.

`StepTransaction.run` plans micro-batches, accumulates their gradients, clips and steps. When an allocation fails, all
gradients of the step are dropped, random state and buffers go back, a remedy is chosen, and the same sequences are
redone. Nothing of the step is visible outside until it is over.

The loss is the sum over target tokens divided by their number in the whole step, counted before the first forward; so
any split into micro-batches, and over any number of ranks, gives the same gradient.

With several ranks a step is a row of stages. Each ends in a vote on whether it succeeded everywhere; a failure on one
rank costs every rank the attempt, and all go on with the same remedy. Micro-batches themselves need no other rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.batch import Batch, collate
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.oom import flush_autograd
from engine.errors import DivergedError
from engine.model.dropout import keyed, keyed_dropouts
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.parallel.ranks import ALONE, Ranks
from engine.parallel.reduce import GradientSum
from engine.parallel.split import deal
from engine.train.agreement import Knowledge, Struck, decide, deciding, exhausted, pool, tell_failure
from engine.train.costbudget import CostBudget
from engine.train.failure import ATTEMPTS, Failure, attempt, retried
from engine.train.holdings import Holdings, holdings
from engine.train.ladder import Remedy, Situation, Standing, choose
from engine.train.microbatch import Cost, MicroBatch, plan_micro_batches
from engine.train.optimizer import StepGuard
from engine.train.rollback import Rollback
from engine.train.scaler import LossScaler


@dataclass(frozen=True)
class StepOutcome:
    """One finished step. `loss` is the mean over its target tokens; `applied` is false when nothing was learned."""

    loss: float
    grad_norm: float
    tokens: int
    target_tokens: int
    micro_batches: int
    micro_batch_rows: int
    samples: int
    """Sequences that were learned from, or held nothing to learn."""
    data_wait_seconds: float
    applied: bool
    dearest: MicroBatch | None = None
    """This rank's dearest micro-batch."""
    overflowed: bool = False
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """What each rank says of the step; empty in a run of one process."""


@dataclass(frozen=True)
class Backoff:
    """One allocation failure and what was done about it."""

    step: int
    failure: Failure
    remedy: Remedy
    rows_before: int | None
    """Sequences in the micro-batch that was in flight; 0 when none was, None where nothing is cut."""
    rows_after: int | None
    """Most sequences at a time in the next attempt; 0 when there is none, None where nothing is cut."""
    attempt: int
    micro_batch: MicroBatch | None = None
    """What was in flight."""
    failed_rank: int = 0


class RolledBackTooFar(Exception):
    """An optimizer step failed half-way and there is no copy: the caller must reload the last checkpoint."""


@dataclass
class Parts:
    """What a step works on; made once per run."""

    device: Device
    loaded: LoadedModel
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    guard: StepGuard
    rollback: Rollback
    scaler: LossScaler
    data: TokenData
    cost: Cost
    budget: CostBudget
    ladder: list[str]
    pad_id: int
    seed: int
    max_grad_norm: float
    may_grow: bool
    measures: bool
    """The device's readings are exact (CUDA, metered), so the budget may learn from them."""
    report: Callable[[Backoff], None]
    advise: Callable[[Failure, MicroBatch | None], str]
    """What would have helped, in words; empty where nothing can be predicted."""
    static_bytes: int = 0
    standing: list[Standing] = field(default_factory=list)
    """Remedies in force, first to last."""
    ranks: Ranks = ALONE
    gradient_sum: GradientSum | None = None
    """Over all ranks; None in a run of one process."""

    @property
    def knowledge(self) -> Knowledge:
        """What all ranks must know alike."""
        return Knowledge(self.budget, self.loaded, self.loss, self.guard, self.standing)


Stage = Callable[[list[MicroBatch]], None]
"""A part of a step, over this rank's micro-batches."""


class StepTransaction:
    """Runs optimizer steps over `Parts`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.parameters = [parameter for _, parameter in parts.loaded.trainable()]
        self._dropouts = keyed_dropouts(parts.loaded.model)
        self._phase = "forward"
        self._current: MicroBatch | None = None
        self._data_wait_seconds = 0.0
        self._grad_norm = 0.0
        self._mean_loss = 0.0
        self._loss_here: torch.Tensor | None = None
        self._busy_seconds = 0.0
        self.failures = 0
        """Allocation failures that the last step outlived."""
        self.peak_bytes = 0
        """Most bytes allocated at once since the caller last set this to 0."""

    def run(self, step: int, samples: NDArray[np.int64]) -> StepOutcome:
        """Consume `samples` (indices into the data) in optimizer step `step`.

        Raises:
            DivergedError: the loss or the gradients are not finite; the step was not applied.
            MemoryExhaustedError: no remedy is left; the step was not applied.
            RolledBackTooFar: the optimizer step failed half-way without a copy to go back to.
        """
        if not self._targets(samples):
            return StepOutcome(0.0, 0.0, self._tokens(samples), 0, 0, 0, len(samples), 0.0, applied=False)
        self._data_wait_seconds, began = 0.0, time.perf_counter()
        mine = self._share(samples)
        plan = self._until_it_succeeds(
            step,
            mine,
            [
                lambda plan: self._accumulate(step, mine, plan, max(1, self._targets(samples))),
                *([self._meet] if self.parts.gradient_sum else []),
                lambda _plan: self._sum_and_clip(),
                lambda _plan: self._apply(),
            ],
        )
        overflowed = self._conclude(step)
        told = pool(self.parts.ranks, self.parts.budget, self._facts(plan, time.perf_counter() - began))
        return StepOutcome(
            loss=self._mean_loss,
            grad_norm=self._grad_norm,
            tokens=self._tokens(samples),
            target_tokens=self._targets(samples),
            micro_batches=max(each["micro_batches"] for each in told),
            micro_batch_rows=max(each["largest_micro_batch"] for each in told),
            samples=0 if overflowed else sum(each["samples"] for each in told),
            data_wait_seconds=self._data_wait_seconds,
            applied=not overflowed,
            dearest=plan[0] if plan else None,
            overflowed=overflowed,
            ranks=told if self.parts.ranks.size > 1 else [],
        )

    def probe(self, step: int, samples: NDArray[np.int64]) -> None:
        """Run the dearest micro-batch that `samples` allow, forward and backward, and drop its gradients.

        What would run out of memory hours later does so now, and the budget is learned before the first step.
        """
        mine = self._share(samples)

        def dearest(plan: list[MicroBatch]) -> None:
            self._accumulate(step, mine, plan[:1], max(1, self._targets(samples)))

        self._until_it_succeeds(step, mine, [dearest], "probe_")
        self._drop_gradients()
        pool(self.parts.ranks, self.parts.budget, {})

    def _facts(self, plan: list[MicroBatch], seconds: float) -> dict[str, Any]:
        """What this rank says of a finished step."""
        return {
            "micro_batches": len(plan),
            "largest_micro_batch": _most_rows(plan),
            "samples": sum(group.rows for group in plan),
            "busy_seconds": round(self._busy_seconds, 4),
            "step_seconds": round(seconds, 4),
            "peak_bytes": self.peak_bytes,
            "allocated_bytes": self.parts.device.memory().allocated_bytes,
        }

    def _until_it_succeeds(
        self, step: int, samples: NDArray[np.int64], stages: Sequence[Stage], phase_prefix: str = ""
    ) -> list[MicroBatch]:
        """Plan and run `stages` over this rank's `samples` until memory suffices on every rank; each failure costs its
        attempt and nothing else."""
        parts = self.parts
        tried: list[str] = []
        retried(lambda: parts.rollback.take(step), "snapshot", parts.device, self._reporter(step))
        plan = self._plan(samples)
        while True:
            struck = self._attempt(plan, stages, phase_prefix)
            self.failures = len(tried)
            if not struck:
                parts.guard.accept()
                return plan
            self._recover(step, struck, len(tried) + 1)
            remedy = self._choose(struck, tried, step)
            plan = self._plan(samples)
            tried.append(remedy.name)
            self._report(step, struck, remedy, _most_rows(plan), len(tried))

    def _plan(self, samples: NDArray[np.int64]) -> list[MicroBatch]:
        parts = self.parts
        return plan_micro_batches(parts.data.lengths[samples], parts.cost, parts.budget.budget_bytes)

    def _tokens(self, samples: NDArray[np.int64]) -> int:
        return int(self.parts.data.lengths[samples].sum())

    def _targets(self, samples: NDArray[np.int64]) -> int:
        return int(self.parts.data.target_counts[samples].sum())

    def _share(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the step's samples that this rank works on."""
        ranks = self.parts.ranks
        return samples[deal(self.parts.data.lengths[samples], ranks.size)[ranks.rank]]

    def _attempt(self, plan: list[MicroBatch], stages: Sequence[Stage], phase_prefix: str) -> list[Struck]:
        """Run the stages until one fails on any rank; returns who failed in it."""
        self._phase, self._current = "forward", None
        for stage in stages:
            failure = attempt(lambda stage=stage: stage(plan), self.parts.device, lambda: self._phase, self._stock)  # type: ignore[misc]
            if failure is not None:
                failure = replace(failure, phase=phase_prefix + failure.phase)
            struck = tell_failure(
                self.parts.ranks, failure, self._current, self.parts.device
            )
            if struck:
                return struck
        return []

    def _report(self, step: int, struck: Sequence[Struck], remedy: Remedy, rows_after: int, number: int) -> None:
        for each in struck:
            self.parts.report(
                Backoff(step, each.failure, remedy, each.rows, rows_after, number, each.micro_batch, each.rank)
            )

    def _accumulate(
        self, step: int, samples: NDArray[np.int64], plan: list[MicroBatch], target_tokens: int
    ) -> None:
        """The gradients of this rank's micro-batches; its share of the step's loss into `_mean_loss`."""
        began = time.perf_counter()
        total = torch.zeros((), dtype=torch.float32, device=self.parts.device.torch_device)
        for group in plan:
            total += self._micro_batch(step, samples, group, target_tokens)
        self._current = None
        if self.parts.ranks.size == 1:
            self._loss_here = total
        else:
            # What a kernel has to complain about must surface here, before the others are told that all went well.
            self._mean_loss = float(total)
        self._busy_seconds = time.perf_counter() - began

    def _meet(self, _plan: list[MicroBatch]) -> None:
        """Make the gradients of all ranks ready to be summed: room for those that only other ranks have."""
        self._phase = "reduce"
        assert self.parts.gradient_sum is not None
        missing = self.parts.gradient_sum.agree()
        self._mean_loss = sum(self.parts.ranks.tell(self._mean_loss))
        self.parts.gradient_sum.fill(missing)

    def _sum_and_clip(self) -> None:
        if self.parts.gradient_sum is not None:
            self.parts.gradient_sum.sum()
        self._phase = "clip"
        self.parts.device.reset_peak()
        self._grad_norm = self._clip()
        if self._loss_here is not None:
            self._mean_loss, self._loss_here = float(self._loss_here), None
        self.peak_bytes = max(self.peak_bytes, self.parts.device.memory().peak_bytes)

    def _apply(self) -> None:
        self._phase = "optimizer"
        if np.isfinite(self._mean_loss) and np.isfinite(self._grad_norm):
            self.parts.guard.step()
        self.peak_bytes = max(self.peak_bytes, self.parts.device.memory().peak_bytes)

    def _micro_batch(
        self, step: int, samples: NDArray[np.int64], group: MicroBatch, target_tokens: int
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch, adding to the gradients; returns its share of the step's loss."""
        parts = self.parts
        self._phase, self._current = "forward", group
        if parts.measures:
            parts.device.reset_peak()
        batch = self._load(samples[list(group.members)])
        with keyed(self._dropouts, seed=parts.seed, step=step, sample_ids=batch.sample_ids):
            loss = parts.loss(batch) / target_tokens
            self._phase = "backward"
            (loss * parts.scaler.scale).backward()
        # Elsewhere a reading shows nothing here: what was kept for backward is free again, and it costs a system call.
        peak_bytes = parts.device.memory().peak_bytes if parts.measures else 0
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        parts.budget.record_success(group.cost_bytes, max(0, peak_bytes - parts.static_bytes))
        return loss.detach()

    def _load(self, indices: NDArray[np.int64]) -> Batch:
        began = time.perf_counter()
        with self.parts.device.host_region():
            batch = collate(self.parts.data, indices, pad_id=self.parts.pad_id)
        batch = batch.moved(self.parts.device.upload)
        self._data_wait_seconds += time.perf_counter() - began
        return batch

    def _clip(self) -> float:
        """Undo the loss scale, clip, and return the norm before clipping. Waits for the device once."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.parts.scaler.scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.parts.scaler.scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.parts.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.parts.max_grad_norm, norm)
        return float(norm)

    def _conclude(self, step: int) -> bool:
        """Close the step: gradients dropped, the scaler told. True when an fp16 overflow skipped it."""
        parts = self.parts
        self._drop_gradients()
        if np.isfinite(self._mean_loss) and np.isfinite(self._grad_norm):
            parts.scaler.succeeded()
            return False
        parts.rollback.restore()
        if not np.isfinite(self._mean_loss):
            raise DivergedError(
                f"the loss of step {step} is {self._mean_loss}; the step was not applied",
                fix="lower train.learning_rate, or look at the samples of this step for broken values",
            )
        if not parts.scaler.can_back_off:
            raise DivergedError(
                f"the gradients of step {step} are not finite ({self._grad_norm}); the step was not applied",
                fix="lower train.learning_rate or train.max_grad_norm",
            )
        parts.scaler.overflowed()
        return True

    def _recover(self, step: int, struck: Sequence[Struck], attempts: int) -> None:
        """After a failure, outside its handler: nothing of the attempt stays alive and all state is as before it, on
        every rank. Memory may run out in here, too; each part of it may be repeated.

        Raises:
            RolledBackTooFar: the optimizer step cannot be undone, here or elsewhere.
        """
        if all(self.parts.ranks.tell(self._recover_here(step, attempts))):
            return
        self._report(step, struck, Remedy("reload"), 0, attempts)
        raise RolledBackTooFar

    def _recover_here(self, step: int, attempts: int) -> bool:
        for _ in range(ATTEMPTS):
            undone: list[bool] = []
            again = attempt(lambda undone=undone: undone.append(self._put_back()), self.parts.device, lambda: "recover")  # type: ignore[misc]
            if again is None:
                return undone[0]
            self._reporter(step)(again, "retry", attempts)
        return False

    def _put_back(self) -> bool:
        self._drop_gradients()
        flush_autograd()
        self.parts.device.release_cached()
        if not self.parts.guard.restore():
            return False
        self.parts.rollback.restore()
        return True

    def _drop_gradients(self) -> None:
        self._loss_here = None
        for parameter in self.parameters:
            parameter.grad = None

    def _reporter(self, step: int) -> Callable[[Failure, str, int], None]:
        return lambda failure, remedy, number: self.parts.report(Backoff(step, failure, Remedy(remedy), 0, 0, number))

    def _stock(self) -> Holdings:
        return holdings(self.parts.loaded, self.parts.guard, self.parts.device)

    def _choose(self, struck: Sequence[Struck], tried: list[str], step: int) -> Remedy:
        """What is done about the failure, by the rank that decides; the others follow it."""
        parts, decider = self.parts, deciding(struck)
        remedy = None
        if decider.rank == parts.ranks.rank:
            now = Situation(
                parts.device, parts.loaded, parts.loss, parts.budget, decider.failure, decider.micro_batch,
                parts.static_bytes, parts.guard, parts.data, tried, parts.standing,
            )  # fmt: skip
            remedy = choose(parts.ladder, now)
            parts.static_bytes, parts.data = now.static_bytes, now.data
        remedy = decide(parts.ranks, parts.knowledge, decider.rank, remedy)
        if remedy is not None and remedy.name == "optimizer_offload":
            parts.device.release_cached()
            parts.static_bytes = parts.device.memory().allocated_bytes
        if remedy is not None and remedy.name == "max_length":
            parts.data = parts.data.shortened(remedy.after)
        if remedy is None:
            self._report(step, struck, Remedy("give_up"), 0, len(tried) + 1)
            advice = parts.advise(decider.failure, decider.micro_batch)
            raise exhausted(decider, advice)
        return remedy


def _most_rows(plan: Sequence[MicroBatch]) -> int:
    return max((group.rows for group in plan), default=0)
