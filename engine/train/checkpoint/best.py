"""The best evaluation so far: which results beat it, and how its record beside the checkpoints is made equal to the run
state.

Try: `pytest tests/train/test_best.py`
"""

from __future__ import annotations

from pathlib import Path

from engine.journal.checkpoints_on_disk import PREFIX, Checkpoint, damage
from engine.journal.score_groups import LOWER_IS_BETTER
from engine.train.checkpoint.files import mark_best, unmark_best
from engine.train.checkpoint.run_state import Best


def is_better(value: float, best: float | None, metric: str, threshold: float) -> bool:
    """Whether `value` beats `best` by more than `threshold`: lower is better for loss and perplexity, higher for other
    metrics. Always true while there is no best value yet."""
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    return best is None or sign * (value - best) > threshold


def agree(folder: Path, best: Best, metric: str) -> str | None:
    """Write `best`, the run state's best evaluation by `metric`, into the record on disk of the best checkpoint. After
    a crash the two may differ.

    If the best checkpoint is missing or damaged, `best` is cleared, so that the next evaluation counts as the best, and
    a sentence for a warning is returned. Otherwise returns None.
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
