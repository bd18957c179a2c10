"""Opening a device from a spec: what is chosen, what is refused, and with which words."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Device as DeviceTable
from engine.config.schema.run import Profile, RunSpec
from engine.device.base import GpuProcess, GpuReading
from engine.device.cpu import CpuDevice
from engine.device.cuda import CudaDevice, check_free, choose_indices, compare_size
from engine.device.host_copies import PlainCopy
from engine.device.metered import MeteredDevice
from engine.device.nvml import read_gpus
from engine.device.open import open_device
from engine.errors import EnvironmentProblem

GIB = 2**30
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def spec(kind: str, memory_gib: float = 1.0, **table: object) -> RunSpec:
    """A run spec on one device; what it trains does not matter here."""
    recipe = Recipe.model_validate({
        "kind": "recipe", "name": "any", "model": {"id": "builtin:tiny"},
        "data": {"sources": [{"name": "dates", "path": "builtin:dates"}]},
    })  # fmt: skip
    device = DeviceTable.model_validate({"kind": kind, "memory_gib": memory_gib, **table})
    return RunSpec(name="any", profile=Profile(name="any", device=device), recipe=recipe)


def reading(used_gib: float, *processes: GpuProcess) -> GpuReading:
    return GpuReading(3, "NVIDIA A10G", "GPU-1", 24 * GIB, int(used_gib * GIB), None, None, None, processes)


def test_a_metered_profile_opens_a_simulated_device_of_its_capacity() -> None:
    device = open_device(spec("metered", 0.5, reserve_gib=0.25))
    assert (device.kind, device.simulated, device.capacity_bytes) == ("metered", True, GIB // 4)
    assert "simulated" in device.name
    assert device.readings() == []


@pytest.mark.parametrize(("asked", "threads"), [(None, 1), ("3", 3)])
def test_a_simulated_device_computes_on_one_thread_unless_the_environment_says_otherwise(
    asked: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with open_device(spec("metered")).activate():
            inside = torch.get_num_threads()
        assert (inside, torch.get_num_threads()) == (threads, 3)
    finally:
        torch.set_num_threads(before)


def test_a_cpu_profile_measures_the_process() -> None:
    device = open_device(spec("cpu"))
    with device.activate(), device.host_region():
        kept = torch.ones(64 * 2**20 // 4)
    memory = device.memory()
    assert 32 * 2**20 < memory.allocated_bytes < psutil.virtual_memory().total
    assert memory.peak_bytes >= memory.allocated_bytes
    copied = device.upload(kept)
    copied.zero_()
    assert float(kept[0]) == 1.0


def test_a_cpu_profile_larger_than_the_machine_is_noticed() -> None:
    assert any("this machine has" in notice for notice in open_device(spec("cpu", 10**6)).notices)


@without_cuda
def test_a_cuda_profile_without_cuda_says_what_to_do() -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        open_device(spec("cuda", 24.0))
    assert caught.value.exit_code == 6
    assert "-p demo" in caught.value.fix


@needs_cuda
def test_a_cuda_device_caps_counts_and_recovers() -> None:
    device = open_device(spec("cuda", 1.0))
    with device.activate():
        kept = torch.ones(2**20, device=device.torch_device)
        assert device.memory().allocated_bytes >= 4 * 2**20 == kept.untyped_storage().nbytes()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device=device.torch_device)
        device.release_cached()
        assert torch.equal(device.download(device.upload(torch.arange(4))), torch.arange(4))
        assert device.readings()[0].used_bytes > 0


def test_attention_on_a_card_does_not_use_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, index: None)
    torch.backends.cuda.enable_cudnn_sdp(True)
    CudaDevice(0, 80 * GIB, "GPU-0", [])
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


def test_all_of_a_card_is_a_cap_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    card = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, index: shares.append(share))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    assert CudaDevice(0, 200 * GIB, "GPU-0", []).capacity_bytes == 140 * GIB
    assert 0.9999 < shares[0] < 1  # torch enforces no share of 1


@pytest.mark.parametrize("device", [CpuDevice(GIB), MeteredDevice(GIB)])
def test_what_is_offloaded_comes_back_with_its_values_and_layout(device: CpuDevice | MeteredDevice) -> None:
    with device.activate():
        tensor = torch.arange(12.0).view(3, 4).t()
        back = device.offload(tensor).fetch()
        assert torch.equal(back, tensor) and back.stride() == tensor.stride()


def test_without_page_locked_memory_a_plain_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    device = object.__new__(CudaDevice)  # its constructor needs a card
    device._can_pin, device.notices, device.torch_device = True, [], torch.device("cpu")
    asked: list[dict[str, object]] = []

    def page_locked(tensor: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append(options)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty_like", page_locked)
    source = torch.arange(4.0)
    for _ in range(2):
        copy = device.offload(source)
        assert isinstance(copy, PlainCopy)
        assert torch.equal(copy.fetch(), source) and copy.host is not source
    assert asked == [{"device": "cpu", "pin_memory": True}] and len(device.notices) == 1


def test_devices_are_the_first_ones_or_those_asked_for() -> None:
    assert choose_indices([], 2, 4) == [0, 1]
    assert choose_indices([3], 1, 4) == [3]
    assert choose_indices([2, 3], 1, 4) == [2]


@pytest.mark.parametrize(("asked", "count", "present"), [([], 2, 1), ([4], 1, 4), ([-1], 1, 4), ([1], 2, 4)])
def test_devices_that_are_not_there_are_refused(asked: list[int], count: int, present: int) -> None:
    with pytest.raises(EnvironmentProblem, match=f"this machine has {present}"):
        choose_indices(asked, count, present)


def test_a_busy_card_is_refused_and_its_holders_named() -> None:
    with pytest.raises(EnvironmentProblem, match=r"GPU 3 .* 4.0 GiB of 24.0 GiB .* pid 4121 \(python, 20.0 GiB\)"):
        check_free(reading(20, GpuProcess(4121, 20 * GIB, "python")), 8 * GIB)


def test_a_card_held_by_invisible_processes_is_refused() -> None:
    with pytest.raises(EnvironmentProblem, match="not visible from here"):
        check_free(reading(20), 8 * GIB)


def test_a_shared_card_with_room_is_a_notice_and_a_free_one_is_none() -> None:
    shared = reading(4, GpuProcess(4121, None, "python"))
    assert check_free(shared, 8 * GIB) == ["GPU 3 is shared with pid 4121 (python, an unknown amount)"]
    assert check_free(reading(0.4), 24 * GIB) == []
    assert check_free(reading(4, GpuProcess(os.getpid(), 4 * GIB, "pytest")), 8 * GIB) == []


def test_a_profile_larger_than_the_card_is_noticed() -> None:
    table = DeviceTable(kind="cuda", memory_gib=79.2)
    assert "23.6 GiB" in compare_size(table, "NVIDIA A10G", int(23.6 * GIB))[0]
    assert compare_size(table, "NVIDIA H100", int(79.15 * GIB)) == []


def test_nvml_readings_need_no_torch_and_never_raise() -> None:
    code = (
        "import sys; from engine.device.nvml import read_gpus, driver_version; "
        "read_gpus(), driver_version(), read_gpus(['GPU-none']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert all(gpu.total_bytes > 0 for gpu in read_gpus())
