"""Copies beside the computation: whoever reads them waits, and no memory is given up under them."""

from __future__ import annotations

import weakref

import pytest
import torch

from engine.device import host_copies
from engine.device.host_copies import CopyStreams, StreamCopy
from engine.errors import UsageError
from tests.device.lazy_streams import LazyStreams


@pytest.fixture
def copies() -> CopyStreams:
    return CopyStreams(LazyStreams(), torch.device("cpu"))


def send(copies: CopyStreams, tensor: torch.Tensor) -> StreamCopy:
    return copies.send(tensor, torch.full_like(tensor, -1))


def held(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    return weakref.ref(tensor.untyped_storage())


def test_values_come_back_in_any_order(copies: CopyStreams) -> None:
    tensors = [torch.arange(12.0).view(3, 4).t() + number for number in range(4)]
    sent = [send(copies, tensor) for tensor in tensors]
    for number in (3, 0, 2, 1, 1):
        sent[number - 1].prefetch()
        back = sent[number].fetch()
        assert torch.equal(back, tensors[number]) and back.stride() == tensors[number].stride()


def test_nothing_is_copied_before_the_computation_waits_for_it(copies: CopyStreams) -> None:
    """The streams of these tests are as late as may be; otherwise they would show nothing."""
    copy = send(copies, torch.ones(3))
    assert copy.host.tolist() == [-1, -1, -1]
    copy.prefetch()
    assert copy.fetch().tolist() == [1, 1, 1]


def test_one_tensor_at_a_time_is_held_while_it_leaves(copies: CopyStreams) -> None:
    first, second = torch.ones(3), torch.ones(3)
    storages = [held(first), held(second)]
    sent = [send(copies, first)]
    del first
    assert storages[0]() is not None
    sent.append(send(copies, second))
    del second
    assert storages[0]() is None and storages[1]() is not None
    copies.settle()
    assert storages[1]() is None
    assert [copy.fetch().tolist() for copy in sent] == [[1, 1, 1]] * 2


def test_one_tensor_at_a_time_comes_back_ahead_of_use_and_settling_gives_it_up(copies: CopyStreams) -> None:
    sent = [send(copies, torch.ones(3)) for _ in range(2)]
    for copy in sent:
        copy.prefetch()
    assert sent[0].arriving is not None and sent[1].arriving is None
    storage = held(sent[0].arriving)
    copies.settle()
    assert storage() is None
    assert sent[0].fetch().tolist() == [1, 1, 1]


def test_large_tensors_are_copied_among_the_computation(copies: CopyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "LARGEST_IN_FLIGHT", 8)
    tensor = torch.ones(3)
    storage, copy = held(tensor), send(copies, tensor)
    del tensor
    assert storage() is None and copy.host.tolist() == [1, 1, 1]
    copy.prefetch()
    assert copy.arriving is None
    assert copy.fetch().tolist() == [1, 1, 1]


def test_slices_are_copied_among_the_computation(copies: CopyStreams) -> None:
    copy = send(copies, torch.ones(4, 6)[:, :3])
    assert copy.host.tolist() == [[1, 1, 1]] * 4
    assert copy.fetch().tolist() == [[1, 1, 1]] * 4


def test_a_tensor_that_changes_while_it_leaves_is_refused(copies: CopyStreams) -> None:
    tensor = torch.ones(3)
    send(copies, tensor)
    tensor.add_(1)
    with pytest.raises(UsageError) as caught:
        send(copies, torch.ones(3))
    assert caught.value.fix == "train.activation_offload = false"
