"""Evaluation with weights that are spread over ranks: every rank scores samples of its own in each forward pass.

Rank 0 decides what is computed, also after memory ran out. It requests each pass from all ranks, with a list of samples
for each. Every forward gathers weights on all ranks, so a rank without samples repeats one of another rank, and answers
are generated until those of all ranks have ended. No rank starts a pass unless all ranks do.

Try: `tunedeck train -p demo-2 -r demo --set parallel.strategy=sharded`
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from engine.data.tokens import TokenData
from engine.device.catch_oom import catch_oom
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.evaluate.context import PASSES, EvaluationContext, FailedPass
from engine.model.decoder import eval_mode
from engine.train.recovery.consensus import gather_failures, smallest_failed
from engine.train.strategy.shared_evaluation import gather_results


def join_evaluation(
    context: EvaluationContext, data: TokenData, ranks: Ranks, sharded: ShardedModel
) -> EvaluationContext:
    """Register handlers for the passes of an evaluation of `data`; returns the context with which rank 0 evaluates, and
    whose passes are shared by all ranks. All ranks call this."""
    voted_group, device = sharded.voted_group, context.device
    on_each_rank = replace(context, all_ended=voted_group.all_true)

    def run(kind: str, parts: list[list[int]]) -> list[Any] | FailedPass:
        has_samples = ranks.rank < len(parts)
        samples = parts[ranks.rank] if has_samples else parts[-1][-1:]
        results: list[Any] = []

        def forward() -> None:
            with eval_mode(context.loaded.model), sharded.forward_only(gathers_head=kind == "generate"):
                results.append(PASSES[kind](on_each_rank, data, samples))

        failure = catch_oom(lambda: voted_group.run_together(forward), device, kind)
        failed = gather_failures(ranks, failure, None, device)
        if not failed:
            return [each[0] for each in gather_results(ranks, results if has_samples else []) if each]
        device.release_cached()
        oom = smallest_failed(failed)
        return FailedPass(oom.failure, oom.rank)

    ranks.handlers |= {kind: partial(run, kind) for kind in PASSES}
    request = ranks.request
    return replace(on_each_rank, shares=ranks.size, run_on_all_ranks=lambda kind, parts: request(kind, parts=parts))
