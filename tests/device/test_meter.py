"""The metered device counts what torch allocates, in any kind of operation, and refuses what does not fit."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from engine.device.metered import MeteredDevice
from tests.device.tensors import KIB, allocated, block

MAKERS: dict[str, tuple[Callable[[], object], int]] = {
    "empty": (lambda: torch.empty(256), KIB),
    "a list of numbers": (lambda: torch.tensor([1.0] * 256), KIB),
    "numpy memory": (lambda: torch.from_numpy(numpy.ones(256, dtype=numpy.float32)), KIB),
    "parameter": (lambda: torch.nn.Parameter(torch.empty(256)), KIB),
    "module": (lambda: torch.nn.Linear(16, 16, bias=False), KIB),
    "several outputs": (lambda: torch.ones(256).sort(), 3 * KIB),
    "list output": (lambda: torch._foreach_add([block(), block()], 1.0), 2 * KIB),
    "a view of new storage": (lambda: block(2)[:1], 2 * KIB),
    "chunks share one storage": (lambda: block(2).chunk(2), 2 * KIB),
    "out= of an empty tensor": (lambda: torch.add(block(), 1, out=torch.empty(0)), KIB),
    "out= of several": (lambda: torch.sort(block(), out=(torch.empty(0), torch.empty(0, dtype=torch.int64))), 3 * KIB),
    "resize_": (lambda: torch.empty(0).resize_(256), KIB),
    "set_": (lambda: torch.empty(0).set_(torch.UntypedStorage(KIB)), KIB),
    "storage resize_": (lambda: _grown_storage(KIB), KIB),
    "data swap": (lambda: _swapped(1), KIB),
    "deep copy": (lambda: copy.deepcopy(torch.nn.Parameter(block())), KIB),
    "unpickled": (lambda: torch.load(_saved(), weights_only=True), KIB),
    "rounded up to a block": (lambda: torch.empty(1), 512),
    "nothing": (lambda: torch.empty(0), 0),
    "meta": (lambda: torch.empty(256, device="meta"), 0),
}


def _grown_storage(size_bytes: int) -> torch.Tensor:
    tensor = torch.empty(0)
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


def _swapped(kib: int) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(block(4))
    parameter.data = block(kib)
    return parameter


def _saved() -> io.BytesIO:
    file = io.BytesIO()
    torch.save(block(), file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_made_is_counted_while_it_lives(device: MeteredDevice, name: str) -> None:
    make, expected_bytes = MAKERS[name]
    kept = make()
    gc.collect()
    assert allocated(device) == expected_bytes
    del kept
    gc.collect()
    assert allocated(device) == 0


def test_in_place_operations_and_views_request_nothing(device: MeteredDevice) -> None:
    tensor = block()
    requests = device.allocations
    tensor.add_(1).mul_(2).view(16, 16).t()[2:4].zero_()
    assert device.allocations == requests


def test_a_storage_is_alive_as_long_as_the_graph_holds_it(device: MeteredDevice) -> None:
    leaf = block().requires_grad_()
    result = (leaf * 2).sin()  # sin saves its input, which no Python name holds
    gc.collect()
    assert allocated(device) == 3 * KIB
    result.sum().backward()
    del result
    assert allocated(device) == 2 * KIB  # leaf and its gradient


def test_reused_addresses_are_counted_anew(device: MeteredDevice) -> None:
    for _ in range(200):
        tensor = block()
        assert allocated(device) == KIB
        del tensor
        assert allocated(device) == 0


def test_an_allocation_over_the_capacity_is_refused_and_not_counted() -> None:
    tight = MeteredDevice(4 * KIB)
    with tight.activate():
        kept = block(3)
        with pytest.raises(torch.OutOfMemoryError, match=r"simulated.*Tried to allocate 2.00 KiB") as caught:
            block(2)
        assert vars(caught.value)["requested_bytes"] == 2 * KIB
        del caught
        assert allocated(tight) == 3 * KIB == kept.untyped_storage().nbytes()
        assert block(1) is not None


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "out=": lambda target: torch.add(torch.ones(1), torch.ones(1024), out=target),
    "resize_": lambda target: target.resize_(4096),
    "set_": lambda target: target.set_(torch.UntypedStorage(16 * KIB)),
    "storage resize_": lambda target: target.untyped_storage().resize_(16 * KIB),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_resize_leaves_the_tensor_as_it_was(name: str) -> None:
    tight = MeteredDevice(6 * KIB)
    with tight.activate():
        target = block()
        before = target.clone()
        storage = target.untyped_storage()._cdata
        with pytest.raises(torch.OutOfMemoryError):
            REFUSED[name](target)
        assert target.shape == (256,)
        assert target.untyped_storage()._cdata == storage
        assert target.untyped_storage().nbytes() == KIB
        assert name == "out=" or torch.equal(target, before)
        del before
        gc.collect()
        assert allocated(tight) == KIB


def test_a_storage_that_shrinks_and_grows_behind_the_dispatcher_is_followed(device: MeteredDevice) -> None:
    tensor = block(4)
    tensor.untyped_storage().resize_(0)
    assert allocated(device) == 0
    tensor.untyped_storage().resize_(4 * KIB)
    assert allocated(device) == 4 * KIB


def test_growing_counts_old_and_new_block_at_the_peak_as_cuda_does(device: MeteredDevice) -> None:
    tensor = block(4)
    device.reset_peak()
    tensor.untyped_storage().resize_(8 * KIB)
    assert device.memory().peak_bytes == 12 * KIB
    assert allocated(device) == 8 * KIB


def test_the_chosen_allocation_fails_once(device: MeteredDevice) -> None:
    device.fail_at(2)
    first = block()
    with pytest.raises(torch.OutOfMemoryError, match="fault injection"):
        block()
    assert (first + block()).numel() == 256


def test_a_fault_that_is_taken_back_does_not_happen(device: MeteredDevice) -> None:
    device.fail_at(1)
    device.fail_at(None)
    assert block().numel() == 256


def test_the_largest_allocations_are_named(device: MeteredDevice) -> None:
    kept = [torch.ones(64, 64), block(), torch.zeros(8, 128, dtype=torch.int64)]
    names = [(live.operation, live.shape, live.dtype, live.size_bytes) for live in device.largest(2)]
    assert names == [
        ("aten.ones.default", (64, 64), "float32", 16 * KIB),
        ("aten.zeros.default", (8, 128), "int64", 8 * KIB),
    ]
    assert len(kept) == 3


def test_peaks_are_kept_per_phase(device: MeteredDevice) -> None:
    block(8)
    assert device.memory().peak_bytes == 8 * KIB
    device.reset_peak()
    block(2)
    assert device.memory().peak_bytes == 2 * KIB


def test_inference_mode_shows_the_same_peak_as_no_grad(device: MeteredDevice) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    batch = torch.ones(32, 8, 64)
    peaks = []
    for mode in (torch.no_grad, torch.inference_mode):
        device.reset_peak()
        with mode():
            module(batch.transpose(0, 1).reshape(-1, 64)).contiguous()
        peaks.append(device.memory().peak_bytes)
    assert peaks[0] == peaks[1] > allocated(device)


def test_checkpointing_lowers_the_peak_and_recomputation_is_counted(device: MeteredDevice) -> None:
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]

    def activated(layer: torch.nn.Module, value: torch.Tensor) -> Any:
        return layer(value).exp().sin().exp().sin()

    def peak_and_requests(recompute: bool) -> tuple[int, int]:
        hidden = torch.ones(64, 64, requires_grad=True)
        device.reset_peak()
        requests = device.allocations
        for layer in layers:
            act = partial(activated, layer)
            hidden = checkpoint(act, hidden, use_reentrant=False) if recompute else act(hidden)
        hidden.sum().backward()
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        return device.memory().peak_bytes, device.allocations - requests

    plain, recomputed = peak_and_requests(False), peak_and_requests(True)
    assert recomputed[0] < 0.7 * plain[0]
    assert recomputed[1] > plain[1]
