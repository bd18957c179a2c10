"""Micro-batches for a simulation. Token ids have no values, except in rows that begin with images; images are what the
model's own processor makes of the largest of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.architecture.facts import from_config
from engine.architecture.lookup import find_config
from engine.architecture.vision_encoder import VISION_ENCODERS, VisionEncoder
from engine.budget.trace.memory_config import image_patches
from engine.config.check.data_rules import image_key
from engine.config.files.caches import known_images
from engine.config.schema.run import RunSpec
from engine.data.batch import Batch
from engine.data.images import ImageFacts
from engine.data.own_processor import OwnProcessor
from engine.errors import UsageError
from engine.extras.simulate.device import SimulatedDevice
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
        self.tokens = _apart([list(processor.expansion(ImageFacts(*size, 0))) for size in sizes], processor.token_id)
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


def _apart(images: Sequence[list[int]], token_id: int) -> list[int]:
    """The tokens of all images of a row, with a text token (0) between two of which nothing else marks the bounds:
    models take places of images that lie next to each other for one image."""
    tokens: list[int] = []
    for image in images:
        if tokens and tokens[-1] == token_id == image[0]:
            tokens.append(0)
        tokens += image
    return tokens


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
            f"{type(images.processor.processor).__name__} pads images with empty patches, whose memory cannot "
            "be simulated",
            expected="a processor that does not pad images",
            fix="start with a small train.micro_batch: the run adapts to the available memory",
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
            f"no image fits into {most} tokens with {type(processor.processor).__name__}",
            expected="a data.max_length with space for an image and text",
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


class StepShape(NamedTuple):
    """The shape of a simulated micro-batch: `rows` sequences of `length` tokens, of which `targets` count in the loss;
    the loss is computed for `chunk` targets at a time. The first `images` sequences begin with images."""

    rows: int
    length: int
    targets: int
    chunk: int
    images: int = 0


def batch_of(
    spec: RunSpec,
    device: SimulatedDevice,
    shape: StepShape,
    row_images: RowImages | None = None,
    *,
    with_row_tokens: bool = False,
) -> Batch:
    """Create a micro-batch of this shape on `device`, with `row_images` in the rows that have images. A loss that
    balances experts needs `with_row_tokens`."""
    rows, length = shape.rows, shape.length
    with device.host_region():
        ids = torch.zeros((rows, length), dtype=torch.int64)
        labels = torch.empty((rows, length), dtype=torch.int64)  # fake, also where zeros are real: without values
        positions = torch.zeros((rows, length), dtype=torch.int64) if spec.recipe.data.packing else None
        images = _images(spec, rows, length)
        if row_images is not None:
            ids, images = row_images.batch(rows, length, shape.images)
        tokens = torch.full((rows,), length) if with_row_tokens else None
    batch = Batch(ids, labels, None, positions, tuple(range(rows)), shape.targets, images, row_tokens_B=tokens)
    return replace(batch.moved(device.upload), labels_BS=device.upload(labels))


def _images(spec: RunSpec, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return no images if the recipe has none, or if the budget does not know the model's vision encoder."""
    if image_key(spec.recipe) is None:
        return {}
    facts = find_config(spec.recipe.model.id, spec.recipe.model.revision)
    if facts.get("model_type") not in VISION_ENCODERS:
        return {}
    arch = from_config(facts)
    patches = image_patches(arch, spec.recipe)
    return images_of(arch.vision_encoder, patches, rows, length) if arch.vision_encoder else {}


def images_of(encoder: VisionEncoder, patches: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Create the tensors of `Batch.images` for `rows` rows of `length` tokens, each with one image of `patches`
    patches. Pixel values are fp32."""
    if encoder.patches is not None:
        side = int(patches**0.5) * encoder.patch_side
        pixels = torch.zeros((rows, encoder.patch_shape[0], side, side))
        return {"pixel_values": pixels, "token_type_ids": torch.zeros((rows, length), dtype=torch.int64)}
    return {
        "pixel_values": torch.zeros((rows * patches, encoder.patch_values)),
        "image_grid_thw": torch.tensor([[1, *grid_of(patches, encoder.merge)]] * rows),
        "position_ids": torch.zeros((3, rows, length), dtype=torch.int64),
    }


def grid_of(patches: int, merge: int) -> tuple[int, int]:
    """Return (height, width), in patches, of the most nearly square image of `patches` patches. Both are multiples of
    `merge`, since `merge` × `merge` patches become one token."""
    tokens = patches // merge**2
    high = next(side for side in range(int(tokens**0.5), 0, -1) if tokens % side == 0)
    return high * merge, tokens // high * merge
