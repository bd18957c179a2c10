"""The training loop: steps, and what happens between them (evaluation, checkpoints, requests, growth).

The loop owns the order of things and the journal's lines; how a step survives is `engine.train.transaction`'s affair.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from engine.errors import MemoryExhaustedError
from engine.evaluate.scores import Interrupted, Judge
from engine.evaluate.scores import evaluate as score
from engine.journal.directory import RunDirectory
from engine.train.best import agree, is_better
from engine.train.checkpoint import (
    Checkpoint,
    forget_after,
    mark_best,
    newest_sound,
    place_result,
    prune,
    size_bytes,
    write_checkpoint,
)
from engine.train.control import Wishes
from engine.train.costbudget import CostBudget
from engine.train.failure import ATTEMPTS, Failure, retried
from engine.train.growth import Growth
from engine.train.journal import Journal, until_there_is_room
from engine.train.ladder import Remedy
from engine.train.measure import UNPLANNED, Peak, measured, miss
from engine.train.oom_report import as_it_stands
from engine.train.optimizer import set_learning_rates
from engine.train.parts import Backoff
from engine.train.reserve import HostReserve
from engine.train.run_state import Best, RunState, fill_checkpoint, restore, settings
from engine.train.setup import Bench
from engine.train.transaction import RolledBackTooFar, StepOutcome, StepTransaction
from engine.train.watchdog import Watchdog

GPU_SECONDS = 10.0
"""Between readings of the GPU's sensors."""

GPU_FIELDS = ("index", "used_bytes", "utilisation_percent", "temperature_celsius", "power_watts")


@dataclass(frozen=True)
class Ending:
    """How the loop ended: a status of the journal's vocabulary, and why."""

    status: str
    reason: str
    result: str | None = None
    """Name of the result's folder in the run directory."""


