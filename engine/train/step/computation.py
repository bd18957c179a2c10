"""Gradient accumulation: what one optimizer step computes on this rank. Micro-batches are prepared on the host ahead of
the device; their gradients are summed, also over ranks, clipped and applied."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batching.micro_batches import DUMMY_MICRO_BATCH, plan_micro_batches
from engine.data.batch import Batch, collate
from engine.device.host_syncs import host_syncs
from engine.model.dropout import keyed, keyed_dropouts
from engine.model.positions import takes_starts
from engine.train.step.objective import MeasuredReference

if TYPE_CHECKING:
    from engine.batching.micro_batches import MicroBatch
    from engine.data.tokens import TokenData
    from engine.device.base import Device
    from engine.model.loss_values import MicroBatchLoss
    from engine.train.step.context import StepContext
    from engine.train.step.objective import Measure, SequenceObjective, StepTokens

AHEAD = 2
"""Micro-batches prepared ahead of the current one. They are host memory: a few hundred kilobytes each."""


Prepare = Callable[[NDArray[np.int64]], Batch]
"""Makes the micro-batch of the samples with given indices, in host memory."""


class BatchLoader:
    """Prepares in a thread of its own where the device computes beside the host, else on demand. Batches come
    page-locked, so that copying them to the device does not wait for the work queued there. The caller copies: an
    out-of-memory error then belongs to its attempt."""

    def __init__(self, device: Device, prepare: Prepare) -> None:
        self.device, self._prepare = device, prepare
        self.wait_seconds = 0.0
        """How long the caller of `batches` has waited for data in all."""
        self._thread = ThreadPoolExecutor(1, "batches") if device.asynchronous else None

    def batches(
        self, chosen: Sequence[NDArray[np.int64]], prepare: Prepare | None = None
    ) -> Generator[Batch, None, None]:
        """Yield the micro-batch of each group of samples, in host memory, made by `prepare` in place of the loader's
        own. Close the iterator when an attempt ends early: what was prepared ahead is dropped. An error in the thread
        is raised when its micro-batch is due."""
        prepare = prepare or self._prepare
        if self._thread is None:
            for samples in chosen:
                yield self._timed(partial(self._on_host, samples, prepare))
            return
        left = deque(chosen)
        ahead: deque[Future[Batch]] = deque()
        try:
            while left or ahead:
                while left and len(ahead) <= AHEAD:
                    ahead.append(self._thread.submit(self._on_host, left.popleft(), prepare))
                yield self._timed(ahead.popleft().result)
        finally:
            for future in ahead:
                future.cancel()
            for future in ahead:
                if not future.cancelled():
                    future.exception()  # wait for it: nothing of this attempt may be left running

    def _timed(self, action: Callable[[], Batch]) -> Batch:
        began = time.perf_counter()
        try:
            return action()
        finally:
            self.wait_seconds += time.perf_counter() - began

    def _on_host(self, samples: NDArray[np.int64], prepare: Prepare) -> Batch:
        device = self.device
        with device.activate(), device.host_region():
            return prepare(samples).moved(device.pin)


class StepComputation:
    """The computation of a step in stages, and the figures of the attempt in progress. Losses are divided by counts of
    the whole step, known before the first forward, so any split into micro-batches, and over any number of ranks, gives
    the same gradient."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self._dropouts = keyed_dropouts(context.loaded.model)
        self._loader = BatchLoader(context.device, self._on_host)
        self.phase = "forward"
        self.in_flight: MicroBatch | None = None
        """None outside forward and backward."""
        self.mean_loss = 0.0
        """Mean over the step's target tokens; until `prepare_gradients`, only this rank's share of it."""
        self.auxiliary_loss: float | None = None
        """Without its weight; until `prepare_gradients`, only this rank's share. None for a model without one."""
        self.metrics: list[float] = []
        """Means over the step of the objective's metrics; until `prepare_gradients`, only this rank's share of them."""
        self.choices_LE: NDArray[np.int64] | None = None
        """How many of this rank's tokens chose each expert of each layer; None if the use of experts is not watched."""
        self.grad_norm = 0.0
        """Before clipping."""
        self.busy_seconds = 0.0
        self.peak_bytes = 0
        """In this attempt. Failed ones do not count: they filled the memory, however much the step needs."""

    def begin(self) -> None:
        self.phase, self.in_flight, self.peak_bytes = "forward", None, 0

    @property
    def data_wait_seconds(self) -> float:
        """Waited for micro-batches to be prepared on the host, since the run began."""
        return self._loader.wait_seconds

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.mean_loss) and np.isfinite(self.grad_norm))

    def accumulate(self, step: int, samples: NDArray[np.int64], plan: list[MicroBatch], tokens: StepTokens) -> None:
        """Accumulate gradients of this rank's micro-batches, and its shares of the losses and choices of experts."""
        began = time.perf_counter()
        # Nothing but micro-batches allocates here, so that a failure can always be answered with smaller ones.
        total: MicroBatchLoss | None = None
        groups = [self._samples_of(group, samples) for group in plan]
        with self._objective(step, samples, plan, tokens), closing(self._loader.batches(groups)) as batches:
            for group in plan:
                self.phase, self.in_flight = "forward", group if group.members else None
                if group.members:
                    loss = self._micro_batch(step, batches, group, tokens)
                    total = loss if total is None else total.add_(loss)
                else:
                    self._dummy_micro_batch(step, batches)
        self.context.strategy.end_micro_batches()
        self.in_flight = None
        # Waits for the device: errors of its kernels are raised here, before other ranks are told that all went well.
        self._note_sums(total)
        self.busy_seconds = time.perf_counter() - began

    def measure_first(
        self, step: int, samples: NDArray[np.int64], objective: SequenceObjective, data: TokenData
    ) -> None:
        """Before any gradient: measure this rank's sequences of `data`, which belong to `samples`."""
        budget = self.context.budget
        objective.begin_measuring()
        plan = plan_micro_batches(
            data.lengths[samples], self.context.cost, budget.budget_bytes, budget.floor_tokens,
            None if data.patches is None else data.patches[samples], budget.launch_tokens,
        )  # fmt: skip
        self._measure(step, samples, plan, objective.measure, data)

    @contextmanager
    def _objective(
        self, step: int, samples: NDArray[np.int64], plan: list[MicroBatch], tokens: StepTokens
    ) -> Iterator[None]:
        """In preference learning: inside the block, the objective knows what it needs of other sequences."""
        objective = self.context.objective
        if objective is None:
            yield
            return
        try:
            objective.begin(tokens, self.context.ranks)
            if isinstance(objective.reference, MeasuredReference):
                self._measure(step, samples, plan, objective.reference.measure, self.context.data)
            self._measure(step, samples, objective.split(plan, samples), objective.measure, self.context.data)
            yield
        finally:
            objective.end()

    def _measure(
        self,
        step: int,
        samples: NDArray[np.int64],
        plan: list[MicroBatch],
        measure: Measure,
        data: TokenData,
    ) -> None:
        """Passes without gradients over the micro-batches of `plan`, with dummies until this rank has run as many as
        the others."""
        context = self.context
        plan = plan + [DUMMY_MICRO_BATCH] * (context.strategy.most_passes(len(plan)) - len(plan))
        groups = [self._samples_of(group, samples) for group in plan]
        with closing(self._loader.batches(groups, partial(self._on_host, data=data))) as batches:
            for group in plan:
                self.phase, self.in_flight = "forward", group if group.members else None
                if context.measures:
                    context.device.reset_peak()
                batch = next(batches).moved(context.device.upload)
                with self._around(step, batch, context.strategy.pass_without_gradients()):
                    measure(batch, is_dummy=not group.members)
                peak_bytes = context.device.memory().peak_bytes if context.measures else 0
                self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.in_flight = None

    def prepare_gradients(self, _plan: list[MicroBatch]) -> None:
        """Allocate what summing gradients needs, and replace this rank's parts of the losses by the sums over ranks."""
        self.phase = "reduce"
        auxiliary = [] if self.auxiliary_loss is None else [self.auxiliary_loss]
        sums = self.context.strategy.prepare_gradients([self.mean_loss, *auxiliary, *self.metrics])
        self.mean_loss, self.auxiliary_loss = sums[0], sums[1] if auxiliary else None
        self.metrics = sums[1 + len(auxiliary) :]

    def sync_and_clip(self, _plan: list[MicroBatch]) -> None:
        """Sum gradients over ranks, clip them, prepare the optimizer: no rank takes the step before all ranks can."""
        strategy = self.context.strategy
        strategy.sync_gradients()
        self.phase = "clip"
        self.context.device.reset_peak()
        if self.context.scaler.scale != 1.0:
            strategy.scale_gradients(1.0 / self.context.scaler.scale)
        self.grad_norm = strategy.clip_gradients(self.context.max_grad_norm)
        self.phase = "optimizer"
        if self.is_finite:
            self.context.guard.prepare()
        self.peak_bytes = max(self.peak_bytes, self.context.device.memory().peak_bytes)

    def apply(self, step: int) -> None:
        """Take the optimizer step, unless loss or gradients are not finite."""
        self.phase = "optimizer"
        if self.is_finite:
            self.context.guard.step(step)
        self.peak_bytes = max(self.peak_bytes, self.context.device.memory().peak_bytes)

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        """The batch on the device, as a micro-batch gets it."""
        return self._on_host(samples).moved(self.context.device.upload)

    def host_syncs(self, step: int, samples: NDArray[np.int64], group: MicroBatch, tokens: StepTokens) -> list[str]:
        """Where forward and backward made the host wait (`engine.device.host_syncs`). Drop the gradients after it."""
        with closing(self._loader.batches([self._samples_of(group, samples)])) as batches:
            return host_syncs(lambda: self._micro_batch(step, batches, group, tokens))

    def _micro_batch(
        self, step: int, batches: Iterator[Batch], group: MicroBatch, tokens: StepTokens
    ) -> MicroBatchLoss:
        """Run the next batch, adding to the gradients; returns its share of the step's losses."""
        context = self.context
        if context.measures:
            context.device.reset_peak()
        batch = next(batches).moved(context.device.upload)
        with self._around(step, batch, context.strategy.micro_batch()):
            if context.objective is not None:
                context.objective.prepare(batch)
            share = context.loss.terms(batch).share_of(tokens.targets, tokens.real)
            loss = context.loss.minimised(share)
            self.phase = "backward"
            _backward(loss * context.scaler.scale)
        context.loss.offload.settle()
        # On the plain CPU a reading shows nothing here, as activations are free again, and costs a system call.
        peak_bytes = context.device.memory().peak_bytes if context.measures else 0
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        context.budget.record_success(group.cost_bytes, max(0, peak_bytes - context.static_bytes))
        return share.detached()

    def _note_sums(self, total: MicroBatchLoss | None) -> None:
        """Note the sums over this rank's micro-batches, zeros if it had none. Waits for the device."""
        balance = self.context.loss.balance
        self.mean_loss = 0.0 if total is None else float(total.token_losses)
        objective = self.context.objective
        without = [0.0] * len(objective.sums) if objective is not None else []
        self.metrics = without if total is None or total.metrics is None else total.metrics.tolist()
        self.auxiliary_loss = 0.0 if balance is not None and balance.weight else None
        self.choices_LE = balance.no_choices() if balance is not None and balance.watched else None
        if total is not None and total.auxiliary is not None:
            self.auxiliary_loss = float(total.auxiliary)
        if total is not None and total.choices_LE is not None:
            self.choices_LE = self.context.device.download(total.choices_LE).numpy()

    def _dummy_micro_batch(self, step: int, batches: Iterator[Batch]) -> None:
        """Run the shortest sequence at zero weight, to join the collectives of a micro-batch of other ranks."""
        context = self.context
        batch = next(batches).moved(context.device.upload)
        strategy = context.strategy
        with (
            strategy.dummy_micro_batch(),
            context.loss.weighing_nothing(),
            self._around(step, batch, strategy.micro_batch()),
        ):
            _backward(0.0 * context.loss(batch))
        context.loss.offload.settle()

    @contextmanager
    def _around(self, step: int, batch: Batch, own: AbstractContextManager[None]) -> Iterator[None]:
        """Around forward and backward of a micro-batch: its dropout masks, its attention kernel, and `own`, the
        strategy's context."""
        context = self.context
        dropout_masks = keyed(
            self._dropouts,
            seed=context.seed,
            step=step,
            sample_ids=batch.sample_ids,
            first_position=batch.first_position,
        )
        rows, length = batch.input_ids_BS.shape
        attention = nullcontext() if context.cudnn is None else context.cudnn.micro_batch(rows, length)
        with dropout_masks, attention, own:
            yield

    def _samples_of(self, group: MicroBatch, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """For a dummy micro-batch, the shortest sequence of the data."""
        return samples[list(group.members)] if group.members else np.array([self.context.data.lengths.argmin()])

    def _on_host(self, samples: NDArray[np.int64], data: TokenData | None = None) -> Batch:
        """With sequence parallelism, this rank's part of the batch."""
        context = self.context
        batch = collate(
            context.data if data is None else data,
            samples,
            pad_id=context.pad_id,
            with_starts=takes_starts(context.loaded.attention),
            with_row_tokens=context.loss.balance is not None,
            width=None if context.cudnn is None else context.cudnn.width,
        )
        return context.strategy.local_part(batch, pad_id=context.pad_id)


def _backward(loss: Tensor) -> None:
    """Skip backward if nothing trained took part: a vision encoder alone, and a micro-batch without images."""
    if loss.requires_grad:
        loss.backward()
