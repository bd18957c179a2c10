"""Images of simulated micro-batches: what the model's own processor makes of the largest images of one row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.budget.architecture.lookup import find_config
from engine.budget.architecture.vision_encoder import VISION_ENCODERS
from engine.config.check.data_rules import image_key
from engine.config.files.caches import known_images
from engine.config.schema.run import RunSpec
from engine.data.images import ImageFacts
from engine.data.own_processor import OwnProcessor
from engine.errors import UsageError
from engine.model.tokenizer import load_image_processor, load_tokenizer

RATIOS = (1.0, 2.0, 0.5, 4.0, 0.25)
"""Height by width of the images that are tried."""
SMALLEST, LARGEST = 32, 8192
"""Sides in pixels of the smallest and of the largest square that is tried."""
HALVINGS = 4
"""How often the gap between the largest image that a row holds and the smallest that it does not hold is halved."""

Size = tuple[int, int]
"""Height and width in pixels."""


class RowImages:
    """The images of one row, in as many rows of a simulated micro-batch as have images."""

    def __init__(self, processor: OwnProcessor, sizes: Sequence[Size]) -> None:
        self.processor, self.sizes = processor, tuple(sizes)
        self.tokens = [token for size in sizes for token in processor.expansion(ImageFacts(*size, 0))]
        self.parts = self.tokens.count(processor.token_id)
        """Tokens for parts of the images, without those around them."""
        self._made: dict[int, dict[str, Tensor]] = {}

    def batch(self, rows: int, length: int, images: int, first: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return token ids [rows, length], of which the first `images` rows have the tokens of the images from place
        `first` on, and the model's inputs for these. Unlike other tensors of a simulation, integers have values: a
        model reads the places of images."""
        with _disable_current_modes():
            ids_BS = torch.zeros((rows, length), dtype=torch.int64)
            ids_BS[:images, first : first + len(self.tokens)] = torch.tensor(self.tokens)
            made = self._made.get(images)
            if made is None:
                blank = [{"image": np.zeros((*size, 3), np.uint8)} for size in self.sizes]
                made = self._made[images] = self.processor.arrays(blank * images)
            return ids_BS, {**made, **self.processor.token_types(ids_BS)}


def images_of_rows(spec: RunSpec) -> RowImages | None:
    """Return the largest images of a training row, where the data were read before; else the largest that a row may
    hold. None for a run without images, and for one whose images are not read by its model's own processor.

    Raises UsageError or EnvironmentProblem where the processor cannot be loaded, UsageError for one whose images a
    simulation would miss.
    """
    model = spec.recipe.model
    if image_key(spec.recipe) is None or find_config(model.id, model.revision).get("model_type") in VISION_ENCODERS:
        return None
    tokenizer = load_tokenizer(model, trust_remote_code=spec.limits.trust_remote_code)
    processor = load_image_processor(spec, tokenizer)
    if not isinstance(processor, OwnProcessor):
        return None
    known = known_images(spec.recipe)
    images = RowImages(processor, known if known is not None else [_largest(processor, spec.recipe.data.max_length)])
    _refuse_empty_patches(images)
    return images


def _refuse_empty_patches(images: RowImages) -> None:
    """Places below 0 are of patches that only fill an image up (Gemma 4): the mask over them has no values in a
    simulation, whose peak was 44 % too low."""
    made = images.processor.arrays([{"image": np.zeros((*images.sizes[0], 3), np.uint8)}])
    if any(not array.is_floating_point() and bool((array < 0).any()) for array in made.values()):
        raise UsageError(
            f"{type(images.processor.processor).__name__} fills images up with empty patches, and what these take "
            "cannot be simulated",
            expected="a processor whose patches all belong to the image",
            fix="start with a small train.micro_batch: the run adapts to the memory that is there",
        )


def _largest(processor: OwnProcessor, most: int) -> Size:
    """The size, of those tried, of which the model gets most values, in at most `most` tokens."""
    found: tuple[int, Size] | None = None
    for ratio in RATIOS:
        best, over, side, values = 0, 0, SMALLEST, -1
        while side <= LARGEST and not over:
            grown = _values(processor, _size(side, ratio), most)
            if grown is None:
                over = side
            elif grown == values and side > 16 * SMALLEST:
                break  # larger images are made smaller
            else:
                best, values, side = side, grown, 2 * side
        for _ in range(HALVINGS if over and best else 0):
            middle = (best + over) // 2
            grown = _values(processor, _size(middle, ratio), most)
            best, over, values = (best, middle, values) if grown is None else (middle, over, grown)
        if best and (found is None or values > found[0]):
            found = values, _size(best, ratio)
    if found is None:
        raise UsageError(
            f"no image fits into {most} tokens, as {type(processor.processor).__name__} writes images",
            expected="room for an image and text in data.max_length",
            fix="raise data.max_length",
        )
    return found[1]


def _size(side: int, ratio: float) -> Size:
    return round(side * ratio**0.5), round(side / ratio**0.5)


def _values(processor: OwnProcessor, size: Size, most: int) -> int | None:
    """Values that the model gets of a blank image; None if that takes more than `most` tokens, or is refused."""
    try:
        processor.patches_of(*size)
    except ValueError:
        return None
    if len(processor.expansion(ImageFacts(*size, 0))) > most:
        return None
    made = processor.arrays([{"image": np.zeros((*size, 3), np.uint8)}])
    return sum(array.numel() for array in made.values())
