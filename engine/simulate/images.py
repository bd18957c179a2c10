"""Creates inputs of a vision-language model, with one image of a given size at the start of each row.

Try: `tunedeck plan -p 80gb -r lora --set model.id=Qwen/Qwen2-VL-2B-Instruct --set data.image_max_pixels=501760 --exact`
"""

from __future__ import annotations

import torch

from engine.budget.architecture.vision_encoder import VisionEncoder


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
