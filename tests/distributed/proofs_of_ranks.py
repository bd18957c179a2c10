"""Makes the proofs among ranks one at a time on real ranks, whole and with what they are about broken on purpose.

Not a test module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.distributed.ranks import Ranks
from engine.errors import EnvironmentProblem
from engine.journal.events import Journal
from engine.train.run.training_setup import TrainingSetup
from engine.verify.record import Proof
from engine.verify.verify import prove
from tests.distributed.rank_workbench import FULL, RankWorkbench, sharded, small_model

Break = Callable[[pytest.MonkeyPatch, TrainingSetup], None]
"""Breaks something with the monkeypatch that it is given, on this rank."""


@contextmanager
def sharded_setup(folder: Path, ranks: Ranks, name: str = "parameters", **tables: Any) -> Iterator[TrainingSetup]:
    """The setup of a small full fine-tuning in shards, on an active metered device."""
    work = RankWorkbench(folder, ranks, small_model(folder, {**sharded(FULL, name), **tables}))
    try:
        yield work.setup
    finally:
        work.close()


def outcome(setup: TrainingSetup, proof: Proof, breaking: Break | None = None) -> tuple[bool | None, str, str]:
    """(passed, detail, fallback) of one proof that all ranks make, after `breaking`. A fallback that ends the run is
    returned, too."""
    told: list[dict[str, Any]] = []

    class Noting(Journal):
        def write(self, kind: str, **fields: Any) -> None:
            told.append(fields)

    with pytest.MonkeyPatch.context() as patch:
        if breaking is not None:
            breaking(patch, setup)
        try:
            prove(setup, Noting(None), proofs=[proof], afresh=True)
        except EnvironmentProblem:
            assert "it ends" in told[0]["fallback"]
    (event,) = told
    return event["passed"], event["detail"], event["fallback"]
