"""Rows that are tokens already: `input_ids`, with labels or masks that say which of them are targets."""

from __future__ import annotations

from typing import Any

from engine.data.conversations import parsed
from engine.data.records import Dropped, TokenRecord

MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns of zeros and ones, with ones at targets."""

IGNORED = -100
"""A label that is not a target."""


def token_row(values: dict[str, Any]) -> TokenRecord | Dropped:
    """Return the tokens of a row and which of them are targets: those that labels and all masks learn, by default all.
    Tokens outside the attention mask are padding and left out.

    Dropped: a column is not a list of integers as long as input_ids, labels are other tokens, or positions or the
    attention mask show several documents.
    """
    columns = {name: _numbers(value) for name, value in values.items() if value is not None}
    if "input_ids" not in columns:
        return Dropped("input_ids is missing")
    ids = columns["input_ids"] or []
    for name, numbers in columns.items():
        if numbers is None:
            return Dropped(f"{name} is not a list of integers")
        if len(numbers) != len(ids):
            return Dropped(f"{name} is not as long as input_ids")
    for name in ("attention_mask", *MASKS):
        if not set(columns.get(name) or ()) <= {0, 1}:
            return Dropped(f"{name} has other values than 0 and 1")
    attended = columns.get("attention_mask") or [1] * len(ids)
    start = attended.index(1) if 1 in attended else len(ids)
    stop = len(ids) - attended[::-1].index(1) if 1 in attended else len(ids)
    if 0 in attended[start:stop]:
        return Dropped("attention_mask has zeros between ones, and every token of a sequence is attended to")
    positions = columns.get("position_ids")
    if positions is not None and positions[start:stop] != list(range(stop - start)):
        return Dropped("position_ids do not count from 0: rows of several documents are made by data.packing")
    labels = columns.get("labels") or ids
    if any(label not in (token, IGNORED) for token, label in zip(ids, labels, strict=True)):
        return Dropped(f"a label is neither {IGNORED} nor the token of the same place")
    masks = [mask for name in MASKS if (mask := columns.get(name)) is not None]
    targets = [label != IGNORED and all(mask[place] for mask in masks) for place, label in enumerate(labels)]
    return TokenRecord(tuple(ids[start:stop]), tuple(targets[start:stop]))


def _numbers(value: Any) -> list[int] | None:
    """A list of whole numbers or of true and false, also from JSON text; None for anything else."""
    value = parsed(value) if isinstance(value, str) else value
    value = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        return None
    return [int(each) for each in value]
