"""Where the metered device counts: host regions, threads, worker processes, nested activation."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device.metered import MeteredDevice
from tests.device.tensors import KIB, allocated, block


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
            def forward(context: Any, value: torch.Tensor, depth: int) -> torch.Tensor:
                context.depth = depth
                return value.clone()

            @staticmethod
            def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
                threads.add(threading.get_ident())
                before = device.allocations
                kept = block()
                refused.append(device.allocations - before)
                if context.depth:
                    with torch.enable_grad():
                        nested(kept.requires_grad_(), context.depth - 1).sum().backward()
                return gradient, None

        # Beyond 60 nested backwards autograd moves to a thread of its own.
        nested: Any = Nested.apply
        nested(block().requires_grad_(), 70).sum().backward()
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
        numbers: Any = range(8)
        loader: Any = torch.utils.data.DataLoader(numbers, batch_size=4, num_workers=1, collate_fn=_large_batch)
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
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return func(*args, **(kwargs or {}))

        other: Any = Other  # torch gives modes no types
        with other():
            kept = block()
        assert seen and allocated(device) == KIB == kept.numel() * 4

    def test_fake_tensors_are_not_memory(self, device: MeteredDevice) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            kept = torch.ones(1024, 1024) @ torch.ones(1024, 1024)
        assert kept.shape == (1024, 1024)
        assert allocated(device) == 0
