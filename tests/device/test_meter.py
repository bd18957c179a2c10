"""The metered device counts what torch allocates, wherever that happens, and refuses what does not fit."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from engine.device.metered import MeteredDevice

KIB = 1024


@pytest.fixture
def device() -> Iterator[MeteredDevice]:
    roomy = MeteredDevice(2**30)
    with roomy.activate():
        yield roomy


def allocated(device: MeteredDevice) -> int:
    return device.memory().allocated_bytes


def block(kib: int = 1) -> torch.Tensor:
    return torch.ones(kib * KIB // 4)


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
        assert caught.value.requested_bytes == 2 * KIB
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


class TestHostRegion:
    def test_host_memory_is_never_counted_and_gives_nothing_back(self, device: MeteredDevice) -> None:
        kept = block()
        with device.host_region():
            host = block(64)
            block(8)
        host.add_(1)
        assert host.view(2, -1).detach().untyped_storage().nbytes() == 64 * KIB
        assert allocated(device) == KIB
        del host
        gc.collect()
        assert allocated(device) == KIB == kept.untyped_storage().nbytes()

    def test_host_memory_stays_host_memory_when_it_grows(self, device: MeteredDevice) -> None:
        with device.host_region():
            host = torch.empty(0)
        torch.add(torch.ones(1), torch.ones(1024), out=host)
        host.untyped_storage().resize_(64 * KIB)
        gc.collect()
        assert allocated(device) == 0

    def test_uploads_are_counted_and_downloads_are_not(self, device: MeteredDevice) -> None:
        source = block(2).requires_grad_()
        with device.host_region():
            host = device.download(source)
            copied = device.upload(host)
        assert allocated(device) == 4 * KIB
        assert torch.equal(copied, source)
        assert not copied.requires_grad and not host.requires_grad

    def test_a_full_device_takes_downloads_and_no_uploads(self) -> None:
        tight = MeteredDevice(2 * KIB)
        with tight.activate():
            host = tight.download(block(2))
            kept = block(2)
            with pytest.raises(torch.OutOfMemoryError):
                tight.upload(host)
            assert tight.download(kept).numel() == 512

    def test_adopted_tensors_count_once(self, device: MeteredDevice) -> None:
        with device.host_region():
            host = block(2)
        device.adopt([host, host.view(2, -1)])
        assert allocated(device) == 2 * KIB
        del host
        assert allocated(device) == 0

    def test_adopting_more_than_fits_is_refused(self) -> None:
        tight = MeteredDevice(KIB)
        tensors = safetensors.torch.load(safetensors.torch.save({"a": block(2)}))
        with pytest.raises(torch.OutOfMemoryError):
            tight.adopt(tensors.values())
        assert allocated(tight) == 0

    def test_random_state_round_trips_uncounted(self, device: MeteredDevice) -> None:
        state = device.rng_state()
        first = torch.rand(4)
        device.set_rng_state(state)
        assert torch.equal(first, torch.rand(4))
        del first
        assert allocated(device) == 0

    def test_pinning_is_the_identity(self, device: MeteredDevice) -> None:
        tensor = block()
        assert device.pin(tensor) is tensor


class TestThreads:
    def test_threads_started_meanwhile_are_counted(self, device: MeteredDevice) -> None:
        kept: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: kept.append(block(4)))
        thread.start()
        thread.join()
        assert allocated(device) == 4 * KIB

    def test_subclassed_threads_and_pools_are_counted(self, device: MeteredDevice) -> None:
        class Maker(threading.Thread):
            def run(self) -> None:
                self.made = block(2)

        maker = Maker()
        maker.start()
        maker.join()
        with ThreadPoolExecutor(2) as pool:
            kept = list(pool.map(block, (1, 2, 3)))
        assert len(kept) == 3
        assert allocated(device) == (2 + 6) * KIB

    def test_a_thread_begins_in_its_parents_region(self, device: MeteredDevice) -> None:
        kept: list[torch.Tensor] = []
        with device.host_region():
            thread = threading.Thread(target=lambda: kept.append(block(4)))
            thread.start()
            thread.join()
        assert allocated(device) == 0

    def test_backward_inside_a_thread_is_counted(self, device: MeteredDevice) -> None:
        leaf = block().requires_grad_()
        thread = threading.Thread(target=lambda: leaf.exp().sum().backward())
        thread.start()
        thread.join()
        assert allocated(device) == 2 * KIB

    def test_deep_reentrant_backward_is_counted_in_autograds_own_threads(self, device: MeteredDevice) -> None:
        threads: set[int] = set()
        refused: list[int] = []

        class Nested(torch.autograd.Function):
            @staticmethod
            def forward(context, value, depth):
                context.depth = depth
                return value.clone()

            @staticmethod
            def backward(context, gradient):
                threads.add(threading.get_ident())
                before = device.allocations
                kept = block()
                refused.append(device.allocations - before)
                if context.depth:
                    with torch.enable_grad():
                        Nested.apply(kept.requires_grad_(), context.depth - 1).sum().backward()
                return gradient, None

        # Beyond 60 nested backwards autograd moves to a thread of its own.
        Nested.apply(block().requires_grad_(), 70).sum().backward()
        assert len(threads) > 1
        assert set(refused) == {1}

    def test_many_threads_at_once_leave_the_books_straight(self, device: MeteredDevice) -> None:
        def churn() -> None:
            for size in range(300):
                block(1 + size % 7)

        threads = [threading.Thread(target=churn) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert allocated(device) == 0


def test_a_thread_that_outlives_the_meter_stops_counting() -> None:
    meter, go, done = MeteredDevice(2**20), threading.Event(), threading.Event()
    kept: list[torch.Tensor] = []

    def late() -> None:
        go.wait()
        kept.append(block(4))
        done.set()

    with meter.activate():
        threading.Thread(target=late).start()
    go.set()
    done.wait()
    assert allocated(meter) == 0


def test_a_forked_worker_is_neither_counted_nor_refused() -> None:
    tight = MeteredDevice(2 * KIB)
    with tight.activate():
        kept = block()
        child = os.fork()
        if child == 0:
            try:
                block(64)
                block().untyped_storage().resize_(64 * KIB)
                torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
                os._exit(0 if allocated(tight) == KIB else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert allocated(tight) == KIB == kept.untyped_storage().nbytes()
        with pytest.raises(torch.OutOfMemoryError):
            block(2)


def test_data_loader_workers_are_not_refused() -> None:
    tight = MeteredDevice(64 * KIB)
    with tight.activate(), tight.host_region():
        loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=1, collate_fn=_large_batch)
        sums = [float(batch.sum()) for batch in loader]
    assert sums == [4 * 65536.0, 4 * 65536.0]


def _large_batch(indices: list[int]) -> torch.Tensor:
    return torch.ones(len(indices), 65536)


class TestActivation:
    def test_nothing_is_counted_outside(self) -> None:
        meter = MeteredDevice(2**20)
        with meter.activate():
            pass
        assert block() is not None
        assert meter.allocations == 0

    def test_reentering_counts_once_and_leaves_in_order(self, device: MeteredDevice) -> None:
        with device.activate(), device.activate():
            kept = block()
        requests = device.allocations
        other = block()
        assert device.allocations == requests + 1
        assert allocated(device) == 2 * KIB == (kept.numel() + other.numel()) * 4

    def test_leaving_puts_back_what_was_replaced(self) -> None:
        former = torch.UntypedStorage.resize_, threading.Thread.start
        meter = MeteredDevice(2**20)
        with pytest.raises(KeyError), meter.activate():
            raise KeyError("left by an exception")
        assert (torch.UntypedStorage.resize_, threading.Thread.start) == former

    def test_it_lives_beside_other_modes(self, device: MeteredDevice) -> None:
        seen = []

        class Other(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with Other():
            kept = block()
        assert seen and allocated(device) == KIB == kept.numel() * 4

    def test_fake_tensors_are_not_memory(self, device: MeteredDevice) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            kept = torch.ones(1024, 1024) @ torch.ones(1024, 1024)
        assert kept.shape == (1024, 1024)
        assert allocated(device) == 0


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

    def peak_and_requests(recompute: bool) -> tuple[int, int]:
        hidden = torch.ones(64, 64, requires_grad=True)
        device.reset_peak()
        requests = device.allocations
        for layer in layers:
            act = lambda value, layer=layer: layer(value).exp().sin().exp().sin()  # noqa: E731
            hidden = checkpoint(act, hidden, use_reentrant=False) if recompute else act(hidden)
        hidden.sum().backward()
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        return device.memory().peak_bytes, device.allocations - requests

    plain, recomputed = peak_and_requests(False), peak_and_requests(True)
    assert recomputed[0] < 0.7 * plain[0]
    assert recomputed[1] > plain[1]
