"""LoRA layers compute what peft computes, in the dtype of their input, with gradients in the adapter's dtype."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from engine.model.adapted_linear import compute_in_input_dtype
from engine.model.dropout import KeyedDropout, key_dropout, keyed, keyed_dropouts

ROWS, TOKENS, INPUTS, OUTPUTS, RANK = 2, 64, 48, 80, 4


class Base(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def adapted(layer: nn.Module, **config: Any) -> Any:
    """A model of one LoRA layer, whose adapter has random weights instead of zeros."""
    torch.manual_seed(3)
    options = {"r": RANK, "lora_alpha": 12, "target_modules": ["layer"], "init_lora_weights": False, **config}
    model = get_peft_model(Base(layer), LoraConfig(fan_in_fan_out=isinstance(layer, Conv1D), **options))
    key_dropout(model)
    return model


def run(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Run forward and backward; returns the output, the gradient of `x`, and the gradients of the adapter's weights.
    The backward pass begins with a different gradient for every output value."""
    x = x.detach().requires_grad_()
    with keyed(keyed_dropouts(model), seed=0, step=1, sample_ids=range(ROWS)):
        output = model(x)
        (output.float() * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    model.zero_grad()
    assert x.grad is not None
    return [output.detach(), x.grad, *gradients]


def linear(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype)


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(ROWS, TOKENS, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("config", [{}, {"lora_dropout": 0.3}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("kind", ["linear", "linear without bias", "Conv1D"])
def test_outputs_and_gradients_are_those_of_peft(kind: str, config: dict[str, Any]) -> None:
    layer = Conv1D(OUTPUTS, INPUTS) if kind == "Conv1D" else linear(bias=kind == "linear")
    model = adapted(layer, **config)
    theirs = run(model, inputs())
    compute_in_input_dtype(model)
    torch.testing.assert_close(run(model, inputs()), theirs, rtol=1e-5, atol=1e-4)


class Turned(nn.Linear):
    """A linear layer whose output is a view with other strides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(0, 1).contiguous()).transpose(0, 1)


def test_a_base_whose_output_is_not_contiguous_computes_what_peft_computes() -> None:
    torch.manual_seed(2)
    model = adapted(Turned(INPUTS, OUTPUTS))
    theirs = run(model, inputs())
    compute_in_input_dtype(model)
    torch.testing.assert_close(run(model, inputs()), theirs, rtol=1e-5, atol=1e-4)


def test_half_precision_is_as_exact_as_fp32_adapters_and_gradients_are_fp32() -> None:
    """Both the engine's layer and peft's, which multiplies the adapters in fp32, are compared with the same layer in
    fp32."""
    exact = run(adapted(linear(torch.bfloat16).float()), inputs(torch.bfloat16).float())
    model = adapted(linear(torch.bfloat16))
    theirs = run(model, inputs(torch.bfloat16))
    compute_in_input_dtype(model)
    ours = run(model, inputs(torch.bfloat16))
    assert [tensor.dtype for tensor in ours] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        error, their_error = ((tensor.float() - right).norm() / right.norm() for tensor in (mine, other))
        assert error < max(1.2 * their_error, 2**-8)


class LargestInFp32(TorchDispatchMode):
    """Records the largest fp32 tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


def test_no_activation_is_copied_to_fp32() -> None:
    model = adapted(linear(torch.bfloat16))
    largest = []
    for change in (lambda _: None, compute_in_input_dtype):
        change(model)
        x = inputs(torch.bfloat16).requires_grad_()
        watch: Any = LargestInFp32  # torch gives modes no types
        with watch() as seen:
            model(x).backward(torch.ones(ROWS, TOKENS, OUTPUTS, dtype=torch.bfloat16))
        largest.append(seen.elements)
    assert largest[0] >= ROWS * TOKENS * INPUTS
    assert largest[1] == RANK * OUTPUTS


def test_a_first_layer_learns_though_its_input_needs_no_gradient() -> None:
    model = adapted(linear())
    theirs = run(model, inputs())[2:]
    compute_in_input_dtype(model)
    model(inputs()).mul(torch.linspace(-1, 1, ROWS * TOKENS * OUTPUTS).view(ROWS, TOKENS, OUTPUTS)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    torch.testing.assert_close(gradients, theirs, rtol=1e-5, atol=1e-4)


def test_adapters_that_are_off_merged_or_of_another_kind_stay_with_peft() -> None:
    model = adapted(linear())
    compute_in_input_dtype(model)
    with model.disable_adapter():
        assert torch.equal(model(inputs()), linear()(inputs()))
    apart = model(inputs())
    model.merge_adapter()
    torch.testing.assert_close(model(inputs()), apart, rtol=1e-5, atol=1e-5)
    dora = adapted(linear(), use_dora=True)
    theirs = run(dora, inputs())
    compute_in_input_dtype(dora)
    layers = [module for module in dora.modules() if isinstance(module, LoraLayer)]
    assert ["forward" in vars(layer) for layer in layers] == [False]
    assert all(torch.equal(mine, other) for mine, other in zip(run(dora, inputs()), theirs, strict=True))


def test_the_gradient_passes_a_quantised_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-alike of bitsandbytes, whose "4-bit" weight is the transposed weight in half the scale."""

    class Params4bit(nn.Parameter):
        quant_state = 2.0

    class Quantised(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.data.t() * 2.0, self.bias)

    def dequantize_4bit(data: torch.Tensor, scale: float) -> torch.Tensor:
        return data.t() * scale

    monkeypatch.setitem(
        sys.modules, "bitsandbytes", SimpleNamespace(functional=SimpleNamespace(dequantize_4bit=dequantize_4bit))
    )
    plain = linear()
    quantised = Quantised(INPUTS, OUTPUTS)
    model, other = adapted(quantised), adapted(linear())
    weight, bias = plain.get_parameter("weight").detach(), plain.get_parameter("bias").detach()
    packed = Params4bit(weight.t() / 2, requires_grad=False)
    quantised.weight = packed
    quantised.bias.data.copy_(bias)
    for each in (model, other):
        compute_in_input_dtype(each)
    torch.testing.assert_close(run(model, inputs()), run(other, inputs()), rtol=1e-5, atol=1e-4)


def test_dropout_keeps_its_masks() -> None:
    model = adapted(linear(), lora_dropout=0.5)
    compute_in_input_dtype(model)
    assert [type(layer) for layer in keyed_dropouts(model)] == [KeyedDropout]
    first, again = run(model, inputs()), run(model, inputs())
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
