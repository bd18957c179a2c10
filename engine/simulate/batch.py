"""Micro-batches for a simulation. Token ids have no values, except in rows that begin with images."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from engine.budget.architecture.facts import from_config
from engine.budget.architecture.lookup import find_config
from engine.budget.architecture.vision_encoder import VISION_ENCODERS, VisionEncoder
from engine.budget.trace.memory_config import image_patches
from engine.config.check.data_rules import image_key
from engine.config.schema.run import RunSpec
from engine.data.batch import Batch
from engine.simulate.device import SimulatedDevice
from engine.simulate.images import RowImages


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
