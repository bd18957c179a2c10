"""What one optimizer step computes on this rank: gradients of its micro-batches, summed over ranks, clipped, applied.

Any line here may run out of memory; what is done about it then is `engine.train.step.transaction`'s affair, which
repeats these calls. `phase` and `in_flight` say what was being done.

The loss is the sum over target tokens divided by their number in the whole step, counted before the first forward; so
any split into micro-batches, and over any number of ranks, gives the same gradient.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batching.micro_batches import MicroBatch
from engine.data.batch import Batch, collate
from engine.model.dropout import keyed, keyed_dropouts
from engine.train.step.context import Parts


class StepComputation:
    """The computing part of steps over `Parts`; holds what the attempt in progress has come to."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.parameters = [parameter for _, parameter in parts.loaded.trainable()]
        self._dropouts = keyed_dropouts(parts.loaded.model)
        self.phase = "forward"
        self.in_flight: MicroBatch | None = None
        """The micro-batch being worked on; None outside forward and backward."""
        self.mean_loss = 0.0
        """Over the step's target tokens; this rank's share of it until the ranks have met."""
        self.grad_norm = 0.0
        """Before clipping."""
        self.busy_seconds = 0.0
        self.data_wait_seconds = 0.0
        self.peak_bytes = 0
        """Most bytes allocated at once in this attempt: one that failed held as much as there was, whatever its step
        takes."""
        self._loss_here: torch.Tensor | None = None

    def begin(self) -> None:
        """A new attempt at a step."""
        self.phase, self.in_flight, self.peak_bytes = "forward", None, 0

    @property
    def is_finite(self) -> bool:
        """Whether the step's loss and gradients are numbers that can be learned from."""
        return bool(np.isfinite(self.mean_loss) and np.isfinite(self.grad_norm))

    def accumulate(
        self, step: int, samples: NDArray[np.int64], plan: list[MicroBatch], target_tokens: int
    ) -> None:
        """The gradients of this rank's micro-batches; its share of the step's loss into `mean_loss`."""
        began = time.perf_counter()
        # Only work on a micro-batch asks for memory here: a failure then has something to be made smaller.
        total: torch.Tensor | None = None
        for group in plan:
            if group.members:
                loss = self._micro_batch(step, samples, group, target_tokens)
                total = loss if total is None else total.add_(loss)
            else:
                self._stand_in(step)
        self.in_flight = None
        if self.parts.ranks.size == 1:
            self._loss_here = total
        else:
            # What a kernel has to complain about must surface here, before the others are told that all went well.
            self.mean_loss = 0.0 if total is None else float(total)
        self.busy_seconds = time.perf_counter() - began

    def meet(self, _plan: list[MicroBatch]) -> None:
        """Make the gradients of all ranks ready to be summed: room for those that only other ranks have."""
        self.phase = "reduce"
        missing = self.parts.gradient_sum.agree() if self.parts.gradient_sum else []
        self.mean_loss = sum(self.parts.ranks.tell(self.mean_loss))
        if self.parts.sharded:
            self.parts.sharded.meet()
        if self.parts.gradient_sum:
            self.parts.gradient_sum.fill(missing)

    def sum_and_clip(self, _plan: list[MicroBatch]) -> None:
        """Gradients of all ranks into one sum, and that clipped; the step's loss and norm are known from here on. Then
        what the optimizer needs to take its step, so that no rank takes it before all have that."""
        if self.parts.gradient_sum is not None:
            self.parts.gradient_sum.sum()
        self.phase = "clip"
        self.parts.device.reset_peak()
        self.grad_norm = self._clip()
        if self._loss_here is not None:
            self.mean_loss, self._loss_here = float(self._loss_here), None
        self.phase = "optimizer"
        if self.is_finite:
            self.parts.guard.prepare()
        self.peak_bytes = max(self.peak_bytes, self.parts.device.memory().peak_bytes)

    def apply(self, _plan: list[MicroBatch]) -> None:
        """The optimizer's update; none where loss or gradients are not finite."""
        self.phase = "optimizer"
        if self.is_finite:
            self.parts.guard.step()
        self.peak_bytes = max(self.peak_bytes, self.parts.device.memory().peak_bytes)

    def drop_gradients(self) -> None:
        """Nothing of the attempt is kept."""
        self._loss_here = None
        for parameter in self.parameters:
            parameter.grad = None
        if self.parts.sharded:
            self.parts.sharded.drop_gradients()

    def _micro_batch(
        self, step: int, samples: NDArray[np.int64], group: MicroBatch, target_tokens: int
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch, adding to the gradients; returns its share of the step's loss."""
        parts = self.parts
        self.phase, self.in_flight = "forward", group
        if parts.measures:
            parts.device.reset_peak()
        batch = self._load(samples[list(group.members)])
        with self._around(step, batch):
            loss = parts.loss(batch) / target_tokens
            self.phase = "backward"
            (loss * parts.scaler.scale).backward()
        # Elsewhere a reading shows nothing here: what was kept for backward is free again, and it costs a system call.
        peak_bytes = parts.device.memory().peak_bytes if parts.measures else 0
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        parts.budget.record_success(group.cost_bytes, max(0, peak_bytes - parts.static_bytes))
        return loss.detach()

    def _stand_in(self, step: int) -> None:
        """A micro-batch that counts for nothing: others have one more than this rank, and gathering takes everybody."""
        parts = self.parts
        self.phase, self.in_flight = "forward", None
        batch = self._load(parts.data.lengths.argmin(keepdims=True))
        with parts.sharded.stand_in() if parts.sharded else nullcontext(), self._around(step, batch):
            (0.0 * parts.loss(batch)).backward()

    @contextmanager
    def _around(self, step: int, batch: Batch) -> Iterator[None]:
        """Forward and backward of a micro-batch: its dropout masks, and attention over slices where there are any."""
        parts = self.parts
        draw = {"seed": parts.seed, "step": step, "sample_ids": batch.sample_ids}
        with (
            keyed(self._dropouts, **draw, first_position=batch.first_position),
            parts.slices.at_work() if parts.slices else nullcontext(),
        ):
            yield

    def _load(self, indices: NDArray[np.int64]) -> Batch:
        began = time.perf_counter()
        with self.parts.device.host_region():
            batch = collate(self.parts.data, indices, pad_id=self.parts.pad_id)
            if self.parts.slices:
                batch = self.parts.slices.slice_of(batch, pad_id=self.parts.pad_id)
        batch = batch.moved(self.parts.device.upload)
        self.data_wait_seconds += time.perf_counter() - began
        return batch

    def _clip(self) -> float:
        """Undo the loss scale, clip, and return the norm before clipping. Waits for the device once."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.parts.scaler.scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.parts.scaler.scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.parts.sharded:
            return self._clip_parts(gradients, self.parts.sharded.norm(float(norm)))
        if self.parts.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.parts.max_grad_norm, norm)
        return float(norm)

    def _clip_parts(self, gradients: list[torch.Tensor], norm: float) -> float:
        """The same for a rank's parts of gradients whose norm as a whole is `norm`."""
        most = self.parts.max_grad_norm
        if most and norm > most and gradients:
            # The small number is torch's, in clip_grads_with_norm_.
            torch._foreach_mul_(gradients, most / (norm + 1e-6))
        return norm
