"""Evaluation on all ranks: each scores samples of its own in each forward pass, and rank 0 collects the results.

Rank 0 decides what is computed, also after memory ran out: it requests each pass from all ranks, with a list of samples
for each, and repeats a pass that failed on any of them in smaller parts. Where weights are sharded, every forward
gathers them on all ranks, so a rank without samples repeats one of another rank, answers are generated until those of
all ranks have ended, and no rank starts a pass unless all do.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from engine.device.oom import catch_oom
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.evaluate.context import PASSES, EvaluationContext, FailedPass, Questions
from engine.model.decoder import eval_mode
from engine.train.step.failures import gather_failures, smallest_failed

PIECE_CHARACTERS = 16 * 1024
"""Characters of a rank's result that are sent at once; escaped, they fit the slot of an exchange."""


def share_evaluation(
    context: EvaluationContext, data: Questions, ranks: Ranks, sharded: ShardedModel | None = None, name: str = ""
) -> EvaluationContext:
    """Register handlers for the passes of an evaluation of `data`, and of the mismatched sequences that it may have;
    returns the context with which rank 0 evaluates, and whose passes are shared by all ranks. All ranks call this, with
    a `name` of its own for each data set. `sharded`: the model, if its weights are sharded."""
    on_each_rank = replace(context, all_ended=sharded.voted_group.all_true) if sharded else context

    other = getattr(data, "mismatched", None)

    def run(kind: str, asked: Questions, parts: list[list[int]]) -> list[Any] | FailedPass:
        has_samples = ranks.rank < len(parts)
        samples = parts[ranks.rank] if has_samples else parts[-1][-1:]
        results: list[Any] = []

        def compute() -> None:
            weights = sharded.forward_only(gathers_head=kind == "generate") if sharded else nullcontext()
            with eval_mode(context.loaded.model), weights:
                results.append(PASSES[kind](on_each_rank, asked, samples))

        def forward() -> None:
            if sharded:
                sharded.voted_group.run_together(compute)
            elif has_samples:
                compute()

        failed = gather_failures(ranks, catch_oom(forward, context.device, kind), None, context.device)
        if not failed:
            return [each[0] for each in gather_results(ranks, results if has_samples else []) if each]
        context.device.release_cached()
        oom = smallest_failed(failed)
        return FailedPass(oom.failure, oom.rank)

    ranks.handlers |= {name + kind: partial(run, kind, data) for kind in PASSES}
    ranks.handlers |= {f"{name}mismatched: {kind}": partial(run, kind, other) for kind in PASSES if other is not None}

    def request(kind: str, asked: Questions, parts: list[list[int]]) -> Any:
        return ranks.request(f"{name}{'' if asked is data else 'mismatched: '}{kind}", parts=parts)

    return replace(on_each_rank, shares=ranks.size, run_on_all_ranks=request)


def gather_results(ranks: Ranks, results: list[Any]) -> list[list[Any]]:
    """Every rank's list `results` (JSON), in the order of ranks, sent in pieces that fit one exchange."""
    text = json.dumps(results)
    rounds = max(-(-length // PIECE_CHARACTERS) for length in ranks.all_gather_object(len(text)))
    pieces = [
        ranks.all_gather_object(text[number * PIECE_CHARACTERS : (number + 1) * PIECE_CHARACTERS])
        for number in range(rounds)
    ]
    return [json.loads("".join(piece[rank] for piece in pieces)) for rank in range(ranks.size)]
