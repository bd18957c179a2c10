"""Writes, prunes and restores the checkpoints of a run, keeps the best, and makes one of them the result at the end.
Host memory for this is reserved from the start."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.device.base import Device
from engine.device.oom import OutOfMemory, retry_on_oom
from engine.distributed.ranks import Ranks
from engine.distributed.votes import LostRankError
from engine.errors import MemoryExhaustedError
from engine.journal.checkpoints_on_disk import Checkpoint, newest_sound
from engine.journal.control import BY_SIGNAL, RunRequests
from engine.journal.events import until_there_is_room
from engine.model.load import has_new_weights
from engine.model.reference import find_starting_weights
from engine.model.surplus import Unread, complete_result, to_copy
from engine.model.weight_account import WeightAccount
from engine.train.run.checkpoint_files import forget_after, mark_best, place_result, prune, size_bytes, write_checkpoint
from engine.train.run.plain_result import logits_of_run, open_result
from engine.train.run.run_context import RunContext
from engine.train.run.run_state import Best, RunState, agree, damage_for_resume, fill_checkpoint, restore, settings
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.failures import RankOom, RecoveredOom

RESERVE_BYTES = 12 * 2**20
"""Never touched, so it costs address space and no memory. safetensors writes through a buffer of 1 MiB; hashing, JSON
and the tokenizer's files come to a few more."""
NEEDED_BYTES = 4 * 2**20
"""Bytes that must be available when a checkpoint is begun."""

T = TypeVar("T")


