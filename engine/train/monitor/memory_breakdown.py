"""What holds a device's memory at one moment: bytes by component, and the largest live tensors with their names.

The result has plain values only, so it keeps no tensor in memory. It is taken inside the handler of a failed
allocation, while the memory is still held. Parameters, gradients and optimizer state are added up tensor by tensor, in
the 512-byte blocks that CUDA's caching allocator and the metered device hand out; the rest is activations and working
memory.

Try: `pytest tests/train/recovery/test_oom_report.py`
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from engine.device.allocation_tracker import bytes_of, storage_key
from engine.device.base import Device, LiveTensor
from engine.device.oom import MemoryBreakdown
from engine.model.loaded import LoadedModel
from engine.train.step.optimizer import StepGuard
from engine.train.step.optimizer_state import state_tensors

LARGEST = 12
"""Number of live tensors that are listed one by one."""


def memory_breakdown(loaded: LoadedModel, guard: StepGuard, device: Device) -> MemoryBreakdown:
    """Measure the bytes by component and the largest live tensors on the device. Allocates nothing on it."""
    named = loaded.local_parameters()
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
    names = {storage_key(tensor): name for name, tensor in [*named, *state, *gradients]}
    largest = [_described(live, names) for live in device.largest(LARGEST)]
    return MemoryBreakdown(components, largest, device.snapshot())


def _described(live: LiveTensor, names: dict[int, str]) -> dict[str, Any]:
    facts = asdict(live)
    return {"name": names.get(facts.pop("key"), ""), **facts, "shape": list(live.shape)}
