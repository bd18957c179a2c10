"""The kernel of keyed dropout is used only where it equals the reference to the bit.

The kernel itself runs here where Triton is installed and its interpreter is on (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from engine.model.dropout import KeyedDropout, keyed
from engine.model.dropout_kernel import difference, reference_drop, use_kernel, using
from engine.model.dropout_key import RowKey

CPU = torch.device("cpu")


def other_step(rows: torch.Tensor, keys: Sequence[RowKey], first: int, probability: float) -> torch.Tensor:
    return reference_drop(rows, [(one ^ 1, two) for one, two in keys], first, probability)


def other_place(rows: torch.Tensor, keys: Sequence[RowKey], first: int, probability: float) -> torch.Tensor:
    return reference_drop(rows, keys, 0, probability)


def unscaled(rows: torch.Tensor, keys: Sequence[RowKey], first: int, probability: float) -> torch.Tensor:
    return reference_drop(rows, keys, first, probability) * (1 - probability)


def failing(rows: torch.Tensor, keys: Sequence[RowKey], first: int, probability: float) -> torch.Tensor:
    raise RuntimeError("no C compiler\nat all")


@pytest.mark.parametrize("wrong", [other_step, other_place, unscaled])
def test_the_comparison_finds_a_wrong_kernel(wrong: Callable[..., torch.Tensor]) -> None:
    found = difference(wrong, reference_drop, CPU)
    assert found is not None and "of the values differ" in found
    assert difference(reference_drop, reference_drop, CPU) is None


@pytest.mark.parametrize(("kernel", "problem"), [(unscaled, "differ"), (failing, "RuntimeError: no C compiler")])
def test_a_kernel_that_is_wrong_or_fails_is_not_used(
    kernel: object, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "engine.model.triton_dropout", SimpleNamespace(drop=kernel))
    found = use_kernel(CPU)
    assert found is not None and problem in found and "\n" not in found
    layer = KeyedDropout(0.5, "q_proj").train()
    with keyed([layer], seed=0, step=1, sample_ids=[0]):
        expected = layer(torch.ones(1, 4, 8))
        with using(unscaled, "cpu"):
            assert torch.equal(layer(torch.ones(1, 4, 8)), expected / 2)
        assert torch.equal(layer(torch.ones(1, 4, 8)), expected)


def test_a_kernel_that_is_right_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def right(rows: torch.Tensor, keys: Sequence[RowKey], first: int, probability: float) -> torch.Tensor:
        calls.append(len(keys))
        return reference_drop(rows, keys, first, probability)

    monkeypatch.setitem(sys.modules, "engine.model.triton_dropout", SimpleNamespace(drop=right))
    with using(reference_drop, "cpu"):
        assert use_kernel(CPU) is None
        calls.clear()
        layer = KeyedDropout(0.5, "q_proj").train()
        values = torch.ones(2, 4, 8, requires_grad=True)
        with keyed([layer], seed=0, step=1, sample_ids=[0, 1]):
            layer(values).sum().backward()
    assert calls == [2, 2]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton and its interpreter")
def test_tritons_kernel_equals_the_reference() -> None:
    """bf16 is compared only with scales that need no rounding, because Triton's interpreter rounds fp32 to bf16 towards
    zero, and a card rounds to nearest."""
    from engine.model.triton_dropout import drop

    assert difference(drop, reference_drop, CPU, dtypes=[torch.float32, torch.float16]) is None
    assert difference(drop, reference_drop, CPU, probabilities=(0.5, 0.75)) is None
