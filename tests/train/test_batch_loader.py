"""Micro-batches are prepared while the device computes, pinned, and dropped when an attempt at the step ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.data.batch import Batch
from engine.device.cpu import CpuDevice
from engine.device.cuda import CudaDevice
from engine.train.step.computation import AHEAD, BatchLoader, StepComputation
from engine.train.step.transaction import StepTransaction
from tests.train.run_helpers import Workshop, make_spec, write_samples

Samples = np.ndarray[Any, np.dtype[Any]]
"""Numbers of samples."""


class QueuedDevice(CpuDevice):
    """A CPU device that claims to work asynchronously, and that records pinned tensors, uploads, and the threads that
    used it."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(2**30)
        self.pinned: set[int] = set()
        self.uploads_from_pinned: list[bool] = []
        self.threads: set[str] = set()

    @contextmanager
    def activate(self) -> Iterator[None]:
        self.threads.add(threading.current_thread().name)
        yield

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self.pinned.add(copy.data_ptr())
        return copy

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        self.uploads_from_pinned.append(tensor.data_ptr() in self.pinned)
        return super().upload(tensor)


def batch_of(samples: Samples) -> Batch:
    ids_BS = torch.from_numpy(samples)[:, None]
    return Batch(ids_BS, ids_BS, None, None, tuple(samples.tolist()), len(samples))


GROUPS = [np.array([number, number + 10]) for number in range(6)]


@pytest.mark.parametrize("device", [CpuDevice(2**30), QueuedDevice()])
def test_batches_come_in_the_order_of_the_plan(device: CpuDevice) -> None:
    loader = BatchLoader(device, batch_of)
    with closing(loader.batches(GROUPS)) as batches:
        assert [batch.sample_ids for batch in batches] == [(n, n + 10) for n in range(6)]
    assert loader.wait_seconds > 0.0


def test_the_next_batches_are_ready_before_they_are_asked_for() -> None:
    made, enough = [], threading.Semaphore(0)

    def prepare(samples: Samples) -> Batch:
        made.append(int(samples[0]))
        enough.release()
        return batch_of(samples)

    device = QueuedDevice()
    with closing(BatchLoader(device, prepare).batches(GROUPS)) as batches:
        next(batches)
        for _ in range(1 + AHEAD):
            assert enough.acquire(timeout=30)
    assert made == list(range(1 + AHEAD))
    assert all(name.startswith("batches") for name in device.threads)


def test_where_nothing_is_queued_a_batch_is_made_when_it_is_due() -> None:
    made: list[int] = []

    def prepare(samples: Samples) -> Batch:
        made.append(1)
        return batch_of(samples)

    loader = BatchLoader(CpuDevice(2**30), prepare)
    with closing(loader.batches(GROUPS)) as batches:
        next(batches)
    assert made == [1]


def test_closing_early_leaves_nothing_running() -> None:
    first, may_end, begun, ended = threading.Event(), threading.Event(), [], []

    def prepare(samples: Samples) -> Batch:
        begun.append(int(samples[0]))
        if samples[0] > 0:
            first.set()
            assert may_end.wait(timeout=30)
        ended.append(int(samples[0]))
        return batch_of(samples)

    batches = BatchLoader(QueuedDevice(), prepare).batches(GROUPS)
    next(batches)
    assert first.wait(timeout=30)
    may_end.set()
    batches.close()
    assert begun == ended
    assert len(ended) < len(GROUPS)


def test_an_error_in_the_thread_is_raised_when_its_batch_is_due() -> None:
    def prepare(samples: Samples) -> Batch:
        if samples[0] == 1:
            raise MemoryError("host memory ran out")
        return batch_of(samples)

    with closing(BatchLoader(QueuedDevice(), prepare).batches(GROUPS)) as batches:
        assert next(batches).sample_ids == (0, 10)
        with pytest.raises(MemoryError, match="host memory"):
            next(batches)


