"""One optimizer step as a transaction: it consumes its sequences and happens exactly once, or not at all.

`StepTransaction.run` plans micro-batches, accumulates their gradients, clips and steps. When an allocation fails, all
gradients of the step are dropped, random state and buffers go back, a remedy is chosen, and the same sequences are
redone. Nothing of the step is visible outside until it is over.

The loss is the sum over target tokens divided by their number in the whole step, counted before the first forward; so
any split into micro-batches gives the same gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.batch import Batch, collate
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.oom import flush_autograd
from engine.errors import DivergedError, MemoryExhaustedError
from engine.model.dropout import keyed
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
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
    overflowed: bool = False


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


class StepTransaction:
    """Runs optimizer steps over `Parts`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.parameters = [parameter for _, parameter in parts.loaded.trainable()]
        self._phase = "forward"
        self._current: MicroBatch | None = None
        self._data_wait_seconds = 0.0
        self._grad_norm = 0.0
        self._mean_loss = 0.0
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
        self._data_wait_seconds = 0.0
        plan = self._until_it_succeeds(step, samples, lambda plan: self._accumulate_and_apply(step, samples, plan))
        overflowed = self._conclude(step)
        return StepOutcome(
            loss=self._mean_loss,
            grad_norm=self._grad_norm,
            tokens=self._tokens(samples),
            target_tokens=self._targets(samples),
            micro_batches=len(plan),
            micro_batch_rows=max(group.rows for group in plan),
            samples=0 if overflowed else sum(group.rows for group in plan),
            data_wait_seconds=self._data_wait_seconds,
            applied=not overflowed,
            overflowed=overflowed,
        )

    def probe(self, step: int, samples: NDArray[np.int64]) -> None:
        """Run the dearest micro-batch that `samples` allow, forward and backward, and drop its gradients.

        What would run out of memory hours later does so now, and the budget is learned before the first step.
        """

        def dearest(plan: list[MicroBatch]) -> None:
            self._micro_batch(step, samples, plan[0], max(1, self._targets(samples)))

        self._until_it_succeeds(step, samples, dearest, "probe_")
        self._drop_gradients()

    def _until_it_succeeds(
        self,
        step: int,
        samples: NDArray[np.int64],
        action: Callable[[list[MicroBatch]], None],
        phase_prefix: str = "",
    ) -> list[MicroBatch]:
        """Plan and run `action` until memory suffices; each failure costs its attempt and nothing else."""
        parts = self.parts
        tried: list[str] = []
        retried(lambda: parts.rollback.take(step), "snapshot", parts.device, self._reporter(step))
        plan = self._plan(samples)
        while True:
            self._phase, self._current = "forward", None
            failure = attempt(lambda plan=plan: action(plan), parts.device, lambda: self._phase, self._stock)  # type: ignore[misc]
            self.failures = len(tried)
            if failure is None:
                return plan
            failure = replace(failure, phase=phase_prefix + failure.phase)
            self._recover(step, failure, len(tried) + 1)
            remedy, rows = self._choose(failure, tried, step), self._rows_in_flight()
            plan = self._plan(samples)
            tried.append(remedy.name)
            most = max(group.rows for group in plan)
            parts.report(Backoff(step, failure, remedy, rows, most, len(tried), self._current))

    def _plan(self, samples: NDArray[np.int64]) -> list[MicroBatch]:
        parts = self.parts
        return plan_micro_batches(parts.data.lengths[samples], parts.cost, parts.budget.budget_bytes)

    def _tokens(self, samples: NDArray[np.int64]) -> int:
        return int(self.parts.data.lengths[samples].sum())

    def _targets(self, samples: NDArray[np.int64]) -> int:
        return int(self.parts.data.target_counts[samples].sum())

    def _accumulate_and_apply(self, step: int, samples: NDArray[np.int64], plan: list[MicroBatch]) -> None:
        device, target_tokens = self.parts.device, max(1, self._targets(samples))
        total = torch.zeros((), dtype=torch.float32, device=device.torch_device)
        for group in plan:
            total += self._micro_batch(step, samples, group, target_tokens)
        self._current = None
        self._phase = "clip"
        device.reset_peak()
        self._grad_norm = self._clip()
        self._mean_loss = float(total)
        if np.isfinite(self._mean_loss) and np.isfinite(self._grad_norm):
            self._phase = "optimizer"
            self.parts.guard.step()
        self.peak_bytes = max(self.peak_bytes, device.memory().peak_bytes)

    def _micro_batch(
        self, step: int, samples: NDArray[np.int64], group: MicroBatch, target_tokens: int
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch, adding to the gradients; returns its share of the step's loss."""
        parts = self.parts
        self._phase, self._current = "forward", group
        parts.device.reset_peak()
        batch = self._load(samples[list(group.members)])
        with keyed(parts.loaded.model, seed=parts.seed, step=step, sample_ids=batch.sample_ids):
            loss = parts.loss(batch) / target_tokens
            self._phase = "backward"
            (loss * parts.scaler.scale).backward()
        peak_bytes = parts.device.memory().peak_bytes
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        parts.budget.record_success(group.cost_bytes, max(0, peak_bytes - parts.static_bytes) if parts.measures else 0)
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

    def _recover(self, step: int, failure: Failure, attempts: int) -> None:
        """After a failure, outside its handler: nothing of the attempt stays alive and all state is as before it.

        Memory may run out in here, too; each part of it may be repeated.

        Raises:
            RolledBackTooFar: the optimizer step cannot be undone here.
        """
        for _ in range(ATTEMPTS):
            undone: list[bool] = []
            again = attempt(lambda undone=undone: undone.append(self._put_back()), self.parts.device, lambda: "recover")  # type: ignore[misc]
            if again is None and undone[0]:
                return
            if again is None:
                break
            self._reporter(step)(again, "retry", attempts)
        self.parts.report(Backoff(step, failure, Remedy("reload"), self._rows_in_flight(), 0, attempts))
        raise RolledBackTooFar

    def _put_back(self) -> bool:
        self._drop_gradients()
        flush_autograd()
        self.parts.device.release_cached()
        if not self.parts.guard.restore():
            return False
        self.parts.rollback.restore()
        return True

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _reporter(self, step: int) -> Callable[[Failure, str, int], None]:
        return lambda failure, remedy, number: self.parts.report(Backoff(step, failure, Remedy(remedy), 0, 0, number))

    def _stock(self) -> Holdings:
        return holdings(self.parts.loaded, self.parts.guard, self.parts.device)

    def _rows_in_flight(self) -> int:
        return self._current.rows if self._current else 0

    def _choose(self, failure: Failure, tried: list[str], step: int) -> Remedy:
        parts, current = self.parts, self._current
        now = Situation(
            parts.device, parts.loaded, parts.loss, parts.budget, failure, current, parts.static_bytes, parts.guard,
            parts.data, tried, parts.standing,
        )  # fmt: skip
        remedy = choose(parts.ladder, now)
        parts.static_bytes, parts.data = now.static_bytes, now.data
        if remedy is None:
            rows = self._rows_in_flight()
            parts.report(Backoff(step, failure, Remedy("give_up"), rows, 0, len(tried) + 1, current))
            raise _exhausted(failure, current, parts)
        return remedy


def _exhausted(failure: Failure, current: MicroBatch | None, parts: Parts) -> MemoryExhaustedError:
    if failure.kind != "device":
        return MemoryExhaustedError(
            f"host memory ran out in {failure.phase}: {failure.text}",
            fix="close other programs, or set data.workers = 0; a smaller micro-batch would not help",
        )
    length = f" of {current.length} tokens" if current else ""
    elsewhere = parts.device.capacity_bytes - parts.device.available_bytes
    neighbour = f", and {elsewhere / 2**20:.1f} MiB by other processes" if elsewhere > 0 else ""
    return MemoryExhaustedError(
        f"out of memory in {failure.phase} with one sequence{length} and every remedy used "
        f"({failure.allocated_bytes / 2**20:.1f} of {parts.device.capacity_bytes / 2**20:.1f} MiB held{neighbour})",
        fix=parts.advise(failure, current) or "a profile with more memory",
    )
