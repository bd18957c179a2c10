"""Evaluation with weights that are spread over ranks: all ranks run every forward pass that rank 0 requests.

Rank 0 decides what is computed, also after memory ran out. It requests each forward pass from all ranks, which run the
same samples; only rank 0 uses the result. No rank starts a pass unless all ranks do.

Try: `tunedeck train -p demo-2 -r demo --set parallel.strategy=sharded`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor
from transformers import LogitsProcessor

from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.catch_oom import catch_oom
from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.distributed.voted_group import VotedGroup
from engine.evaluate.scores import EvaluationContext, generate_answers, loss_sum
from engine.model.loss import eval_mode
from engine.train.recovery.consensus import gather_failures, smallest_failed


class CollectiveEvaluation:
    """Runs every evaluation pass of `context` over `data` on all ranks. Every rank creates an instance."""

    def __init__(self, context: EvaluationContext, data: TokenData, ranks: Ranks, sharded: ShardedModel) -> None:
        self._context, self._data, self._ranks, self._sharded = context, data, ranks, sharded
        self._asked_for: Callable[[], None] | None = None
        self._failure: OutOfMemory | None = None
        context.run_on_all_ranks = self.perform
        context.logits_processors.append(SameTokens(sharded.voted_group, context.device))
        ranks.handlers |= {kind: self._duty(kind) for kind in ("evaluate", "generate")}

    def perform(self, kind: str, members: Sequence[int], action: Callable[[], None]) -> OutOfMemory | None:
        """On rank 0: run `action` here and the same forward pass on the other ranks; returns the allocation failure
        of the lowest rank on which memory ran out, or None."""
        self._asked_for, self._failure = action, None
        self._ranks.request(kind, members=[int(member) for member in members])
        self._asked_for = None
        return self._failure

    def _duty(self, kind: str) -> Callable[..., None]:
        passes: dict[str, Callable[[list[int]], object]] = {
            "evaluate": lambda members: loss_sum(self._context, self._data, np.array(members)),
            "generate": lambda members: generate_answers(self._context, self._data, members),
        }

        def duty(members: list[int]) -> None:
            self._run(kind, self._asked_for or (lambda: passes[kind](members)))

        return duty

    def _run(self, kind: str, action: Callable[[], object]) -> None:
        device = self._context.device

        def run() -> None:
            model = self._context.loaded.model
            with eval_mode(model), self._sharded.forward_only(gathers_head=kind == "generate"):
                action()

        failure = catch_oom(lambda: self._sharded.voted_group.run_together(run), device, kind)
        failed = gather_failures(self._ranks, failure, None, device)
        if failed:
            device.release_cached()
            self._context.failed_rank, self._failure = smallest_failed(failed).rank, smallest_failed(failed).failure


class SameTokens(LogitsProcessor):
    """Makes every rank continue generated answers with the tokens that rank 0 chose. Rounding may differ between
    devices, and a rank that ended an answer early would be missing from the next all-gather."""

    def __init__(self, voted_group: VotedGroup, device: Device) -> None:
        self._joint, self._device = voted_group, device

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set the scores [B, V] to minus infinity, except for the token of each row that rank 0 chose; returns the
        scores."""
        with self._device.host_region():
            tokens_B = scores.argmax(-1).cpu()
            self._joint.broadcast_object(tokens_B)
            tokens_B1 = tokens_B.unsqueeze(-1).to(scores.device)
            return scores.fill_(float("-inf")).scatter_(1, tokens_B1, 0.0)
