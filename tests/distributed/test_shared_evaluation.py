"""Replicated ranks share the samples of an evaluation: each scores its own, and the scores are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.rank_workbench import spec_of
from tests.distributed.supervised import engine_ends, events
from tests.train.run_helpers import new_run, of_kind


def test_two_ranks_give_the_scores_and_answers_of_one(folder: Path) -> None:
    tables: dict[str, Any] = {
        "train": {"max_steps": 1}, "data": {"valid_fraction": 0.3}, "generate": {"max_new_tokens": 5},
        "eval": {"metrics": ["loss", "exact_match"], "samples": 3, "prompts": ["When?", "x", "Where?"]},
    }  # fmt: skip
    found = []
    for ranks in (1, 2):
        place = new_run(folder / f"shared-{ranks}", spec_of(folder, ranks, tables))
        assert engine_ends(place) == 0
        found.append(of_kind(events(place), "eval")[-1])
    alone, shared = found
    assert shared["count"] == alone["count"] > 3
    assert shared["samples"] == alone["samples"]
    assert shared["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
