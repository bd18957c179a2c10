"""Whether a recipe trains on images, according to its keys; data are not read.

Try: `python -m pytest tests/budget/test_vision.py`
"""

from __future__ import annotations

from engine.spec.check.rules import sources_of
from engine.spec.schema.recipe import Recipe


def image_key(recipe: Recipe) -> str | None:
    """The first key, as written, by which a recipe says that it trains on images; None for text only."""
    for place, source in sources_of(recipe):
        table = ".".join(str(part) for part in place if isinstance(part, str))
        if source.format == "image-chat":
            return f'{table}.{source.name}.format = "image-chat"'
        if source.image_root is not None:
            return f"{table}.{source.name}.image_root"
    if recipe.data.image_min_pixels is not None or recipe.data.image_max_pixels is not None:
        return "data.image_min_pixels or data.image_max_pixels"
    return None
