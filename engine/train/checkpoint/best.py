"""The best evaluation so far: what beats it, and how its mark beside the checkpoints is kept equal to the run state.

Try: `pytest tests/train/test_best.py`
"""

from __future__ import annotations

from pathlib import Path

from engine.journal.checkpoints_on_disk import PREFIX, Checkpoint, damage
from engine.train.checkpoint.files import mark_best, unmark_best
from engine.train.checkpoint.run_state import Best

LOWER_IS_BETTER = {"loss", "perplexity"}


def is_better(value: float, best: float | None, metric: str, threshold: float) -> bool:
    """Whether `value` beats the best by more than `threshold`; the first value always does."""
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    return best is None or sign * (value - best) > threshold


def agree(folder: Path, best: Best, metric: str) -> str | None:
    """Make the mark in the folder of checkpoints agree with the state; a crash may have left them different.

    A best whose checkpoint is gone or damaged is forgotten, and the next evaluation is the first to compare with;
    returns the sentence to warn with, else None.
    """
    complaint = None
    if best.step is not None:
        problem = damage(Checkpoint(best.step, folder / f"{PREFIX}{best.step:08d}"))
        if problem:
            complaint = f"the best checkpoint, of step {best.step}, cannot be used: {problem}"
            best.step, best.value, best.since = None, None, 0
    if best.step is None or best.value is None:
        unmark_best(folder)
    else:
        mark_best(folder, best.step, metric, best.value)
    return complaint
