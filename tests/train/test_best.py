"""The best checkpoint: which evaluation results replace it, and that the run's state and the mark on disk agree after
an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.journal.checkpoints_on_disk import best_step
from engine.train.run.checkpoint_files import mark_best, write_checkpoint
from engine.train.run.run_state import Best, agree, is_better


@pytest.mark.parametrize(
    ("metric", "value", "best", "threshold", "better"),
    [
        ("loss", 1.0, None, 0.0, True),
        ("loss", 0.9, 1.0, 0.0, True),
        ("loss", 1.0, 1.0, 0.0, False),
        ("loss", 0.95, 1.0, 0.1, False),
        ("perplexity", 3.0, 2.0, 0.0, False),
        ("exact_match", 0.9, 0.8, 0.0, True),
        ("exact_match", 0.8, 0.9, 0.0, False),
    ],
)
def test_what_beats_the_best(metric: str, value: float, best: float | None, threshold: float, better: bool) -> None:
    assert is_better(value, best, metric, threshold) is better


def fill(path: Path) -> None:
    (path / "state.json").write_text("{}")


def write(folder: Path, step: int) -> None:
    write_checkpoint(folder, step, fill)


def test_a_mark_that_a_crash_left_behind_follows_the_state(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 6)
    mark_best(tmp_path, 3, "loss", 2.0)
    assert agree(tmp_path, Best(6, 1.0, 0), "loss") is None
    assert best_step(tmp_path) == 6


def test_a_mark_from_a_future_that_was_voided_goes(tmp_path: Path) -> None:
    write(tmp_path, 6)
    mark_best(tmp_path, 6, "loss", 2.0)
    assert agree(tmp_path, Best(), "loss") is None
    assert best_step(tmp_path) is None


def test_a_best_that_is_gone_is_forgotten_and_said(tmp_path: Path) -> None:
    write(tmp_path, 6)
    best = Best(3, 1.0, 2)
    complaint = agree(tmp_path, best, "loss")
    assert complaint is not None and "step 3" in complaint
    assert best == Best()
    assert best_step(tmp_path) is None
