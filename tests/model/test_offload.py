"""Activations on the host: the same gradients, fewer bytes on the device, with and without checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device.metered import MeteredDevice
from engine.device.oom import catch_oom, free_failed_graph
from engine.model.loss import LossFunction, make_loss
from engine.model.offload import ActivationOffload
from tests.device.lazy_streams import LazyDevice
from tests.model.samples import FAMILIES, batch_of, load, run_spec, write_model


def bench(
    folder: Path, family: str, *, checkpointing: bool, device: MeteredDevice | None = None, **options: Any
) -> tuple[MeteredDevice, LossFunction]:
    device = device or MeteredDevice(4 * 2**30)
    spec = run_spec(str(write_model(folder / family, family)), **options)
    with device.activate():
        loaded = load(spec, device)
        loaded.set_checkpointing(checkpointing)
        loss = make_loss(loaded, implementation="auto", label_smoothing=0.0, chunk_tokens=None, device=device)
    return device, loss


def step(device: MeteredDevice, loss: LossFunction, *, rows: int = 4, length: int = 96) -> tuple[Any, int, int]:
    """Run forward and backward. Returns (loss, gradients by name), the bytes held between forward and backward, and the
    peak; both in addition to the static bytes."""
    with device.activate():
        loss.loaded.model.zero_grad()
        with device.host_region():
            batch = batch_of(rows, length)
        static = device.memory().allocated_bytes
        device.reset_peak()
        total = loss(batch.moved(device.upload))
        held = device.memory().allocated_bytes - static
        total.backward()
        loss.offload.settle()
        found = total.detach(), {name: p.grad.clone() for name, p in loss.loaded.trainable() if p.grad is not None}
        return found, held, device.memory().peak_bytes - static


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


SLICED = ("phi3", "mixtral", "qwen3_moe")
"""Families whose layers save slices of wider tensors: back from the host they are dense, and a matrix product over
another layout may round otherwise."""


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_offloading_changes_no_gradient(tmp_path: Path, family: str, checkpointing: bool) -> None:
    """Also with copies that run as late as their events allow; what changes in place meanwhile would be refused."""
    device, loss = bench(tmp_path, family, checkpointing=checkpointing, device=LazyDevice(4 * 2**30))
    kept, _, _ = step(device, loss)
    loss.offload.on = True
    moved, _, _ = step(device, loss)
    tolerance = 1e-5 if family in SLICED and not checkpointing else 0.0
    torch.testing.assert_close(moved, kept, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_hardly_anything_is_held_between_forward_and_backward(tmp_path: Path, checkpointing: bool) -> None:
    device, loss = bench(tmp_path, "qwen2", checkpointing=checkpointing)
    _, held, peak = step(device, loss, rows=8, length=200)
    loss.offload.on = True
    _, held_offloaded, peak_offloaded = step(device, loss, rows=8, length=200)
    assert held_offloaded < held / 2
    assert peak_offloaded < peak


@pytest.mark.parametrize("kind", [MeteredDevice, LazyDevice])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_failed_attempt_leaves_nothing_behind(tmp_path: Path, checkpointing: bool, kind: type[MeteredDevice]) -> None:
    """Regression: tensors too small to be moved were kept with their history, which kept them, for good."""
    device, loss = bench(tmp_path, "qwen2", checkpointing=checkpointing, device=kind(4 * 2**30))
    loss.offload.on = True
    before = device.allocations
    step(device, loss)
    allocations = device.allocations - before
    with device.activate():
        loss.loaded.model.zero_grad()
        device.release_cached()
    held = device.memory().allocated_bytes
    for allocation in range(1, allocations + 1, allocations // 8):
        device.fail_at(allocation)
        assert catch_oom(lambda: step(device, loss), device, "step") is not None
        with device.activate():
            loss.loaded.model.zero_grad()
            loss.offload.settle()
            free_failed_graph(device)
            device.release_cached()
        assert device.memory().allocated_bytes == held


def test_memory_that_is_used_again_is_not_taken_for_what_was_there_before(tmp_path: Path) -> None:
    device, loss = bench(tmp_path, "qwen2", checkpointing=False)
    offload = ActivationOffload(loss.loaded)
    offload.on = True
    with device.activate():
        weight = torch.ones(64, 64, requires_grad=True)
        with offload.saving():
            # Each product is saved by the next `sin` and freed at once: the allocator hands its address out again.
            total = torch.zeros(())
            for number in range(6):
                total = total + (weight * float(number)).sin().sum()
        total.backward()
    numbers = torch.arange(6.0)
    expected = (numbers * numbers.cos()).sum()
    torch.testing.assert_close(weight.grad, expected.expand(64, 64), rtol=1e-5, atol=1e-5)


def test_weights_that_come_on_the_way_stay_on_the_device(tmp_path: Path) -> None:
    device, loss = bench(tmp_path, "qwen2", checkpointing=False)
    offload = ActivationOffload(loss.loaded)
    offload.on = True
    with device.activate():
        gathered = torch.nn.Parameter(torch.ones(128, 128))
        rows = torch.ones(2, 128, requires_grad=True)
        copies = device.host_allocations
        with offload.saving():
            torch.nn.functional.linear(rows, gathered).sum().backward()
        assert device.host_allocations == copies
