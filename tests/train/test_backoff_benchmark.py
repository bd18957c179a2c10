"""The benchmark of what an OOM costs runs at a small size, and its counts are right. Timings are not checked."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.backoff import measure
from benchmarks.batch_size_search import Size
from benchmarks.job import BATCH


@pytest.mark.torture
def test_every_figure_is_measured_and_the_job_keeps_its_steps_and_its_batch(tmp_path: Path) -> None:
    figures = measure(Size(hidden=32, length=64, short=16, rounds=2), tmp_path)
    ours, theirs = figures.pop("job, tunedeck"), figures.pop("job, Trainer")
    co_tenant = figures.pop("co-tenant: tokens/s over before")
    assert co_tenant["failures"] == 1 and co_tenant["steps to recover"] > 0
    assert co_tenant["squeezed"] > 0 and co_tenant["recovered"] > 0
    numbers = [number for figure in figures.values() for number in (figure if isinstance(figure, list) else [figure])]
    assert all(math.isfinite(number) for number in numbers)
    assert (ours["steps_executed"], ours["effective_batch"]) == (16, BATCH)
    assert 0 < ours["samples_repeated"] <= BATCH
    assert theirs["effective_batch"] < BATCH and theirs["steps_executed"] > 16
