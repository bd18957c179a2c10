"""What one optimizer step computes on this rank: gradients of its micro-batches, summed over ranks, clipped, applied.

Any line here may run out of memory; `engine.train.step.transaction` handles that and repeats these calls. `phase` and
`in_flight` say what was being done.

The loss is the sum over target tokens divided by their number in the whole step, counted before the first forward; so
any split into micro-batches, and over any number of ranks, gives the same gradient. The auxiliary loss of a mixture of
experts is likewise divided by the tokens of the whole step (`engine.model.expert_balance`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batching.micro_batches import MicroBatch
from engine.data.batch import Batch, collate
from engine.device.host_syncs import host_syncs
from engine.model.documents import takes_starts
from engine.model.dropout import keyed, keyed_dropouts
from engine.model.loss import MicroBatchLoss
from engine.train.step.batch_loader import BatchLoader
from engine.train.step.context import StepContext


class StepTokens(NamedTuple):
    """Tokens of a whole step, on all ranks: target tokens, and all tokens without padding. Each is at least 1."""

    targets: int
    real: int


class StepComputation:
    """The computation of a step in stages, with the loss, the gradient norm and the memory peak in bytes of the attempt
    in progress."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self._dropouts = keyed_dropouts(context.loaded.model)
        self._loader = BatchLoader(context.device, self._on_host)
        self.phase = "forward"
        self.in_flight: MicroBatch | None = None
        """The micro-batch being worked on; None outside forward and backward."""
        self.mean_loss = 0.0
        """Mean over the step's target tokens; until `prepare_gradients`, only this rank's share of it."""
        self.auxiliary_loss: float | None = None
        """Auxiliary loss of the step, without its weight; until `prepare_gradients`, only this rank's share of it. None
        for a model without one."""
        self.choices_LE: NDArray[np.int64] | None = None
        """How many of this rank's tokens chose each expert of each layer; None if the use of experts is not watched."""
        self.grad_norm = 0.0
        """Norm of the gradients before clipping."""
        self.busy_seconds = 0.0
        self.peak_bytes = 0
        """Most bytes allocated at once in this attempt at the step. Failed attempts do not count: they filled the
        memory, however much the step needs."""

    def begin(self) -> None:
        """Reset `phase`, `in_flight` and `peak_bytes` for a new attempt at a step."""
        self.phase, self.in_flight, self.peak_bytes = "forward", None, 0

    @property
    def data_wait_seconds(self) -> float:
        """Seconds that this process has waited for micro-batches to be prepared on the host, since the run began."""
        return self._loader.wait_seconds

    @property
    def is_finite(self) -> bool:
        """Whether the step's loss and gradient norm are finite."""
        return bool(np.isfinite(self.mean_loss) and np.isfinite(self.grad_norm))

    def accumulate(
        self, step: int, samples: NDArray[np.int64], plan: list[MicroBatch], tokens: StepTokens
    ) -> None:
        """Accumulate the gradients of this rank's micro-batches; sets `mean_loss` and `auxiliary_loss` to this rank's
        share of the step's losses, and `choices_LE` to the choices of experts by this rank's tokens."""
        began = time.perf_counter()
        # Nothing but micro-batches allocates here, so that a failure can always be answered with smaller ones.
        total: MicroBatchLoss | None = None
        with closing(self._loader.batches([self._samples_of(group, samples) for group in plan])) as batches:
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

    def prepare_gradients(self, _plan: list[MicroBatch]) -> None:
        """Begin the exchange between ranks: allocate what summing gradients needs, and replace `mean_loss` and
        `auxiliary_loss`, this rank's parts of the step's losses, by the sums over ranks."""
        self.phase = "reduce"
        shares = [self.mean_loss, *([] if self.auxiliary_loss is None else [self.auxiliary_loss])]
        self.mean_loss, *auxiliary = self.context.strategy.prepare_gradients(shares)
        self.auxiliary_loss = auxiliary[0] if auxiliary else None

    def sync_and_clip(self, _plan: list[MicroBatch]) -> None:
        """Sum gradients over ranks and clip them, then prepare the optimizer's buffers and copies, so that no rank
        takes the step before all ranks can."""
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
        """Take the optimizer's step number `step`, unless loss or gradients are not finite."""
        self.phase = "optimizer"
        if self.is_finite:
            self.context.guard.step(step)
        self.peak_bytes = max(self.peak_bytes, self.context.device.memory().peak_bytes)

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        """Return the batch of `samples` on the device, as a micro-batch gets it."""
        return self._on_host(samples).moved(self.context.device.upload)

    def host_syncs(
        self, step: int, samples: NDArray[np.int64], group: MicroBatch, tokens: StepTokens
    ) -> list[str]:
        """Run forward and backward of one micro-batch; return the operations for which the host waited for the device
        (`engine.device.host_syncs`). Drop the gradients afterwards."""
        with closing(self._loader.batches([self._samples_of(group, samples)])) as batches:
            return host_syncs(lambda: self._micro_batch(step, batches, group, tokens))

    def _micro_batch(
        self, step: int, batches: Iterator[Batch], group: MicroBatch, tokens: StepTokens
    ) -> MicroBatchLoss:
        """Run forward and backward of the next of `batches`, adding to the gradients; returns its share of the step's
        losses."""
        context = self.context
        if context.measures:
            context.device.reset_peak()
        batch = next(batches).moved(context.device.upload)
        with self._around(step, batch):
            share = context.loss.terms(batch).share_of(*tokens)
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
        """Set `mean_loss`, `auxiliary_loss` and `choices_LE` to `total`, the sums over this rank's micro-batches, or to
        zeros if `total` is None because the rank had no micro-batch. Waits for the device."""
        balance = self.context.loss.balance
        self.mean_loss = 0.0 if total is None else float(total.token_losses)
        self.auxiliary_loss = 0.0 if balance is not None and balance.weight else None
        self.choices_LE = balance.no_choices() if balance is not None and balance.watched else None
        if total is not None and total.auxiliary is not None:
            self.auxiliary_loss = float(total.auxiliary)
        if total is not None and total.choices_LE is not None:
            self.choices_LE = self.context.device.download(total.choices_LE).numpy()

    def _dummy_micro_batch(self, step: int, batches: Iterator[Batch]) -> None:
        """Run the next of `batches`, the shortest sequence, at zero weight, to join the collectives of a micro-batch
        that only other ranks have."""
        context = self.context
        batch = next(batches).moved(context.device.upload)
        with context.strategy.dummy_micro_batch(), self._around(step, batch):
            _backward(0.0 * context.loss(batch))
        context.loss.offload.settle()

    @contextmanager
    def _around(self, step: int, batch: Batch) -> Iterator[None]:
        """Context manager around forward and backward of a micro-batch: applies its dropout masks, and the strategy's
        own context for micro-batches."""
        context = self.context
        dropout_masks = keyed(
            self._dropouts,
            seed=context.seed,
            step=step,
            sample_ids=batch.sample_ids,
            first_position=batch.first_position,
        )
        with dropout_masks, context.strategy.micro_batch():
            yield

    def _samples_of(self, group: MicroBatch, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples of a micro-batch: for a dummy micro-batch, the shortest sequence of the data."""
        return samples[list(group.members)] if group.members else np.array([self.context.data.lengths.argmin()])

    def _on_host(self, samples: NDArray[np.int64]) -> Batch:
        """The batch of `samples` in host memory; with sequence parallelism this rank's part of it."""
        context = self.context
        batch = collate(
            context.data,
            samples,
            pad_id=context.pad_id,
            with_starts=takes_starts(context.loaded.attention),
            with_row_tokens=context.loss.balance is not None,
        )
        return context.strategy.local_part(batch, pad_id=context.pad_id)


def _backward(loss: Tensor) -> None:
    """Run backward from `loss`, unless no trained parameter took part in it: a recipe may train only a vision encoder,
    and a micro-batch may have no images."""
    if loss.requires_grad:
        loss.backward()
