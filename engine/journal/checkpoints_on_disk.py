"""What lies in a run's checkpoints, read without torch: their steps, which is the best, and what was learned of memory.

Their contents are not checked here: whether one can be believed is `engine.train.checkpoint.files`'s affair.

Try: `tunedeck show last --json`
"""

from __future__ import annotations

import json
from typing import Any

from engine.journal.directory import RunDirectory

LEARNED = ("budget_bytes", "proven_bytes", "ceiling_bytes", "passing_bytes", "slope")
"""Of the learned cost model: predicted bytes a micro-batch may cost, cost at most so far, failed at, failed at beside a
neighbour; and real bytes for each predicted one."""


def saved_steps(directory: RunDirectory) -> list[int]:
    """Steps of the checkpoints that are on disk, oldest first."""
    names = (path.name.removeprefix("step-") for path in directory.checkpoints.glob("step-*"))
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def best_saved(directory: RunDirectory) -> int | None:
    """The step of the checkpoint that is marked best; None where none is, or the mark cannot be read."""
    try:
        return int(json.loads((directory.checkpoints / "best").read_text("utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def learned(directory: RunDirectory) -> dict[str, Any] | None:
    """The cost model of the newest checkpoint that can be read: its step, the figures of LEARNED, and the remedies in
    force. None before the first."""
    for step in reversed(saved_steps(directory)):
        try:
            state = json.loads((directory.checkpoint(step) / "state.json").read_text("utf-8"))
            budget = {name: state["budget"][name] for name in LEARNED}
            return {"step": step, **budget, "remedies": dict(state["remedies"])}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None
