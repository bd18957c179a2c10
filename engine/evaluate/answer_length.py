"""Shortens generated answers for models with learned position embeddings, which have a fixed number of positions for
prompt and answer together.

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
    """Return the settings of generation with max_new_tokens lowered, so that prompt and answer fit into the model's
    positions, and a sentence that says so. Unchanged settings and None if answers fit, or positions are unlimited.

    `facts` are the model's config, `data` has the prompts, none of which may be longer than the model's positions.
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
