"""Writes, prunes and restores the checkpoints of a running run, and makes one of them the result at the end.

How a folder becomes a checkpoint is in `engine.train.checkpoint.files`, what it holds in
`engine.train.checkpoint.run_state`. Rank 0 writes while the other ranks wait. Try: `pytest tests/train/test_resume.py
tests/train/test_checkpoints.py`
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from engine.device.catch_oom import retry_on_oom
from engine.device.oom import OutOfMemory
from engine.errors import MemoryExhaustedError
from engine.journal.checkpoints_on_disk import Checkpoint, newest_sound
from engine.train.checkpoint.best import agree
from engine.train.checkpoint.files import forget_after, place_result, prune, size_bytes, write_checkpoint
from engine.train.checkpoint.run_state import Best, RunState, fill_checkpoint, restore, settings
from engine.train.monitor.journal import until_there_is_room
from engine.train.recovery.emergency_memory import EmergencyHostMemory
from engine.train.recovery.records import RankOom, RecoveredOom
from engine.train.run_context import RunContext
from engine.train.setup import TrainingSetup


class CheckpointManager:
    """Writes `state`, and everything else that a resume needs, into the run's checkpoints, and restores a run from
    them."""

    def __init__(
        self,
        setup: TrainingSetup,
        state: RunState,
        run: RunContext,
        emergency_memory: EmergencyHostMemory,
    ) -> None:
        self._setup, self._state, self._directory = setup, state, run.directory
        self._journal, self._requests, self._watchdog = run.journal, run.requests, run.watchdog
        self._emergency_memory = emergency_memory
        self._context, self._ranks = setup.context, setup.context.ranks
        self._storage = setup.context.strategy.checkpoint_storage(setup.context.optimizer)
        self._saved_at = time.monotonic()
        self.last_saved: int | None = None
        """The step that the newest checkpoint holds."""

    @property
    def seconds_since(self) -> float:
        """Seconds since this process wrote a checkpoint last, or, if it has not yet, since this object was made."""
        return time.monotonic() - self._saved_at

    def save(self, reason: str) -> None:
        """Write a checkpoint of the current state, unless this step is saved already; waits while the disk is full.
        `reason` is written into the event `checkpoint`.

        Raises:
            MemoryExhaustedError: host memory ran out in every attempt.
            EnvironmentProblem: the run was asked to end while the disk was full.
        """
        if self.last_saved == self._state.step:
            return
        self._ranks.run_on_rank0(lambda: self._write(reason))
        self.last_saved, self._saved_at = self._state.step, time.monotonic()

    def save_if_possible(self, reason: str) -> bool:
        """Call `save`; returns whether that succeeded. If host memory does not suffice, write a warning and return
        False, so that the run can continue."""
        if self.last_saved == self._state.step:
            return True
        if not self._ranks.run_on_rank0(lambda: self._write_if_possible(reason)):
            return False
        self.last_saved, self._saved_at = self._state.step, time.monotonic()
        return True

    def newest(self, not_after: int | None = None) -> Checkpoint | None:
        """The newest undamaged checkpoint, None if there is none. With `not_after`, checkpoints of later steps than
        `not_after` are left out. All ranks call this; rank 0 alone reads and hashes the files."""
        step = self._ranks.run_on_rank0(lambda: self._newest_step(not_after))
        return None if step is None else Checkpoint(step, self._directory.checkpoint(step))

    def _newest_step(self, not_after: int | None) -> int | None:
        checkpoint, complaints = newest_sound(self._directory.checkpoints, not_after=not_after)
        for complaint in complaints:
            self._journal.warn("damaged_checkpoint", complaint, "the one before it is used")
        return checkpoint.step if checkpoint else None

    def restore_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Restore weights, optimizer and counters from `checkpoint`, and remove later checkpoints.

        Returns whether the run has the same total number of steps as when the checkpoint was saved.

        Raises:
            UsageError: the checkpoint belongs to other data, another tokenizer or seed, or other trainable parameters.
        """
        saved = checkpoint.state()["settings"]
        here = settings(self._setup.spec, self._setup.total_steps)
        same_memory = saved["memory"] == here["memory"]
        restored = retry_on_oom(
            lambda: restore(checkpoint, self._context, self._storage, self._setup.identity, same_memory=same_memory),
            "restore",
            self._context.device,
            self._retried,
        )
        self._state.become(restored)
        self.last_saved = checkpoint.step
        self._state.best = Best(**self._ranks.run_on_rank0(self._agree_on_the_best))
        if self._ranks.is_rank0:
            forget_after(self._directory.checkpoints, checkpoint.step)
            prune(self._directory.checkpoints, self._setup.spec.recipe.checkpoint.keep)
        same_length: bool = saved["total_steps"] == here["total_steps"]
        self._journal.write(
            "resumed",
            step=self._state.step,
            schedule="unchanged" if same_length else f"recomputed for {here['total_steps']} steps",
            **{"from": str(checkpoint.path.relative_to(self._directory.path))},
        )
        return same_length

    def place_result(self) -> str:
        """Copy the weights of the last or the best checkpoint (`checkpoint.result` in the recipe says which) to the
        run's result; returns the name of the result's folder. All ranks call this."""
        step = self._state.step
        if self._setup.spec.recipe.checkpoint.result == "best" and self._state.best.step is not None:
            step = self._state.best.step
        chosen = Checkpoint(step, self._directory.checkpoint(step))
        folder = self._directory.adapter if self._context.loaded.kind == "adapter" else self._directory.model
        self._journal.phase("saving", "result")
        self._ranks.run_on_rank0(lambda: place_result(chosen, folder))
        return folder.name

    def _write_if_possible(self, reason: str) -> bool:
        try:
            self._write(reason)
        except MemoryExhaustedError as error:
            found = f"step {self._state.step} was not saved: {error.found}"
            self._journal.warn("checkpoint_skipped", found, error.fix)
            return False
        return True

    def _write(self, reason: str) -> None:
        self._journal.phase("saving")
        began = time.perf_counter()
        checkpoint = until_there_is_room(
            lambda: retry_on_oom(self._write_checkpoint, "checkpoint", self._context.device, self._retried),
            self._requests.poll,
            self._journal.warn_of_full_disk,
        )
        prune(self._directory.checkpoints, self._setup.spec.recipe.checkpoint.keep)
        self._journal.write(
            "checkpoint_saved",
            step=self._state.step,
            path=str(checkpoint.path.relative_to(self._directory.path)),
            save_seconds=round(time.perf_counter() - began, 3),
            size_bytes=size_bytes(checkpoint.path),
            reason=reason,
        )
        self._journal.phase("training")

    def _write_checkpoint(self) -> Checkpoint:
        setup = self._setup
        facts = settings(setup.spec, setup.total_steps)
        name = f"the checkpoint of step {self._state.step}"
        with self._watchdog.over("checkpoint", name), self._emergency_memory.released(self._context.device):
            return write_checkpoint(
                self._directory.checkpoints,
                self._state.step,
                lambda path: fill_checkpoint(path, self._context, self._storage, self._state, setup.identity, facts),
            )

    def _agree_on_the_best(self) -> dict[str, Any]:
        """Make the record of the best checkpoint on disk equal to the run state. If that checkpoint is damaged, clear
        both and write a warning.

        Returns the best evaluation of the run state as JSON.
        """
        best = self._state.best
        complaint = agree(self._directory.checkpoints, best, self._setup.spec.recipe.checkpoint.best_metric)
        if complaint:
            self._journal.warn("best_checkpoint_lost", complaint, "the best is chosen anew among evaluations to come")
        return asdict(best)

    def _retried(self, failure: OutOfMemory, remedy: str, number: int) -> None:
        self._context.report(RecoveredOom(self._state.step, RankOom(failure), remedy, number))
