"""Proofs detect an allocator, a copy and an optimizer that were broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.train.run.training_setup import TrainingSetup
from tests.train.proofs.proved import proved, small_setup


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[TrainingSetup]:
    with small_setup(tmp_path) as made:
        yield made


def test_an_allocator_that_grants_more_than_the_cap_keeps_the_run_from_growing(
    setup: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proved(setup, tmp_path)["allocator"].passed and setup.context.may_grow
    monkeypatch.setattr(type(setup.context.device), "capacity_bytes", 2**26)
    found = proved(setup, tmp_path)
    assert found["allocator"].passed is False and "were allocated" in found["allocator"].detail
    assert not setup.context.may_grow and "do not grow" in found["allocator"].fallback


def test_an_out_of_memory_error_that_is_swallowed_is_seen(
    setup: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.empty

    def swallows(*given: Any, **options: Any) -> torch.Tensor:
        try:
            return right(*given, **options)
        except torch.OutOfMemoryError:
            return right(1)

    monkeypatch.setattr(torch, "empty", swallows)
    found = proved(setup, tmp_path)
    assert found["allocator"].passed is False
    assert found["oom_in_backward"].passed is False and "continues" in found["oom_in_backward"].detail


def test_an_out_of_memory_error_that_leaks_is_seen(setup: TrainingSetup, tmp_path: Path) -> None:
    leaked: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        leaked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = proved(setup, tmp_path)["oom_in_backward"]
    assert found.passed is False and "stay allocated" in found.detail
    assert not setup.context.may_grow


class SharedBuffer:
    """A broken device: all page-locked copies share one buffer, and `upload` returns before it has copied from that
    buffer."""

    def __init__(self, device: Any) -> None:
        self._device, self._buffer = device, torch.zeros(1 << 13, dtype=torch.int64)
        self.pins = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._buffer[: len(tensor)].copy_(tensor) if self.pins else tensor

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        shared = self.pins and tensor.data_ptr() == self._buffer.data_ptr()
        copy: torch.Tensor = tensor if shared else self._device.upload(tensor)
        return copy

    def stop_pinning(self) -> None:
        self.pins = False


def test_a_buffer_that_is_overwritten_before_its_copy_has_arrived_is_not_used(
    setup: TrainingSetup, tmp_path: Path
) -> None:
    device: Any = SharedBuffer(setup.context.device)
    setup.context.device = device
    found = proved(setup, tmp_path)["copies"]
    assert found.passed is False and "other values" in found.detail and "pageable memory" in found.fallback
    assert not device.pins and proved(setup, tmp_path)["copies"].passed


def test_an_optimizer_is_proved_at_a_rate_that_changes_every_weight(tmp_path: Path) -> None:
    # At 2e-5, one step changes no bf16 weight that is larger than some thousandths.
    model = {"id": "builtin:tiny", "init": "random", "dtype": "bfloat16"}
    with small_setup(tmp_path, model=model, method={"kind": "full"}) as setup:
        slow = setup.spec.recipe.train.model_copy(update={"learning_rate": 2e-5})
        recipe = setup.spec.recipe.model_copy(update={"train": slow})
        setup.spec = setup.spec.model_copy(update={"recipe": recipe})
        assert proved(setup, tmp_path)["optimizer"].passed


def test_an_optimizer_with_state_that_is_not_saved_is_not_trusted_to_be_undone(
    setup: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proved(setup, tmp_path)["optimizer"].passed and setup.context.guard.can_undo
    right = torch.optim.AdamW.step

    def step(self: Any, closure: Any = None) -> None:
        self.hidden = getattr(self, "hidden", 0) + 1
        right(self, closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += 0.01 * self.hidden

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    found = proved(setup, tmp_path)["optimizer"]
    assert found.passed is False and "not restored" in found.detail and "checkpoint" in found.fallback
    assert not setup.context.guard.can_undo


def test_a_micro_batch_that_makes_the_host_wait_is_told_of(setup: TrainingSetup, tmp_path: Path) -> None:
    assert proved(setup, tmp_path)["host_syncs"].passed
    layer = setup.context.loaded.base.get_input_embeddings()
    handle = layer.register_forward_hook(lambda module, given, output: output * (1 if output.sum().item() else 2))
    found = proved(setup, tmp_path)["host_syncs"]
    handle.remove()
    assert found.passed is False and "1 times" in found.detail and "test_state.py" in found.detail
    assert all(parameter.grad is None for _, parameter in setup.context.loaded.trainable())
