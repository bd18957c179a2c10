"""Proofs of linear layers: a LoRA layer gives base(x) + B(A(x))·scaling, 4-bit layers multiply by what was quantised.

Shapes: T tokens, R rank, I inputs, O outputs.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from engine.budget.trace.weights import SIBLINGS
from engine.errors import EnvironmentProblem
from engine.model.adapted_linear import compute_in_input_dtype, compute_with_peft, is_ours, shares_input
from engine.model.decoder import autocast
from engine.model.saved_adapter import ADAPTER
from engine.verify.record import DisprovedError, Proof, ProvedRun, drawn, require_close, tolerance, worst_error

ADAPTER_TOKENS, WIDEST = 7, 256
"""A stand-in for an adapted layer has at most WIDEST inputs and outputs."""
NF4_OUTPUTS, NF4_INPUTS, NF4_TOKENS = 128, 192, 7
WORST_QUANTISATION = 0.12
"""Largest relative error of NF4 with blocks of 64 on normal weights; 0.09 is usual (computed with the 16 codes of
Dettmers et al. 2023, appendix E)."""
FORWARD = "forward"


def _adapter_facts(run: ProvedRun) -> list[str]:
    layer = _own_adapter(run)
    dtypes = run.context.loaded.precision.compute, layer.lora_A[ADAPTER].weight.dtype
    return [*map(str, dtypes), str(_adapter_shape(layer)), str(_scaling(layer)), str(shares_input(layer))]


def prove_adapter(run: ProvedRun) -> str:
    """Compare output and gradients of a stand-in for the run's first adapted layer with the formula in fp32; and of two
    that share their input, if layers of the run do."""
    limit, shared = tolerance(run.context.loaded.precision.compute), shares_input(_own_adapter(run))
    counts = (1, 2) if shared else (1,)
    worst = max(
        worst_error(_adapted(run, count, exact=False), _adapted(run, count, exact=True), limit) for count in counts
    )
    beside = ", alone and with another layer" if shared else ""
    return f"base(x) + B(A(x)){beside} is within {worst:.1e} of fp32, also in gradients"


def _use_peft(run: ProvedRun) -> str:
    compute_with_peft(run.context.loaded.model)
    return "adapters are computed by peft"


def _adapted(run: ProvedRun, count: int, *, exact: bool) -> dict[str, Tensor]:
    """Compute stand-ins for `count` adapted layers that read the same input, or with `exact` the formula in fp32;
    returns the outputs [1, T, count · O] and the gradients, by name. Inputs and weights are the same at each call."""
    layer, loaded = _own_adapter(run), run.context.loaded
    inputs, outputs, rank = _adapter_shape(layer)
    compute, trained = loaded.precision.compute, layer.lora_A[ADAPTER].weight.dtype
    weights_OI = [drawn((outputs, inputs), compute, run, 40 + 5 * i) / inputs**0.5 for i in range(count)]
    factors = [drawn((rank, inputs), trained, run, 41 + 5 * i) / inputs**0.5 for i in range(count)]
    factors += [drawn((outputs, rank), trained, run, 42 + 5 * i) / rank**0.5 for i in range(count)]
    x_TI = drawn((1, ADAPTER_TOKENS, inputs), compute, run, 43)
    upstream_TO = drawn((1, ADAPTER_TOKENS, count * outputs), compute, run, 44)
    if exact:
        weights_OI, factors = ([each.float() for each in group] for group in (weights_OI, factors))
        x_TI, upstream_TO = x_TI.float(), upstream_TO.float()
    learning = [each.requires_grad_() for each in (x_TI, *factors)]
    with torch.enable_grad():
        if exact:
            places = zip(weights_OI, factors[:count], factors[count:], strict=True)
            parts = [x_TI @ w.t() + (x_TI @ a.t()) @ b.t() * _scaling(layer) for w, a, b in places]
            output_TO = torch.cat(parts, dim=-1)
        else:
            stand_in, learning[1:] = _adapted_stand_in(weights_OI, factors, _scaling(layer))
            with autocast(loaded):
                output_TO = stand_in(x_TI)
        output_TO.backward(upstream_TO.to(output_TO.dtype))
    if any(each.grad is None for each in learning):
        raise DisprovedError("backward leaves no gradient")
    names = ["the gradient of inputs", *(f"the gradient of {kind}{i or ''}" for kind in "AB" for i in range(count))]
    gradients = {name: each.grad for name, each in zip(names, learning, strict=True) if each.grad is not None}
    return {"output": output_TO.detach(), **gradients}


class _Block(nn.Module):
    """A model of linear layers that read the same input, into which adapters are put."""

    def __init__(self, weights_OI: list[Tensor]) -> None:
        super().__init__()
        for name, weight_OI in zip(SIBLINGS[0], weights_OI, strict=False):
            linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight_OI, requires_grad=False)
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([projection(x) for projection in self.children()], dim=-1)


def _adapted_stand_in(
    weights_OI: list[Tensor], factors: list[Tensor], scaling: float
) -> tuple[nn.Module, list[nn.Parameter]]:
    """(layers with adapters of these A's and B's, computed as the run computes its own; the adapters' parameters)."""
    count, rank = len(weights_OI), len(factors[0])
    names = SIBLINGS[0][:count]
    config = LoraConfig(r=rank, lora_alpha=scaling * rank, target_modules=[*names])  # type: ignore[arg-type]  # peft says int, and takes any number
    block = inject_adapter_in_model(config, _Block(weights_OI), adapter_name=ADAPTER)
    compute_in_input_dtype(block)
    places: list[Any] = [block.get_submodule(name) for name in names]
    halves = [place.lora_A[ADAPTER] for place in places] + [place.lora_B[ADAPTER] for place in places]
    for half, factor in zip(halves, factors, strict=True):
        half.weight = nn.Parameter(factor.detach())
    return block, [half.weight for half in halves]


def _own_adapter(run: ProvedRun) -> Any:
    """The first layer whose adapter the project's own operation computes, and not peft, rather one that shares its
    input; None without one."""
    layers = [module for module in run.context.loaded.model.modules() if is_ours(module)]
    return next(iter(sorted(layers, key=shares_input, reverse=True)), None)


def _adapter_shape(layer: Any) -> tuple[int, int, int]:
    return min(WIDEST, layer.in_features), min(WIDEST, layer.out_features), int(layer.r[ADAPTER])


def _scaling(layer: Any) -> float:
    return float(layer.scaling[ADAPTER])


class QuantisationError(DisprovedError):
    """Weights are quantised or dequantised wrongly, so no reference can be computed from them."""


def prove_nf4(run: ProvedRun) -> str:
    """Quantise a random weight as the loader does. Compare its dequantised values with the original, and the 4-bit
    layer with a plain linear layer of the dequantised values."""
    weight = drawn((NF4_OUTPUTS, NF4_INPUTS), run.context.loaded.precision.compute, run, 50) / NF4_INPUTS**0.5
    layer = nf4_layer(run, weight)
    back = dequantize_module_weight(layer)
    try:
        lost = require_close("the dequantised weight", back, weight, WORST_QUANTISATION)
    except DisprovedError as error:
        raise QuantisationError(str(error)) from None
    worst = _nf4_error(run, layer, back)
    return (
        f"4-bit weights are within {lost:.1e} of the original, products within {worst:.1e} of fp32, also in gradients"
    )


def multiply_dequantised(run: ProvedRun) -> str:
    """Have 4-bit layers multiply by their dequantised weights with torch's own operation. Raises EnvironmentProblem if
    these are wrong, so that no layer can be computed."""
    try:
        prove_nf4(run)
    except QuantisationError as error:
        raise EnvironmentProblem(
            f"bitsandbytes quantises wrongly on this device: {error}",
            expected=f"weights within {WORST_QUANTISATION} of the original",
            fix='set model.quantize = "none", or install another bitsandbytes',
        ) from error
    except Exception:  # noqa: BLE001  (the layer fails in any way: that is why it is replaced)
        pass
    for module in run.context.loaded.model.modules():
        if type(module).__name__ == "Linear4bit" and isinstance(module, nn.Linear):
            setattr(module, FORWARD, MethodType(_multiply, module))
    return "4-bit layers multiply with dequantised weights"


def _multiply(layer: Any, x: Tensor) -> Tensor:
    weight = dequantize_module_weight(layer).to(x.dtype)
    return nn.functional.linear(x, weight, None if layer.bias is None else layer.bias.to(x.dtype))


def nf4_layer(run: ProvedRun, weight_OI: Tensor) -> Any:
    """A layer of the class that the loader puts into the model, with the weight quantised on the run's device."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    (outputs, inputs), compute = weight_OI.shape, run.context.loaded.precision.compute
    layer = Linear4bit(
        inputs, outputs, bias=False, compute_dtype=compute, compress_statistics=True, quant_type="nf4", device="meta"
    )
    options = {"requires_grad": False, "compress_statistics": True, "quant_type": "nf4", "module": layer}
    layer.weight = Params4bit(weight_OI.detach(), **options).to(run.context.device.torch_device)
    return layer


def _nf4_error(run: ProvedRun, layer: Any, back_OI: Tensor) -> float:
    loaded = run.context.loaded
    compute, limit = loaded.precision.compute, tolerance(loaded.precision.compute)
    x = drawn((NF4_TOKENS, NF4_INPUTS), compute, run, 51).requires_grad_()
    upstream = drawn((NF4_TOKENS, NF4_OUTPUTS), compute, run, 52)
    with torch.enable_grad(), autocast(loaded):
        output = layer(x)
    (gradient,) = torch.autograd.grad(output, x, upstream.to(output.dtype))
    found = {"the product": output, "the gradient of inputs": gradient}
    expected = (x.detach().float() @ back_OI.float().t(), upstream.float() @ back_OI.float())
    return worst_error(found, dict(zip(found, expected, strict=True)), limit)


ADAPTED = Proof("adapter", prove_adapter, _use_peft, lambda run: _own_adapter(run) is not None, _adapter_facts)
NF4 = Proof(
    "nf4",
    prove_nf4,
    multiply_dequantised,
    lambda run: run.spec.recipe.model.quantize == "nf4",
    lambda run: [str(run.context.loaded.precision.compute)],
)
