"""Finds out from a recipe's keys whether it trains on images; no data are read.

Try: `python -m pytest tests/budget/test_vision.py`
"""

from __future__ import annotations

from engine.spec.check.data_rules import sources_of
from engine.spec.schema.data import IMAGE_FORMATS
from engine.spec.schema.recipe import Recipe


def image_key(recipe: Recipe) -> str | None:
    """The first key by which a recipe asks for training on images, as text for a message; None if it trains on text
    only."""
    for place, source in sources_of(recipe):
        table = ".".join(str(part) for part in place if isinstance(part, str))
        if source.format in IMAGE_FORMATS:
            return f'{table}.{source.name}.format = "{source.format}"'
    if recipe.data.image_min_pixels is not None or recipe.data.image_max_pixels is not None:
        return "data.image_min_pixels or data.image_max_pixels"
    return None
