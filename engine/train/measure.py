"""What the run's memory was made of, measured: the same components as the budget's prediction.

Parameters, gradients and optimizer state are added up tensor by tensor, in the 512-byte blocks that CUDA's caching
allocator and the metered device hand out; what the peak holds beyond them were activations and working memory.
"""

from __future__ import annotations

from typing import Any

from engine.train.holdings import bytes_of
from engine.train.optimizer import state_tensors
from engine.train.transaction import Parts


def measured(parts: Parts, peak_bytes: int) -> dict[str, Any]:
    """`{"peak_bytes", "components": {...}}` for the largest peak of the run's steps."""
    trainable = parts.loaded.trainable()
    on_host = parts.guard.host_state.on
    learns = {id(parameter) for _, parameter in trainable}
    adapters = bytes_of(parameter for name, parameter in trainable if "lora_" in name)
    components = {
        "weights": bytes_of(parts.loaded.model.parameters()) - adapters,
        "adapters": adapters,
        "optimizer": 0 if on_host else bytes_of(tensor for _, tensor in state_tensors(parts.optimizer, trainable)),
        "gradients": bytes_of(p for p in parts.loaded.model.parameters() if id(p) in learns),
    }
    components["activations"] = max(0, peak_bytes - sum(components.values()))
    return {"peak_bytes": peak_bytes, "components": components}
