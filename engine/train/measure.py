"""What the run's memory was made of, measured: the same components as the budget's prediction.

Parameters, gradients and optimizer state are added up tensor by tensor, in the 512-byte blocks that CUDA's caching
allocator and the metered device hand out; what the peak holds beyond them were activations and working memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.train.optimizer import state_tensors
from engine.train.transaction import Parts

BLOCK_BYTES = 512


def measured(parts: Parts, peak_bytes: int) -> dict[str, Any]:
    """`{"peak_bytes", "components": {...}}` for the largest peak of the run's steps."""
    trainable = parts.loaded.trainable()
    learns = {id(parameter) for _, parameter in trainable}
    adapters = _bytes(parameter for name, parameter in trainable if "lora_" in name)
    components = {
        "weights": _bytes(parts.loaded.model.parameters()) - adapters,
        "adapters": adapters,
        "optimizer": _bytes(tensor for _, tensor in state_tensors(parts.optimizer, trainable)),
        "gradients": _bytes(p for p in parts.loaded.model.parameters() if id(p) in learns),
    }
    components["activations"] = max(0, peak_bytes - sum(components.values()))
    return {"peak_bytes": peak_bytes, "components": components}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of distinct storages, each rounded up to whole blocks."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes.values())
