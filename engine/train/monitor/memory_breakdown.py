"""Who holds how much at one moment: by component, and the largest live tensors with their names.

Plain values only, so that keeping them keeps no tensor alive; taken inside the handler of a failed allocation, while
what was held is still held. Parameters, gradients and optimizer state are added up tensor by tensor, in the 512-byte
blocks that CUDA's caching allocator and the metered device hand out; the rest is activations and working memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine.device.base import Device, LiveTensor
from engine.model.loaded import LoadedModel
from engine.train.step.optimizer import StepGuard, state_tensors

BLOCK_BYTES = 512
LARGEST = 12
"""Live tensors that are named one by one."""


@dataclass(frozen=True)
class Holdings:
    """Bytes by component, the largest tensors, and on CUDA the allocator's own snapshot."""

    components: dict[str, int]
    largest: list[dict[str, Any]]
    snapshot: Any


def holdings(loaded: LoadedModel, guard: StepGuard, device: Device) -> Holdings:
    """What is held now. Allocates nothing on the device."""
    named = loaded.held()
    learning = loaded.trainable()
    state = [] if guard.host_state.on else list(state_tensors(guard.optimizer, learning))
    gradients = [(f"gradient of {name}", p.grad) for name, p in learning if p.grad is not None]
    adapters = [p for name, p in learning if "lora_" in name]
    components = {
        "weights": bytes_of(p for _, p in named) - bytes_of(adapters),
        "adapters": bytes_of(adapters),
        "gradients": bytes_of(tensor for _, tensor in gradients),
        "optimizer": bytes_of(tensor for _, tensor in state),
    }
    components["activations"] = max(0, device.memory().allocated_bytes - sum(components.values()))
    names = {_key(tensor): name for name, tensor in [*named, *state, *gradients]}
    largest = [_described(live, names) for live in device.largest(LARGEST)]
    return Holdings(components, largest, device.snapshot())


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of distinct storages, each rounded up to whole blocks."""
    sizes = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes.values())


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _described(live: LiveTensor, names: dict[int, str]) -> dict[str, Any]:
    facts = asdict(live)
    return {"name": names.get(facts.pop("key"), ""), **facts, "shape": list(live.shape)}
