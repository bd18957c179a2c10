"""Puts a row's images into its tokens: the token that stands for an image is repeated for every part of the image.

Image tokens are never learned, because the model replaces their embeddings by what its vision encoder makes.

Try: `python -m pytest tests/data/test_images.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.data.chat import TokenRow
from engine.data.chat_template import Span
from engine.data.images import ImageFacts, ImageProcessor
from engine.data.records import Dropped


@dataclass(frozen=True)
class PlacedImages:
    """A row in which each image token is repeated for every part of its image."""

    row: TokenRow
    count: int
    """Number of images in the row."""
    end: int
    """Index in `row` of the token after the last image token; 0 without images."""
    added: list[tuple[int, int]]
    """For each image: the position of its token in the original row, and the number of tokens added there."""

    def moved(self, span: Span | None) -> Span | None:
        """Convert `span`, a range (start, end) of tokens in the original row, to the range of the same tokens in `row`;
        None stays None."""
        if span is None:
            return None
        start, end = (place + sum(extra for at, extra in self.added if at < place) for place in span)
        return start, end


def place_images(
    row: TokenRow, images: Sequence[ImageFacts], processor: ImageProcessor | None
) -> PlacedImages | Dropped:
    """Repeat each image token of `row` for every part of its image. The first image token belongs to the first image.
    Without a processor the row is returned unchanged.

    The row may have fewer image tokens than the conversation has images, because the row of one turn may end before the
    last image. A row with more image tokens than images is dropped: its text contains that token.
    """
    if processor is None:
        return PlacedImages(row, 0, 0, [])
    ids: list[int] = []
    flags: list[bool] = []
    added: list[tuple[int, int]] = []
    end = 0
    for place, (token, flag) in enumerate(zip(*row, strict=True)):
        if token != processor.token_id:
            ids.append(token)
            flags.append(flag)
            continue
        if len(added) == len(images):
            return Dropped("its text contains the token that stands for an image")
        tokens = processor.tokens_of(images[len(added)])
        added.append((place, tokens - 1))
        ids += [token] * tokens
        flags += [False] * tokens
        end = len(ids)
    return PlacedImages((ids, flags), len(added), end, added)
