"""The benchmark of what an out-of-memory costs runs, small, and what it counts is right. Its timings are not judged."""

from __future__ import annotations

import math

from benchmarks.backoff import BATCH, Size, measure


def test_every_figure_is_measured_and_the_job_keeps_its_steps_and_its_batch(tmp_path):
    figures = measure(Size(hidden=32, length=64, short=16, rounds=2), tmp_path)
    ours, theirs = figures.pop("job, tunedeck"), figures.pop("job, Trainer")
    neighbour = figures.pop("neighbour: tokens/s over before")
    assert neighbour["failures"] == 1 and neighbour["steps to recover"] > 0
    assert neighbour["squeezed"] > 0 and neighbour["recovered"] > 0
    numbers = [number for figure in figures.values() for number in (figure if isinstance(figure, list) else [figure])]
    assert all(math.isfinite(number) for number in numbers)
    assert (ours["steps_executed"], ours["effective_batch"]) == (16, BATCH)
    assert 0 < ours["samples_repeated"] <= BATCH
    assert theirs["effective_batch"] < BATCH and theirs["steps_executed"] > 16
