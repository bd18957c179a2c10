"""Shortens generated answers to the positions that a model with a table of positions has behind a prompt.

The limit is one for a whole data set: it follows from the longest prompt, so that an answer does not depend on the
prompts that are generated with it.

Try: `python -m pytest tests/evaluate/test_generation.py`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.budget.architecture.positions import table_of_positions
from engine.data.tokens import TokenData
from engine.spec.schema.recipe import Generate


def within_positions(settings: Generate, facts: Mapping[str, Any], data: TokenData) -> tuple[Generate, str | None]:
    """The settings for answers to the prompts of `data`, and a sentence if answers must be shorter than they ask for.

    `facts` are the model's config. No prompt may be longer than the model's positions.
    """
    positions = table_of_positions(facts)
    if positions is None:
        return settings, None
    longest = int(data.columns.answer_starts[data.documents[data.row_offsets[:-1]]].max())
    room = max(1, positions - longest)
    if settings.max_new_tokens <= room:
        return settings, None
    note = (
        f"answers end after {room} tokens, not {settings.max_new_tokens} (generate.max_new_tokens): the model has "
        f"{positions} positions, and the longest prompt takes {longest}; a lower data.max_length leaves more room"
    )
    return settings.model_copy(update={"max_new_tokens": room}), note
