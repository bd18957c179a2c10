"""Evaluation with replicated weights: every rank scores samples of its own, and rank 0 collects the results.

Rank 0 requests each pass from all ranks, with a list of samples for each. A pass contains no collectives; if memory
runs out on one rank, the pass failed, and rank 0 requests it again in smaller parts.

Try: `pytest tests/distributed/test_shared_evaluation.py`
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from engine.data.tokens import TokenData
from engine.device.catch_oom import catch_oom
from engine.distributed.ranks import Ranks
from engine.evaluate.context import PASSES, EvaluationContext, FailedPass
from engine.model.decoder import eval_mode
from engine.train.recovery.consensus import gather_failures, smallest_failed

PIECE_CHARACTERS = 16 * 1024
"""Characters of a rank's result that are sent at once; escaped, they fit the slot of an exchange."""


def share_evaluation(context: EvaluationContext, data: TokenData, ranks: Ranks) -> EvaluationContext:
    """Register handlers for the passes of an evaluation of `data`; returns the context with which rank 0 evaluates, and
    whose passes are shared by all ranks. All ranks call this."""

    def run(kind: str, parts: list[list[int]]) -> list[Any] | FailedPass:
        results: list[Any] = []

        def forward() -> None:
            if ranks.rank < len(parts):
                with eval_mode(context.loaded.model):
                    results.append(PASSES[kind](context, data, parts[ranks.rank]))

        failure = catch_oom(forward, context.device, kind)
        failed = gather_failures(ranks, failure, None, context.device)
        if not failed:
            return [each[0] for each in gather_results(ranks, results) if each]
        context.device.release_cached()
        oom = smallest_failed(failed)
        return FailedPass(oom.failure, oom.rank)

    ranks.handlers |= {kind: partial(run, kind) for kind in PASSES}
    request = ranks.request
    return replace(context, shares=ranks.size, run_on_all_ranks=lambda kind, parts: request(kind, parts=parts))


def gather_results(ranks: Ranks, results: list[Any]) -> list[list[Any]]:
    """Every rank's list `results` (JSON), in the order of ranks. All ranks call this. Long lists are sent in several
    exchanges, because the size of one exchange is limited."""
    text = json.dumps(results)
    rounds = max(-(-length // PIECE_CHARACTERS) for length in ranks.all_gather_object(len(text)))
    pieces = [
        ranks.all_gather_object(text[number * PIECE_CHARACTERS : (number + 1) * PIECE_CHARACTERS])
        for number in range(rounds)
    ]
    return [json.loads("".join(piece[rank] for piece in pieces)) for rank in range(ranks.size)]
