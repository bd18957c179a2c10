"""The training loop: steps, and evaluation, checkpoints, requests and growth of the micro-batch budget between them.
How a step recovers from failures is in `engine.train.step.transaction`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batching.micro_batches import costliest_sequences, floor_tokens, launch_tokens
from engine.device.oom import ATTEMPTS
from engine.errors import DivergedError, MemoryExhaustedError
from engine.journal.checkpoints_on_disk import Checkpoint
from engine.journal.liveness import Attempt
from engine.train.run.alerts import AlertMonitor
from engine.train.run.checkpoints import CheckpointManager, EmergencyHostMemory
from engine.train.run.evaluator import Evaluator
from engine.train.run.expert_utilisation import ExpertMonitor, utilisation_of
from engine.train.run.measured import (
    UNPLANNED,
    MicroBatchReporter,
    Peak,
    ProbeMemory,
    RunPace,
    measured_memory,
    prediction_error,
)
from engine.train.run.run_context import RunContext
from engine.train.run.run_state import RunState
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.budget_growth import BudgetGrowth
from engine.train.step.ladder import effective_spec
from engine.train.step.optimizer import set_learning_rates
from engine.train.step.transaction import CheckpointReloadRequired, StepOutcome, StepTransaction, TimedPass

GPU_SECONDS = 10.0
"""Seconds between readings of the GPU's sensors."""

GPU_FIELDS = ("index", "used_bytes", "utilisation_percent", "temperature_celsius", "power_watts")


LEANER = 'method.kind = "lora", or train.optimizer = "sgd", which has no state and does not allocate memory in its step'
"""What needs less memory where the step of adafactor or adamw_8bit ran out: the state of adamw would need more."""


@dataclass(frozen=True)
class Ending:
    """`status` is "done", "stopped", "paused" or "failed"; `reason` is a sentence or empty."""

    status: str
    reason: str
    result: str | None = None
    """Name of the result's folder in the run directory."""


