"""What holds the memory of a device: weights, adapters, gradients, optimizer state, activations."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engine.device.allocation_tracker import bytes_of, storage_key
from engine.device.oom import MemoryBreakdown
from engine.train.step.optimizer_state import state_tensors

if TYPE_CHECKING:
    from engine.device.base import Device, LiveTensor
    from engine.model.loaded import LoadedModel
    from engine.train.step.optimizer import StepGuard


LARGEST = 12


def memory_breakdown(loaded: LoadedModel, guard: StepGuard, device: Device) -> MemoryBreakdown:
    """Measure a device's memory. Allocates nothing on it. Keeps no tensor."""
    named = loaded.local_parameters()
    learning = loaded.trainable()
    state = [] if guard.host_state.on else list(state_tensors(guard.optimizer, learning))
    gradients = [(f"gradient of {name}", p.grad) for name, p in learning if p.grad is not None]
    adapters = [p for name, p in learning if "lora_" in name or "trainable_tokens" in name]
    components = {
        "weights": bytes_of(p for _, p in named) - bytes_of(adapters),
        "adapters": bytes_of(adapters),
        "gradients": bytes_of(tensor for _, tensor in gradients),
        "optimizer": bytes_of(tensor for _, tensor in state),
    }
    components["activations"] = max(0, device.memory().allocated_bytes - sum(components.values()))
    names = {storage_key(tensor): name for name, tensor in [*named, *state, *gradients]}
    largest = [_described(live, names) for live in device.largest(LARGEST)]
    return MemoryBreakdown(components, largest, device.snapshot())


def _described(live: LiveTensor, names: dict[int, str]) -> dict[str, Any]:
    facts = asdict(live)
    return {"name": names.get(facts.pop("key"), ""), **facts, "shape": list(live.shape)}
