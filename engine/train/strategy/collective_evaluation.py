"""Evaluation with weights that are spread over ranks: all ranks run every forward pass that rank 0 requests.

Rank 0 decides what is computed, also after memory ran out. It requests each forward pass from all ranks, which run the
same samples; only rank 0 uses the result. No rank starts a pass unless all ranks do.

Try: `tunedeck train -p demo-2 -r demo --set parallel.strategy=sharded`
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.catch_oom import catch_oom
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.distributed.voted_group import VotedGroup
from engine.evaluate.context import PASSES, EvaluationContext, FailedPass
from engine.model.loss import eval_mode
from engine.train.recovery.consensus import gather_failures, smallest_failed


def join_evaluation(
    context: EvaluationContext, data: TokenData, ranks: Ranks, sharded: ShardedModel
) -> EvaluationContext:
    """Register handlers for the passes of an evaluation of `data`; returns the context with which rank 0 evaluates, and
    whose passes run on all ranks. All ranks call this."""
    voted_group, device = sharded.voted_group, context.device
    processors = LogitsProcessorList([*context.logits_processors, SameTokens(voted_group, device)])
    on_each_rank = replace(context, logits_processors=processors)

    def run(kind: str, parts: list[list[int]]) -> Any:
        results: list[Any] = []

        def forward() -> None:
            with eval_mode(context.loaded.model), sharded.forward_only(gathers_head=kind == "generate"):
                results.append(PASSES[kind](on_each_rank, data, parts[0]))

        failure = catch_oom(lambda: voted_group.run_together(forward), device, kind)
        failed = gather_failures(ranks, failure, None, device)
        if not failed:
            return results
        device.release_cached()
        oom = smallest_failed(failed)
        return FailedPass(oom.failure, oom.rank)

    ranks.handlers |= {kind: partial(run, kind) for kind in PASSES}
    return replace(on_each_rank, run_on_all_ranks=lambda kind, parts: ranks.request(kind, parts=parts))


class SameTokens(LogitsProcessor):
    """Makes every rank continue generated answers with the tokens that rank 0 chose. Rounding may differ between
    devices, and a rank that ended an answer early would be missing from the next all-gather."""

    def __init__(self, voted_group: VotedGroup, device: Device) -> None:
        self._voted_group, self._device = voted_group, device

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set the scores [B, V] to minus infinity, except for the token of each row that rank 0 chose; returns the
        scores."""
        with self._device.host_region():
            tokens_B = scores.argmax(-1).cpu()
            self._voted_group.broadcast_tensor(tokens_B)
            tokens_B1 = tokens_B.unsqueeze(-1).to(scores.device)
            return scores.fill_(float("-inf")).scatter_(1, tokens_B1, 0.0)