class EmergencyHostMemory:
    """A reserved range of address space, which no other allocation can take until it is released. Libraries that write
    files are partly Rust, which ends the process when an allocation fails (seen under a limit on address space); Python
    cannot catch that."""

    def __init__(self) -> None:
        self._reserved: mmap.mmap | None = None
        self._reserve()

    @contextmanager
    def released(self, device: Device) -> Iterator[None]:
        """While the block runs, its allocations may use the reserve; afterwards it is reserved again if still
        available. RuntimeError, as of any failed host allocation, if even that is not enough to begin a checkpoint."""
        self._release()
        try:
            with device.host_region():
                torch.empty(NEEDED_BYTES, dtype=torch.uint8)  # freed at once: a check that this much is available
            yield
        finally:
            self._reserve()

    def _reserve(self) -> None:
        try:
            self._reserved = mmap.mmap(-1, RESERVE_BYTES)
        except OSError:
            self._reserved = None

    def _release(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None


def asked_to_end(requests: RunRequests, ranks: Ranks) -> bool:
    """Whether the user asked the run to end. Raises LostRankError for a signal to one of several ranks: a user's stop
    reaches those as a request, so the launcher ends them, because another rank is gone."""
    if not requests.poll():
        return False
    if ranks.size > 1 and requests.reason == BY_SIGNAL:
        raise LostRankError(
            "another rank ended while the run waited for space on its disk",
            fix="free some space; see the log of that rank",
        )
    return True


class CheckpointManager:
    """Rank 0 writes while the other ranks wait, or run what it requests."""

    def __init__(
        self, setup: TrainingSetup, state: RunState, run: RunContext, emergency_memory: EmergencyHostMemory
    ) -> None:
        self._setup, self._state, self._directory = setup, state, run.directory
        self._journal, self._requests, self._watchdog = run.journal, run.requests, run.watchdog
        self._emergency_memory = emergency_memory
        self._context, self._ranks = setup.context, setup.context.ranks
        self._storage = setup.context.strategy.checkpoint_storage(setup.context.optimizer)
        self._saved_at = time.monotonic()
        self.last_saved: int | None = None
        """The step that the newest checkpoint holds."""
        self._result: WeightAccount | None = None
        """What is in the result, once it is complete; on rank 0."""

    @property
    def seconds_since(self) -> float:
        """Since this process wrote a checkpoint last; if it has not yet, since this object was made."""
        return time.monotonic() - self._saved_at

    def save(self, reason: str) -> None:
        """Write a checkpoint unless this step has one; waits while the disk is full. `reason` goes into the event
        `checkpoint`.

        MemoryExhaustedError: host memory ran out in every attempt. EnvironmentProblem: asked to end while the disk was
        full.
        """
        self._save_by(self._write, reason)

    def save_if_possible(self, reason: str) -> bool:
        """`save`; if host memory does not suffice, warn and return False, so that the run can continue."""
        return self._save_by(self._write_if_possible, reason)

    def _save_by(self, write: Callable[[str], bool], reason: str) -> bool:
        if self.last_saved == self._state.step:
            return True
        if not self._ranks.run_on_rank0(lambda: write(reason)):
            return False
        self.last_saved, self._saved_at = self._state.step, time.monotonic()
        return True

    def newest(self, not_after: int | None = None) -> Checkpoint | None:
        """The newest undamaged checkpoint, up to step `not_after`. All ranks call this; rank 0 alone reads files."""
        step = self._ranks.run_on_rank0(lambda: self._newest_step(not_after))
        return None if step is None else Checkpoint(step, self._directory.checkpoint(step))

    def _newest_step(self, not_after: int | None) -> int | None:
        checkpoint, complaints = newest_sound(
            self._directory.checkpoints, not_after=not_after, inspect=damage_for_resume
        )
        for complaint in complaints:
            self._journal.warn("damaged_checkpoint", complaint, "using the one before it")
        return checkpoint.step if checkpoint else None

    def restore_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Restore weights, optimizer and counters, and remove later checkpoints; returns whether the total number of
        steps is the same as when it was saved. UsageError: it belongs to other data, tokenizer, seed or trainable
        parameters."""
        saved = checkpoint.state()["settings"]
        here = settings(self._setup.spec, self._setup.total_steps)
        same_memory = saved["memory"] == here["memory"]
        restored = retry_on_oom(
            lambda: restore(checkpoint, self._context, self._storage, self._setup.identity, same_memory=same_memory),
            "restore",
            self._context.device,
            self._retried,
        )
        self._journal.write("weights", **self._context.loaded.accounts[-1].event())
        self._state.become(restored)
        self.last_saved = checkpoint.step
        self._state.best = Best(**self._ranks.run_on_rank0(self._agree_on_the_best))
        if self._ranks.is_rank0:
            self._when_there_is_room(lambda: forget_after(self._directory.checkpoints, checkpoint.step))
            self._prune()
        same_length: bool = saved["total_steps"] == here["total_steps"]
        self._journal.write(
            "resumed",
            step=self._state.step,
            schedule="unchanged" if same_length else f"recomputed for {here['total_steps']} steps",
            **{"from": str(checkpoint.path.relative_to(self._directory.path))},
        )
        return same_length

    def place_result(self) -> str:
        """Copy the last or best checkpoint's weights to the run's result; returns its name. All ranks call this."""
        step = self._state.step
        if self._setup.spec.recipe.checkpoint.result == "best" and self._state.best.step is not None:
            step = self._state.best.step
        chosen = Checkpoint(step, self._directory.checkpoint(step))
        folder = self._directory.adapter if self._context.loaded.kind == "adapter" else self._directory.model
        self._journal.phase("saving", "result")
        spec, state = self._setup.spec, self._state
        ours = logits_of_run(spec, self._context, None if step == state.step else chosen.weights)
        complete = partial(self._complete, folder.name, ours)
        self._ranks.run_on_rank0(lambda: self._when_there_is_room(lambda: place_result(chosen, folder, complete)))
        if self._result is not None:
            self._journal.write("weights", **self._result.event())
        return folder.name

    def _complete(self, name: str, ours: list[Tensor] | None, draft: Path) -> None:
        """Give the result of full fine-tuning what its base has in addition to the trained weights, and open the result
        without our code."""
        loaded, spec = self._context.loaded, self._setup.spec
        start, unread = find_starting_weights(spec.recipe.model), list[Unread]()
        if isinstance(loaded.model, PreTrainedModel) and not has_new_weights(spec, start):
            unread = complete_result(draft, start.base, start.revision, loaded.model)
        copied = {each.entry.name: each.reason for each in to_copy(unread)}
        self._journal.phase("saving", "opening the result without Tunedeck")
        self._result = open_result(spec, loaded, draft, name, ours, copied)

    def mark_best(self, metric: str, value: float) -> None:
        """Record on disk that this step's checkpoint is the best; waits while the disk is full."""
        self._when_there_is_room(lambda: mark_best(self._directory.checkpoints, self._state.step, metric, value))

    def _when_there_is_room(self, write: Callable[[], T]) -> T:
        return until_there_is_room(
            write, lambda: asked_to_end(self._requests, self._ranks), self._journal.warn_of_full_disk
        )

    def _write_if_possible(self, reason: str) -> bool:
        try:
            return self._write(reason)
        except MemoryExhaustedError as error:
            found = f"step {self._state.step} was not saved: {error.found}"
            self._journal.warn("checkpoint_skipped", found, error.fix)
            return False

    def _write(self, reason: str) -> bool:
        self._journal.phase("saving")
        began = time.perf_counter()
        checkpoint = self._when_there_is_room(
            lambda: retry_on_oom(self._write_checkpoint, "checkpoint", self._context.device, self._retried)
        )
        self._prune()
        self._journal.write(
            "checkpoint_saved",
            step=self._state.step,
            path=str(checkpoint.path.relative_to(self._directory.path)),
            save_seconds=round(time.perf_counter() - began, 3),
            size_bytes=size_bytes(checkpoint.path),
            reason=reason,
        )
        self._journal.phase("training")
        return True

    def _prune(self) -> None:
        """Remove old checkpoints, which takes room on some file systems."""
        keep, best = self._setup.spec.recipe.checkpoint.keep, [int(step) for step in self._state.scored]
        self._when_there_is_room(lambda: prune(self._directory.checkpoints, keep, best))

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
        """Make the record on disk equal to the run state; clear both, with a warning, if that checkpoint is damaged."""
        best = self._state.best
        metric = self._setup.spec.recipe.checkpoint.best_metric
        complaint = self._when_there_is_room(lambda: agree(self._directory.checkpoints, best, metric))
        if complaint:
            self._journal.warn(
                "best_checkpoint_lost", complaint, "the best is now chosen among the following evaluations"
            )
        return asdict(best)

    def _retried(self, failure: OutOfMemory, remedy: str, number: int) -> None:
        self._context.report(RecoveredOom(self._state.step, RankOom(failure), remedy, number))
