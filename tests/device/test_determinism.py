"""`train.deterministic` changes torch's settings for the duration of the run only; operations without a deterministic
kernel are refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine.device.determinism import deterministic_kernels, unfilled_memory
from engine.errors import EnvironmentProblem, UsageError
from engine.train.step.computation import StepComputation
from engine.verify import state
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, train, write_samples

deterministic: Any = torch.utils.deterministic  # its types do not know all of its properties


def test_settings_hold_inside_the_block_and_are_restored() -> None:
    with deterministic_kernels(True, "cpu"):
        assert torch.are_deterministic_algorithms_enabled() and os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
        # Freshly allocated memory is filled, so that reading it shows: torch does so in deterministic mode alone.
        assert torch.empty(4).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled() and "FLASH_ATTENTION_DETERMINISTIC" not in os.environ
    with deterministic_kernels(False, "cuda"):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("warn_only", [False, True])
def test_settings_from_before_the_block_hold_after_it(warn_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with deterministic_kernels(True, "cpu"):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() and os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "0"
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_that_a_device_must_refuse_is_not_written_to() -> None:
    with deterministic_kernels(True, "cpu"):
        with unfilled_memory():
            before = psutil.Process().memory_info().rss
            kept = torch.empty(2**28)
            assert psutil.Process().memory_info().rss - before < kept.nbytes / 4
        assert torch.empty(4).isnan().all()


def test_an_operation_without_a_deterministic_kernel_is_named() -> None:
    with pytest.raises(UsageError, match=r"put_.* has no deterministic kernel"), deterministic_kernels(True, "cpu"):
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1), accumulate=False)


def test_the_whole_name_is_said() -> None:
    text = "_histc_cuda with floating point input does not have a deterministic implementation, but you set 'torch.use"
    named = "but _histc_cuda with floating point input has no"
    with pytest.raises(UsageError, match=named), deterministic_kernels(True, "cpu"):
        raise RuntimeError(text)


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="must match"), deterministic_kernels(True, "cpu"):
        torch.zeros(2) + torch.zeros(3)


@pytest.mark.parametrize("found", [None, ":0:0"])
def test_a_workspace_that_makes_cublas_nondeterministic_is_refused(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if found:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", found)
    with pytest.raises(EnvironmentProblem, match="CUBLAS_WORKSPACE_CONFIG"), deterministic_kernels(True, "cuda"):
        pass


def test_a_run_trains_with_deterministic_kernels_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = write_samples(tmp_path / "samples.jsonl")
    seen: list[bool] = []
    apply = StepComputation.apply

    def looking(work: StepComputation, step: int) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        apply(work, step)

    monkeypatch.setattr(StepComputation, "apply", looking)
    filled: list[bool] = []
    catch: Any = vars(state)["catch_oom"]

    def beyond_the_cap(*arguments: Any) -> Any:
        filled.append(deterministic.fill_uninitialized_memory)
        return catch(*arguments)

    monkeypatch.setattr(state, "catch_oom", beyond_the_cap)
    found = {}
    for on in (True, False):
        spec = make_spec(samples, device="metered", train={"deterministic": on, "max_steps": 3})
        code, events = train(new_run(tmp_path / str(on), spec))
        assert code == 0
        peaks = [event["peak_bytes"] for event in of_kind(events, "step")]
        found[on] = losses(events), peaks
    assert seen == [True] * 3 + [False] * 3
    assert filled and not any(filled), "a proof writes to memory beyond the cap"
    # Same numbers in the same memory: on one thread, the kernels of a CPU are deterministic anyway.
    assert found[True] == found[False]