class Training:
    """One run from its first (or next) step to its end."""

    def __init__(
        self, bench: Bench, directory: RunDirectory, journal: Journal, wishes: Wishes, reserve: HostReserve
    ) -> None:
        self.bench, self.directory, self.journal, self.wishes = bench, directory, journal, wishes
        self.parts, self.ranks = bench.parts, bench.parts.ranks
        self.state = RunState()
        self.transaction = StepTransaction(self.parts)
        self.growth = Growth(self.parts, journal)
        self.watchdog = Watchdog(journal, bench.spec.profile.parallel.timeout_seconds)
        self.last_saved: int | None = None
        self._saved_at = time.monotonic()
        self._gpu_read_at = 0.0
        self._judge = self._make_judge()
        self._stop_early = False
        self._reloads = 0
        self._reserve = reserve
        self.sound = True
        """False when weights and optimizer state belong to no step: they must not be saved."""
        self.peak: Peak | None = None
        """The step of this process that held most."""

    def resume(self, from_step: int | None) -> None:
        """Go on from the newest sound checkpoint (at or before `from_step`); from the beginning where there is none."""
        checkpoint = self._newest(not_after=from_step)
        if checkpoint is None:
            self.journal.write("resumed", step=0, **{"from": "the beginning"})
            return
        self._go_back_to(checkpoint)

    def run(self) -> Ending:
        """Train to the end, or until asked to stop. The caller turns exceptions into exit codes."""
        self.probe()
        if self.state.step == 0 and not self.parts.guard.can_undo:
            self.save("an optimizer step that fails half-way can only be undone by going back here")
        if self.bench.spec.recipe.eval.at_start and self.state.step == 0 and self._has_validation:
            self.evaluate()
        self.journal.phase("training")
        while self.state.step < self.bench.total_steps and not self._stop_early:
            if self._asked_to_end():
                return self._end_early()
            self.one_step()
            self._between_steps()
        if self._asked_to_end() and self.state.step < self.bench.total_steps:
            return self._end_early()
        return self._finish()

    def save(self, reason: str) -> None:
        """Write a checkpoint of the state as it is, once per step; waits while the disk is full.

        Raises:
            MemoryExhaustedError: host memory for it ran out again and again.
        """
        if self.last_saved == self.state.step:
            return
        self.ranks.behind_first(lambda: self._write(reason))
        self.last_saved, self._saved_at = self.state.step, time.monotonic()

    def _save_if_possible(self, reason: str) -> bool:
        """Like `save`, but a run does not end for a checkpoint that there is no host memory for: the next is tried."""
        if self.last_saved == self.state.step:
            return True
        if not self.ranks.behind_first(lambda: self._write_if_possible(reason)):
            return False
        self.last_saved, self._saved_at = self.state.step, time.monotonic()
        return True

    def _write_if_possible(self, reason: str) -> bool:
        try:
            self._write(reason)
        except MemoryExhaustedError as error:
            self.journal.warn("checkpoint_skipped", f"step {self.state.step} was not saved: {error.found}", error.fix)
            return False
        return True

    def _write(self, reason: str) -> None:
        self.journal.phase("saving")
        began = time.perf_counter()
        checkpoint = until_there_is_room(
            lambda: retried(self._write_checkpoint, "checkpoint", self.parts.device, self._retried),
            self.wishes.look,
            self.journal.warn_of_full_disk,
        )
        prune(self.directory.checkpoints, self.bench.spec.recipe.checkpoint.keep)
        self.journal.write(
            "checkpoint_saved",
            step=self.state.step,
            path=str(checkpoint.path.relative_to(self.directory.path)),
            save_seconds=round(time.perf_counter() - began, 3),
            size_bytes=size_bytes(checkpoint.path),
            reason=reason,
        )
        self.journal.phase("training")

    def _asked_to_end(self) -> bool:
        """What rank 0 was asked, on every rank."""
        self.wishes.look()
        return self.wishes.follow(self.ranks.from_first(self.wishes.as_json()))

    def _newest(self, not_after: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that rank 0 can believe, told to all."""
        checkpoint, complaints = newest_sound(self.directory.checkpoints, not_after=not_after)
        for complaint in complaints:
            self.journal.warn("damaged_checkpoint", complaint, "the one before it is used")
        step = self.ranks.from_first(checkpoint and checkpoint.step)
        return None if step is None else Checkpoint(step, self.directory.checkpoint(step))

    @property
    def _has_validation(self) -> bool:
        return self.bench.prepared.validation is not None

    def probe(self) -> None:
        """The dearest shapes the data can produce, before the first step."""
        self.journal.phase("probing")
        lengths = self.parts.data.lengths
        most = min(len(lengths), self.bench.spec.recipe.train.batch_size)
        longest = lengths.argsort(kind="stable")[::-1][:most].copy()
        self.transaction.probe(self.state.step + 1, longest)

    def one_step(self) -> None:
        """The next optimizer step, and its line in the journal."""
        began = time.perf_counter()
        step = self.state.step + 1
        rate = set_learning_rates(self.parts.optimizer, self.bench.schedule.factor(step))
        samples = self.bench.order.step(step)
        self.transaction.work.peak_bytes = 0
        try:
            with self.watchdog.step(step):
                outcome = self.transaction.run(step, samples)
        except RolledBackTooFar:
            self._reload_last()
            return
        self._reloads = 0
        self._note_peak(outcome)
        self.state.step = step
        self.state.tokens += outcome.tokens
        self.state.samples_due += len(samples)
        self.state.samples += outcome.samples
        self.state.skipped_steps += not outcome.applied
        self.state.overflows += outcome.overflowed
        if step % self.bench.spec.recipe.train.log_every_steps == 0 or step == self.bench.total_steps:
            self._write_step(outcome, rate, time.perf_counter() - began)
        self.growth.after_step(step, clean=outcome.applied and not self.transaction.failures)

    def _note_peak(self, outcome: StepOutcome) -> None:
        peak_bytes, dearest = self.transaction.work.peak_bytes, outcome.dearest
        if dearest is None or (self.peak is not None and peak_bytes <= self.peak.peak_bytes):
            return
        parts = self.parts
        spec = as_it_stands(self.bench.spec, parts.loaded, parts.loss, parts.guard)
        predictable = not any(remedy.name in UNPLANNED for remedy in parts.standing)
        self.peak = Peak(peak_bytes, dearest.rows, dearest.length, spec, predictable)

    def _write_step(self, outcome: StepOutcome, rate: float, seconds: float) -> None:
        memory = self.parts.device.memory()
        per_second = outcome.tokens / seconds
        peak_tflops = self.bench.spec.profile.device.peak_tflops
        mfu = self.bench.flops_per_token * per_second / (peak_tflops * 1e12) if peak_tflops else None
        self.journal.write(
            "step",
            step=self.state.step,
            epoch=round(self.bench.order.epoch_at(self.state.step), 4),
            loss=outcome.loss,
            learning_rate=rate,
            grad_norm=outcome.grad_norm,
            tokens=outcome.tokens,
            target_tokens=outcome.target_tokens,
            tokens_per_second=round(per_second, 1),
            step_seconds=round(seconds, 4),
            data_wait_seconds=round(outcome.data_wait_seconds, 4),
            mfu=mfu,
            micro_batches=outcome.micro_batches,
            largest_micro_batch=outcome.micro_batch_rows,
            allocated_bytes=memory.allocated_bytes,
            reserved_bytes=memory.reserved_bytes,
            peak_bytes=self.transaction.work.peak_bytes,
            skipped=not outcome.applied,
            samples=outcome.samples,
            budget=self.parts.budget.budget_bytes,
            **({"ranks": outcome.ranks} if outcome.ranks else {}),
            **({"loss_scale": self.parts.scaler.scale} if self.parts.scaler.enabled else {}),
        )

    def _between_steps(self) -> None:
        spec, step = self.bench.spec.recipe, self.state.step
        if self._has_validation and spec.eval.every_steps and step % spec.eval.every_steps == 0:
            self.evaluate()
        minutes = spec.checkpoint.every_minutes
        due = bool(minutes) and time.monotonic() - self._saved_at >= minutes * 60
        asked, due, look = self.ranks.from_first([self.wishes.checkpoint, due, self._gpus_are_due()])
        if asked:
            self.wishes.checkpoint = False
            self._save_if_possible("asked for")
        if spec.checkpoint.every_steps and step % spec.checkpoint.every_steps == 0:
            self._save_if_possible("every_steps")
        if due:
            self._save_if_possible("every_minutes")
        if look:
            self._read_gpus()

    def _gpus_are_due(self) -> bool:
        return self.parts.device.kind == "cuda" and time.monotonic() - self._gpu_read_at >= GPU_SECONDS

    def _read_gpus(self) -> None:
        """Every rank's reading of its own card; those of several machines are numbered by rank."""
        self._gpu_read_at = time.monotonic()
        here = [{name: getattr(reading, name) for name in GPU_FIELDS} for reading in self.parts.device.readings()]
        several_machines = self.bench.spec.profile.nodes.count > 1
        for rank, readings in enumerate(self.ranks.tell(here)):
            for reading in readings:
                self.journal.write("gpu", **{**reading, "index": rank if several_machines else reading["index"]})

    def _end_early(self) -> Ending:
        self.save(self.wishes.reason)
        if self.wishes.ending == "pause":
            self.journal.write("paused", step=self.state.step)
            return Ending("paused", self.wishes.reason)
        return Ending("stopped", self.wishes.reason)

    def _finish(self) -> Ending:
        if self._has_validation and self.state.last_evaluated != self.state.step:
            self.evaluate()
        self.save("end")
        self.journal.phase("saving", "result")
        folder = self.directory.adapter if self.parts.loaded.kind == "adapter" else self.directory.model
        self.ranks.behind_first(lambda: place_result(self._result_checkpoint(), folder))
        return Ending("done", "early stopping" if self._stop_early else "", folder.name)

    @property
    def samples_lost(self) -> int:
        """Sequences that a step should have learned from and did not (an fp16 overflow skips its step's)."""
        return self.state.samples_due - self.state.samples

    def measured(self) -> dict[str, Any]:
        """What memory was made of at the highest peak so far, by component; a prediction that missed is warned of."""
        found = measured(self.parts, self.peak)
        missed = miss(found)
        if missed:
            self.journal.warn("prediction_missed", *missed)
        return found

    def _result_checkpoint(self) -> Checkpoint:
        step = self.state.step
        if self.bench.spec.recipe.checkpoint.result == "best" and self.state.best.step is not None:
            step = self.state.best.step
        return Checkpoint(step, self.directory.checkpoint(step))

    def evaluate(self) -> None:
        """Score the validation set; note the best, save it, and count towards early stopping."""
        metrics = self.ranks.behind_first(self._score)
        if metrics is None:
            return
        self.state.last_evaluated = self.state.step
        if self.state.step:
            self._compare_with_best(metrics)
        self.journal.phase("training")

    def _score(self) -> dict[str, float] | None:
        """The metrics of the validation set; None when the evaluation was ended early."""
        validation = self.bench.prepared.validation
        if validation is None:
            return None
        asked = self.bench.spec.recipe.eval
        self.journal.phase("evaluating")
        began = time.perf_counter()
        try:
            scores = score(self._judge, validation, asked.metrics, limit=asked.limit, samples=asked.samples)
        except Interrupted:
            return None
        self.journal.write(
            "eval",
            step=self.state.step,
            metrics=scores.metrics,
            samples=scores.samples,
            count=scores.count,
            seconds=round(time.perf_counter() - began, 3),
        )
        return scores.metrics

    def _compare_with_best(self, metrics: dict[str, float]) -> None:
        spec, best = self.bench.spec.recipe, self.state.best
        name = spec.checkpoint.best_metric
        value = metrics.get(name)
        if value is None:
            return
        if is_better(value, best.value, name, spec.eval.early_stopping_threshold):
            self.state.best = Best(self.state.step, value)
            if not self._save_if_possible(f"best {name}"):
                self.state.best = best
            elif self.ranks.is_first:
                mark_best(self.directory.checkpoints, self.state.step, name, value)
        else:
            best.since += 1
        self._stop_early = self._out_of_patience()

    def _out_of_patience(self) -> bool:
        patience = self.bench.spec.recipe.eval.early_stopping_patience
        return patience is not None and self.state.best.since >= patience

    def _write_checkpoint(self) -> Checkpoint:
        bench = self.bench
        facts = settings(bench.spec, bench.total_steps)
        with self._reserve.lent(self.parts.device):
            return write_checkpoint(
                self.directory.checkpoints,
                self.state.step,
                lambda path: fill_checkpoint(path, self.parts, self.state, bench.identity, facts),
            )

    def _go_back_to(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.state()["settings"]
        here = settings(self.bench.spec, self.bench.total_steps)
        same_memory = saved["memory"] == here["memory"]
        self.state = retried(
            lambda: restore(checkpoint, self.parts, self.bench.identity, same_memory=same_memory),
            "restore",
            self.parts.device,
            self._retried,
        )
        self.last_saved = checkpoint.step
        self.state.best = Best(**self.ranks.behind_first(self._agree_on_the_best))
        if self.ranks.is_first:
            forget_after(self.directory.checkpoints, checkpoint.step)
            prune(self.directory.checkpoints, self.bench.spec.recipe.checkpoint.keep)
        same = saved["total_steps"] == here["total_steps"]
        # A run that is made longer after it stopped early goes on; one that was killed while it ended does not.
        self._stop_early = same and self._out_of_patience()
        self.journal.write(
            "resumed",
            step=self.state.step,
            schedule="unchanged" if same else f"recomputed for {here['total_steps']} steps",
            **{"from": str(checkpoint.path.relative_to(self.directory.path))},
        )

    def _agree_on_the_best(self) -> dict[str, Any]:
        """The best as its mark and its checkpoint bear it out."""
        best = self.state.best
        complaint = agree(self.directory.checkpoints, best, self.bench.spec.recipe.checkpoint.best_metric)
        if complaint:
            self.journal.warn("best_checkpoint_lost", complaint, "the best is chosen anew among evaluations to come")
        return asdict(best)

    def _reload_last(self) -> None:
        """An optimizer step failed half-way with nothing to undo it: go back to the last checkpoint."""
        checkpoint = self._newest()
        self._reloads += 1
        if checkpoint is None:
            self.sound = False
            raise MemoryExhaustedError(
                "out of memory inside the optimizer step, and there is no checkpoint to go back to",
                fix='start again with train.optimizer = "adamw", which allocates nothing in its step',
            )
        self._go_back_to(checkpoint)
        if self._reloads >= ATTEMPTS:
            raise MemoryExhaustedError(
                f"out of memory inside the optimizer step, {self._reloads} times in a row",
                fix='set train.optimizer = "adamw", which allocates nothing in its step, or method.kind = "lora"',
            )

    def _make_judge(self) -> Judge:
        parts = self.parts
        return Judge(
            device=parts.device,
            loaded=parts.loaded,
            loss=parts.loss,
            cost=parts.cost,
            budget=CostBudget(parts.budget.budget_bytes, parts.budget.top_bytes),
            generate=self.bench.spec.recipe.generate,
            report=self._evaluation_failed,
            interrupted=self.wishes.look,
        )

    def _retried(self, failure: Failure, remedy: str, number: int) -> None:
        self.state.backoffs += 1
        self.parts.report(Backoff(self.state.step, failure, Remedy(remedy), None, None, number))

    def _evaluation_failed(self, failure: Failure, remedy: str, before: Any, after: Any) -> None:
        self.state.backoffs += 1
        self.parts.report(Backoff(self.state.step, failure, Remedy(remedy, before, after), None, None, 1))
