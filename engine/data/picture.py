"""Makes images small enough for a terminal, where a character shows two pixels, and draws boxes on them.

Try: `tunedeck data -r qwen2-vl-detect --show 1`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.image_formats import Box

MOST_COLUMNS, MOST_ROWS = 48, 48
"""Pixels of the largest picture, from left to right and from top to bottom: 48 characters wide and 24 lines high."""

BOX_COLOUR = (255, 0, 60)
"""Colour of a box's outline."""


def small_picture(image: Any, boxes: Sequence[Box] = ()) -> NDArray[np.uint8]:
    """Scale a Pillow image to at most MOST_COLUMNS × MOST_ROWS pixels and draw the outlines of `boxes`, one pixel wide;
    returns uint8[rows, columns, 3], where the number of rows is even."""
    scale = min(MOST_COLUMNS / image.width, MOST_ROWS / image.height)
    columns = max(1, round(image.width * scale))
    rows = max(2, 2 * round(image.height * scale / 2))
    pixels = np.array(image.convert("RGB").resize((columns, rows)))
    for left, top, right, bottom in boxes:
        first, last = int(left * columns), min(columns - 1, int(right * columns))
        upper, lower = int(top * rows), min(rows - 1, int(bottom * rows))
        pixels[[upper, lower], first : last + 1] = BOX_COLOUR
        pixels[upper : lower + 1, [first, last]] = BOX_COLOUR
    return pixels
