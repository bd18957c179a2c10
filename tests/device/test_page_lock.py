"""Host memory that is page-locked in place: whole pages of its own, unlocked before they are freed."""

from __future__ import annotations

import mmap
import weakref

import pytest
import torch

from engine.device.host_copies import page_locked_copy


class Driver:
    """Stands for `torch.cuda.cudart()`: notes what is locked, and refuses with an error code if it has one."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.locked = code, dict[int, int]()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int:
        if not self.code:
            self.locked[address] = size_bytes
        return self.code

    def cudaHostUnregister(self, address: int, /) -> int:
        del self.locked[address]
        return 0


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.arange(5000.0).view(50, 100), torch.arange(9).byte()])
def test_a_copy_has_whole_pages_of_its_own_until_nobody_uses_it(tensor: torch.Tensor) -> None:
    driver = Driver()
    copy, code = page_locked_copy(tensor, driver)
    assert code == 0 and torch.equal(copy, tensor) and copy.shape == tensor.shape and copy.dtype == tensor.dtype
    ((address, size_bytes),) = driver.locked.items()
    assert address == copy.data_ptr() and address % mmap.PAGESIZE == size_bytes % mmap.PAGESIZE == 0
    storage = copy.untyped_storage()
    assert address + size_bytes <= storage.data_ptr() + storage.nbytes()
    view, freed = copy.view(-1)[:1], weakref.ref(storage)
    del copy, storage
    assert driver.locked
    del view
    assert freed() is None and not driver.locked


def test_memory_that_the_driver_refuses_is_ordinary_memory() -> None:
    driver = Driver(code=2)
    copy, code = page_locked_copy(torch.ones(3), driver)
    assert code == 2 and copy.tolist() == [1, 1, 1]
    del copy
    assert not driver.locked


def test_nothing_is_locked_for_a_tensor_without_elements() -> None:
    driver = Driver()
    assert page_locked_copy(torch.ones(0, 3), driver)[0].shape == (0, 3)
    assert not driver.locked