class Training:
    def __init__(
        self,
        setup: TrainingSetup,
        run: RunContext,
        emergency_memory: EmergencyHostMemory,
    ) -> None:
        self.setup, self.journal, self.requests, self.watchdog = setup, run.journal, run.requests, run.watchdog
        self.context, self.ranks = setup.context, setup.context.ranks
        self.state = RunState()
        self.checkpoints = CheckpointManager(setup, self.state, run, emergency_memory)
        self.experts = ExpertMonitor(
            utilisation_of(self.context.loss.balance), lambda: self.state.experts, run.directory, run.journal
        )
        self.evaluator = Evaluator(setup, self.state, run, self.checkpoints, self.experts)
        self.transaction = StepTransaction(self.context)
        self.pace = RunPace(setup.spec, self.context)
        self.growth = BudgetGrowth(self.context, run.journal)
        self.alerts = AlertMonitor(run.journal, setup.total_steps)
        self.micro_batches = MicroBatchReporter(setup.spec, self.context, run.journal)
        self._gpu_read_at = 0.0
        self._stop_early = False
        self._reloads = 0
        self.sound = True
        """False when weights and optimizer state belong to no step: they must not be saved."""
        self.probe_memory: ProbeMemory | None = None
        """What the probe of this process took; None until it has run."""
        self.peak: Peak | None = None
        """The step of this process with the highest memory peak."""

    def resume(self, from_step: int | None) -> None:
        """Restore the newest undamaged checkpoint (not after `from_step`), else begin at step 0."""
        checkpoint = self.checkpoints.newest(not_after=from_step)
        if checkpoint is None:
            self.journal.write("resumed", step=0, **{"from": "the beginning"})
            return
        self._go_back_to(checkpoint)

    def start_smaller(self, killed: Attempt) -> None:
        """Learn from an attempt that the kernel killed for host memory, as from an out-of-memory error: begin with half
        its micro-batch budget. Raises MemoryExhaustedError if that was one sequence already."""
        budget, failed_bytes = self.context.budget, killed.budget_bytes
        on_host = self.context.device.kind == "cpu" or self.setup.spec.recipe.train.activation_offload
        if failed_bytes is None or not on_host:
            return
        if failed_bytes <= self.context.cost(1, int(self.context.data.lengths.min())):
            raise MemoryExhaustedError(
                "the kernel killed the engine with micro-batches of one sequence: host memory ran out",
                fix="raise the memory limit of this container or job, lower data.max_length, or set "
                "train.gradient_checkpointing = true",
            )
        budget.cut(failed_bytes, failed_bytes // 2)
        mib = failed_bytes / 2**20
        self.journal.warn("host_memory", f"micro-batches start at half of the {mib:,.1f} MiB that did not fit")

    def run(self) -> Ending:
        """Train to the end, or until asked to stop. Errors are raised; the caller turns them into exit codes."""
        self.probe()
        if self.state.step == 0 and not self.context.guard.can_undo:
            self.checkpoints.save("a checkpoint is needed to undo an optimizer step that fails midway")
        if self.setup.spec.recipe.eval.at_start and self.state.step == 0 and self.evaluator.has_validation:
            self.evaluate()
        self.journal.phase("training")
        while self.state.step < self.setup.total_steps and not self._stop_early:
            if self._asked_to_end():
                return self._end_early()
            self.one_step()
            self._between_steps()
        if self._asked_to_end() and self.state.step < self.setup.total_steps:
            return self._end_early()
        return self._finish()

    def _asked_to_end(self) -> bool:
        self.requests.poll()
        return self.requests.adopt(self.ranks.broadcast_object(self.requests.as_json()))

    def probe(self) -> None:
        """Run the most expensive micro-batch that the data can produce, before the first step."""
        self.journal.phase("probing")
        data = self.context.data
        most = min(len(data), self.setup.spec.recipe.sequences_per_step)
        costliest = costliest_sequences(data.lengths, self.context.cost, most, data.patches)
        if data.in_pairs:
            # The longest sequences, each with its other side, as far as they make a step.
            pairs = list(dict.fromkeys((costliest // 2).tolist()))[: most // 2]
            costliest = np.array([2 * pair + side for pair in pairs for side in (0, 1)], np.int64)
        device = self.context.device
        device.release_cached()
        self.transaction.probe(self.state.step + 1, costliest)
        self.probe_memory = ProbeMemory(self.transaction.work.peak_bytes, device.memory().reserved_bytes)
        # A split that follows from timings is not repeatable. Host memory: a pass has no floor worth measuring.
        if device.kind == "cuda" and not self.setup.spec.recipe.train.deterministic:
            self.measure_floor(costliest)
        self.micro_batches.update(self.state.step, failed=self.transaction.failures > 0)

    def measure_floor(self, costliest: NDArray[np.int64]) -> None:
        """Set the budget's `floor_tokens`, up to which all passes take equally long, and `launch_tokens`, the fixed
        time of one more micro-batch, on all ranks, unless a checkpoint restored them.

        Rank 0 times the micro-batch of `costliest`, half of it, and the shortest possible: each the second time it is
        run, so that kernels are loaded.
        """
        budget = self.context.budget
        if budget.floor_tokens:
            return
        shortest = self.context.data.lengths.argsort(kind="stable")[: self.ranks.size]
        large, small = (self._timed_pass(samples) for samples in (costliest, shortest))
        rows = self.ranks.broadcast_object(large.tokens) // int(self.context.data.lengths[costliest].max())
        groups = self.ranks.size // self.context.strategy.ranks_per_sample
        half = self._timed_pass(costliest[: groups * max(1, rows // 2)])
        floor = floor_tokens(large.tokens, large.seconds, small.seconds)
        launch = launch_tokens((large.tokens, large.seconds), (half.tokens, half.seconds), floor)
        budget.floor_tokens, budget.launch_tokens = self.ranks.broadcast_object([floor, launch])
        self.journal.phase(
            "probing",
            f"a pass of {large.tokens} tokens takes {large.seconds:.3f} s, the shortest {small.seconds:.3f} s, "
            f"so passes of up to {budget.floor_tokens} tokens are counted as equally long; an additional "
            f"micro-batch costs as much time as {budget.launch_tokens} tokens",
        )

    def _timed_pass(self, samples: NDArray[np.int64]) -> TimedPass:
        return [self.transaction.probe(self.state.step + 1, samples) for _ in range(2)][-1]

    def one_step(self) -> None:
        """Take the next step and log it if due; one that failed half-way without undo reloads the last checkpoint."""
        began = time.perf_counter()
        step = self.state.step + 1
        rate = set_learning_rates(self.context.optimizer, self.setup.schedule.factor(step))
        samples = self.setup.order.step(step)
        try:
            with self.watchdog.over("step", f"step {step}"):
                outcome = self.transaction.run(step, samples)
        except CheckpointReloadRequired:
            self._reload_last()
            return
        except DivergedError:
            self.alerts.not_finite(step, "the run ends here")
            raise
        self._reloads = 0
        self._note_peak(outcome)
        self.state.step = step
        self.state.tokens += outcome.tokens
        self.state.samples_due += len(samples)
        self.state.samples += outcome.samples
        self.state.skipped_steps += not outcome.applied
        self.state.overflows += outcome.overflowed
        self.experts.after_step(outcome.choices_LE)
        if step % self.setup.spec.recipe.train.log_every_steps == 0 or step == self.setup.total_steps:
            self._write_step(outcome, samples, rate, time.perf_counter() - began)
        self.pace.note(outcome, time.perf_counter() - began, clean=not self.transaction.failures)
        self._look_for_alerts(step, outcome, time.perf_counter() - began)
        self.growth.after_step(step, clean=outcome.applied and not self.transaction.failures)
        self.micro_batches.update(step, failed=self.transaction.failures > 0)

    def _look_for_alerts(self, step: int, outcome: StepOutcome, seconds: float) -> None:
        if outcome.overflowed:
            self.alerts.not_finite(step, "it was skipped, and the loss scale was lowered")
        elif outcome.applied:
            waited = outcome.data_wait_seconds
            self.alerts.after_step(step, loss=outcome.loss, grad_norm=outcome.grad_norm, waited=waited, seconds=seconds)

    def _note_peak(self, outcome: StepOutcome) -> None:
        # Of ranks that share sequences, the one with most target tokens has the highest peak.
        shared = [each["peak_bytes"] for each in outcome.ranks[: self.context.strategy.ranks_per_sample]]
        peak_bytes = max([self.transaction.work.peak_bytes, *shared])
        if not outcome.ran or (self.peak is not None and peak_bytes <= self.peak.peak_bytes):
            return
        context = self.context
        spec = effective_spec(self.setup.spec, context)
        predictable = not any(remedy.name in UNPLANNED for remedy in context.active_remedies)
        self.peak = Peak(peak_bytes, outcome.ran, spec, predictable)

    def _write_step(self, outcome: StepOutcome, samples: NDArray[np.int64], rate: float, seconds: float) -> None:
        memory = self.context.device.memory()
        per_second = outcome.tokens / seconds
        self.journal.write(
            "step",
            step=self.state.step,
            epoch=round(self.setup.order.epoch_at(self.state.step), 4),
            loss=outcome.loss,
            learning_rate=rate,
            grad_norm=outcome.grad_norm,
            tokens=outcome.tokens,
            target_tokens=outcome.target_tokens,
            tokens_per_second=round(per_second, 1),
            step_seconds=round(seconds, 4),
            data_wait_seconds=round(outcome.data_wait_seconds, 4),
            mfu=self._mfu(outcome, samples, seconds),
            micro_batches=outcome.micro_batches,
            largest_micro_batch=outcome.micro_batch_rows,
            allocated_bytes=memory.allocated_bytes,
            reserved_bytes=memory.reserved_bytes,
            peak_bytes=self.transaction.work.peak_bytes,
            skipped=not outcome.applied,
            samples=outcome.samples,
            budget=self.context.budget.budget_bytes,
            **({"ranks": outcome.ranks} if outcome.ranks else {}),
            **({} if outcome.auxiliary_loss is None else {"aux_loss": outcome.auxiliary_loss}),
            **outcome.metrics,
            **self.experts.event_fields(outcome.choices_LE),
            **({"loss_scale": self.context.scaler.scale} if self.context.scaler.enabled else {}),
        )
        self.experts.warn(outcome.choices_LE)

    def _mfu(self, outcome: StepOutcome, samples: NDArray[np.int64], seconds: float) -> float | None:
        """Model FLOPs per second of all devices, over their peak; None where either is unknown."""
        flops, peak_tflops = self.setup.flops, self.setup.spec.profile.device.peak_tflops
        if flops is None or peak_tflops is None:
            return None
        lengths_D = self.context.data.document_lengths(samples)
        return flops.of(lengths_D, outcome.target_tokens) / (seconds * peak_tflops * 1e12 * self.ranks.size)

    def _between_steps(self) -> None:
        spec = self.setup.spec.recipe
        self.journal.write_notices(self.context.device.notices)
        if self.evaluator.has_validation and self._is_due(spec.eval.every_steps, spec.eval.per_epoch):
            self.evaluate()
        minutes = spec.checkpoint.every_minutes
        due = bool(minutes) and self.checkpoints.seconds_since >= minutes * 60
        asked, due, look = self.ranks.broadcast_object([self.requests.checkpoint, due, self._gpus_are_due()])
        if asked:
            self.requests.checkpoint = False
            self.checkpoints.save_if_possible("asked for")
        if self._is_due(spec.checkpoint.every_steps, None):
            self.checkpoints.save_if_possible("every_steps")
        elif self._is_due(None, spec.checkpoint.per_epoch):
            self.checkpoints.save_if_possible("per_epoch")
        if due:
            self.checkpoints.save_if_possible("every_minutes")
        if look:
            self._read_gpus()

    def _is_due(self, every_steps: int | None, per_epoch: int | None) -> bool:
        """Whether something that happens so often is due after this step."""
        step = self.state.step
        by_steps = bool(every_steps) and step % (every_steps or 1) == 0
        return by_steps or (bool(per_epoch) and self.setup.order.ends_part(step, per_epoch or 1))

    def _gpus_are_due(self) -> bool:
        return self.context.device.kind == "cuda" and time.monotonic() - self._gpu_read_at >= GPU_SECONDS

    def _read_gpus(self) -> None:
        """Write every rank's readings of its own GPU to the journal; on several machines GPUs are numbered by rank."""
        self._gpu_read_at = time.monotonic()
        here = [{name: getattr(reading, name) for name in GPU_FIELDS} for reading in self.context.device.readings()]
        several_machines = self.setup.spec.profile.nodes.count > 1
        for rank, readings in enumerate(self.ranks.all_gather_object(here)):
            for reading in readings:
                self.journal.write("gpu", **{**reading, "index": rank if several_machines else reading["index"]})

    def _end_early(self) -> Ending:
        self.checkpoints.save(self.requests.reason)
        if self.requests.ending == "pause":
            self.journal.write("paused", step=self.state.step)
            return Ending("paused", self.requests.reason)
        return Ending("stopped", self.requests.reason)

    def _finish(self) -> Ending:
        if self.evaluator.has_validation and self.state.last_evaluated != self.state.step:
            self.evaluate()
        self.checkpoints.save("end")
        result = self.checkpoints.place_result()
        return Ending("done", "early stopping" if self._stop_early else "", result)

    def evaluate(self) -> None:
        """Score the validation set and write the event `eval`; early stopping may end the run after this step."""
        if self.evaluator.evaluate():
            self._stop_early = self.evaluator.out_of_patience

    def _go_back_to(self, checkpoint: Checkpoint) -> None:
        same_length = self.checkpoints.restore_checkpoint(checkpoint)
        # A run that stopped early continues if it was made longer, but not if it was killed while it ended.
        self._stop_early = same_length and self.evaluator.out_of_patience

    @property
    def samples_lost(self) -> int:
        """Sequences that steps did not train on, because an fp16 overflow skipped the step."""
        return self.state.samples_due - self.state.samples

    def measured(self) -> dict[str, Any]:
        """The highest memory peak and the step time, each with its prediction; warns of a miss of memory."""
        found = measured_memory(self.context, self.peak) | self.pace.measured()
        missed = prediction_error(found)
        if missed:
            self.journal.warn("prediction_missed", *missed)
        return found

    def _reload_last(self) -> None:
        """Restore the last checkpoint, after an optimizer step that failed half-way and could not be undone."""
        checkpoint = self.checkpoints.newest()
        self._reloads += 1
        if checkpoint is None:
            self.sound = False
            raise MemoryExhaustedError(
                "out of memory in the optimizer step, and there is no checkpoint to go back to",
                fix=f"start again with {LEANER}",
            )
        self._go_back_to(checkpoint)
        if self._reloads >= ATTEMPTS:
            raise MemoryExhaustedError(
                f"out of memory in the optimizer step, {self._reloads} times in a row",
                fix=f"set {LEANER}",
            )
