"""Out-of-memory messages as users reported them are recognised; similar messages of other errors are not."""

from __future__ import annotations

import pytest
import torch

from engine.device.metered import MeteredDevice
from engine.device.oom import StuckDeviceError, beyond_repair, classify, is_sticky

GIB, MIB = 2**30, 2**20

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.10 GiB is free."
    " Process 4121 has 22.53 GiB memory in use. Of the allocated memory 21.92 GiB is allocated by PyTorch, and"
    " 113.45 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CUDA_OLD = (
    "CUDA out of memory. Tried to allocate 10.01 GiB (GPU 0; 14.75 GiB total capacity; 10.12 GiB already allocated; "
    "4.39 GiB free; 10.22 GiB reserved in total by PyTorch)"
)
ACCELERATOR = (
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/ for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error (run with"
    " NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed."
    "\nLast error:\n"
)
PIN_THREAD = (
    "Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n"
    '  File "torch/utils/data/_utils/pin_memory.py", line 98, in pin_memory\n'
    "    clone[i] = pin_memory(item, device)\nRuntimeError: CUDA error: out of memory\n"
)
ENFORCE = "[enforce fail at alloc_cpu.cpp:118] err == 0. "

RECOGNISED = {
    "caching allocator": (torch.OutOfMemoryError(CUDA), "device", 2 * GIB),
    "before torch 2.2": (RuntimeError(CUDA_OLD), "device", int(10.01 * GIB)),
    "small request": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), "device", 20 * MIB),
    "runtime error": (RuntimeError(ACCELERATOR), "device", None),
    "accelerator error": (torch.AcceleratorError(ACCELERATOR), "device", None),
    "driver error": (RuntimeError("CUDA driver error: out of memory"), "device", None),
    "driver code": (RuntimeError("CUDA error (2): CUDA_ERROR_OUT_OF_MEMORY"), "device", None),
    "cublas create": (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "device",
        None,
    ),
    "cublas not initialised": (
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        "device",
        None,
    ),
    "cudnn": (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device", None),
    "cudnn 9": (
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        "device",
        None,
    ),
    "cudnn not initialised": (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), "device", None),
    "nccl failure": (torch.distributed.DistBackendError(NCCL + "Cuda failure 2 'out of memory'"), "device", None),
    "nccl calloc": (
        torch.distributed.DistBackendError(NCCL + "Failed to CUDA calloc 6291456 bytes"),
        "device",
        6291456,
    ),
    "triton": (RuntimeError("Triton Error [CUDA]: out of memory"), "device", None),
    "pin thread": (RuntimeError(PIN_THREAD), "pinned", None),
    "host allocator": (RuntimeError("CUDA error: out of memory (cudaHostAlloc of 1073741824 bytes)"), "pinned", None),
    "host register": (RuntimeError("cudaHostRegister failed: out of memory"), "pinned", None),
    "cpu allocator": (
        RuntimeError(
            ENFORCE + "DefaultCPUAllocator: can't allocate memory: you tried to allocate 132426121216 bytes. "
            "Error code 12 (Cannot allocate memory)"
        ),
        "host",
        132426121216,
    ),
    "cpu allocator on windows": (
        RuntimeError("data. DefaultCPUAllocator: not enough memory: you tried to allocate 1981808640 bytes."),
        "host",
        1981808640,
    ),
    "onednn": (RuntimeError("could not create a primitive"), "host", None),
    "shared memory of workers": (
        RuntimeError("unable to allocate shared memory(shm) for file </torch_31_2>: Cannot allocate memory (12)"),
        "host",
        None,
    ),
    "fork": (OSError(12, "Cannot allocate memory"), "host", None),
    "python": (MemoryError(), "host", None),
    "numpy": (MemoryError("Unable to allocate 7.45 GiB for an array with shape (10, 10)"), "host", int(7.45 * GIB)),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_message_from_the_field_is_recognised(name: str) -> None:
    error, kind, requested_bytes = RECOGNISED[name]
    found = classify(error)
    assert found is not None
    assert (found.kind, found.requested_bytes) == (kind, requested_bytes)
    assert not is_sticky(error)


class OutOfResources(RuntimeError):
    """Stands for triton.runtime.errors.OutOfResources, which needs triton."""


OTHER_ILLNESSES = {
    "kernel too large for an SM": OutOfResources(
        "out of resource: shared memory, Required: 131072, Hardware limit: 101376. "
        "Reducing block sizes or `num_stages` may help."
    ),
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x5)"),
    "cublas execution": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    "nccl argument": torch.distributed.DistBackendError(NCCL + "Cuda failure 1 'invalid argument'"),
    "disk full": OSError(28, "No space left on device"),
    "a user's own words": ValueError("CUDA out of memory is what I call this"),
    "keyboard": KeyboardInterrupt(),
}


@pytest.mark.parametrize("name", OTHER_ILLNESSES)
def test_other_errors_are_not_out_of_memory(name: str) -> None:
    assert classify(OTHER_ILLNESSES[name]) is None
    assert not is_sticky(OTHER_ILLNESSES[name])


STICKY = {
    "illegal address": "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`",
    "assert": "CUDA error: device-side assert triggered",
    "launch failure": "CUDA error: unspecified launch failure",
    "ecc": "CUDA error: uncorrectable ECC error encountered",
    "misaligned": "CUDA error: misaligned address",
    "torn segment": '!handles_.at(i) INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":487, please'
    " report a bug to PyTorch.",
    "nccl abort": "NCCL communicator was aborted on rank 1.",
    "nccl watchdog": "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=15, OpType=ALLREDUCE)",
    "both": "CUDA error: an illegal memory access was encountered; CUDA out of memory. Tried to allocate 2.00 GiB.",
}


@pytest.mark.parametrize("name", STICKY)
def test_errors_that_poison_the_context_are_sticky_and_never_out_of_memory(name: str) -> None:
    error = RuntimeError(STICKY[name])
    assert is_sticky(error)
    assert classify(error) is None


def test_an_out_of_memory_message_that_could_not_be_worded_is_one() -> None:
    text = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report a bug'
    found = classify(RuntimeError(text))
    assert found is not None and found.kind == "device"


def test_what_only_a_new_process_repairs() -> None:
    assert beyond_repair(RuntimeError(STICKY["torn segment"])) and beyond_repair(StuckDeviceError("stuck"))
    assert beyond_repair(torch.AcceleratorError("CUDA error: unknown error", 999))
    assert not beyond_repair(torch.OutOfMemoryError("CUDA out of memory"))


def test_the_real_cpu_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**59, dtype=torch.uint8)
    found = classify(caught.value)
    assert found is not None
    assert (found.kind, found.requested_bytes) == ("host", 2**59)


def test_the_metered_device_is_recognised_to_the_byte() -> None:
    device = MeteredDevice(4096)
    with device.activate(), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1_000_000, dtype=torch.uint8)
    found = classify(caught.value)
    assert found is not None
    assert (found.kind, found.requested_bytes) == ("device", 1_000_448)