def weights_after(
    tmp_path: Path, name: str, *, device: Any = None, upload_fails_at: int | None = None
) -> tuple[torch.Tensor, int]:
    """(weights after two steps, failures recovered from); the run's device may be replaced."""
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), device="cpu", train={"micro_batch": 1})
    with Workshop(spec, tmp_path / name) as setup:
        context, failures = setup.context, 0
        if device is not None:
            context.device = device
        if upload_fails_at is not None:
            real, calls = device.upload, []

            def upload(tensor: torch.Tensor) -> torch.Tensor:
                calls.append(1)
                if len(calls) == upload_fails_at:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
                copied: torch.Tensor = real(tensor)
                return copied

            device.upload = upload
        transaction = StepTransaction(context)
        for step in (1, 2):
            transaction.run(step, setup.order.step(step))
            failures += transaction.failures
        return torch.cat([p.detach().flatten() for _, p in context.loaded.trainable()]).clone(), failures


def test_prefetching_changes_no_weight_and_every_upload_is_from_pinned_memory(tmp_path: Path) -> None:
    plain, _ = weights_after(tmp_path, "plain")
    device = QueuedDevice()
    ahead, _ = weights_after(tmp_path, "ahead", device=device)
    assert torch.equal(plain, ahead)
    assert len(device.uploads_from_pinned) >= 16
    assert all(device.uploads_from_pinned)


def test_running_out_of_memory_in_an_upload_costs_a_retry(tmp_path: Path) -> None:
    plain, _ = weights_after(tmp_path, "plain")
    hurt, failures = weights_after(tmp_path, "hurt", device=QueuedDevice(), upload_fails_at=7)
    assert failures == 1
    torch.testing.assert_close(hurt, plain, rtol=1e-5, atol=1e-6)


def test_waiting_for_data_is_not_waiting_for_the_device(tmp_path: Path) -> None:
    """An upload may have to wait for the preceding backward pass; that time is not counted as waiting for data."""
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), device="cpu")
    with Workshop(spec, tmp_path / "run") as setup:
        device: Any = QueuedDevice()
        clock = [0.0]
        setup.context.device = device
        real = device.upload

        def slow_upload(tensor: torch.Tensor) -> torch.Tensor:
            clock[0] += 100.0
            copied: torch.Tensor = real(tensor)
            return copied

        device.upload = slow_upload
        work = StepComputation(setup.context)
        transaction = StepTransaction(setup.context)
        transaction.work = work
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.perf_counter", lambda: clock[0])
            outcome = transaction.run(1, setup.order.step(1))
        assert clock[0] >= 100.0
        assert outcome.data_wait_seconds == 0.0


class Pageable:
    """A host tensor whose page-locked copy is refused."""

    def __init__(self, message: str) -> None:
        self.message = message

    def pin_memory(self) -> None:
        raise RuntimeError(self.message)


def cuda_device() -> CudaDevice:
    """A CudaDevice whose constructor, which needs a card, did not run."""
    device = object.__new__(CudaDevice)
    device._can_pin, device.notices = True, []
    return device


def test_without_page_locked_memory_the_run_goes_on_and_says_so_once() -> None:
    tensor: Any = Pageable("CUDA error: out of memory")
    device = cuda_device()
    assert device.pin(tensor) is tensor
    assert device.pin(tensor) is tensor
    (notice,) = device.notices
    assert "page-locked" in notice


def test_other_errors_while_pinning_are_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tensor: Any = Pageable("CUDA error: an illegal memory access was encountered")
        cuda_device().pin(tensor)


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_from_pinned_memory_do_not_wait(pinned: bool) -> None:
    calls = []

    class Host:
        detach = property(lambda self: lambda: self)
        is_pinned = staticmethod(lambda: pinned)

        def to(self, device: torch.device, **options: Any) -> None:
            calls.append((device, options))

    device = cuda_device()
    device.torch_device = torch.device("cuda", 0)
    host: Any = Host()
    device.upload(host)
    assert calls == [(torch.device("cuda", 0), {"non_blocking": pinned, "copy": True})]
