"""Proof: a LoRA layer as the run computes it gives base(x) + B(A(x))·scaling and its gradients.

Shapes: T tokens, R rank; a stand-in layer has at most WIDEST inputs and outputs.

Try: `pytest tests/train/proofs/test_kernels.py`
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from engine.model.adapted_linear import compute_in_input_dtype, compute_with_peft, is_ours
from engine.model.decoder import autocast
from engine.model.loaded import ADAPTER
from engine.train.proofs.record import DisprovedError, drawn, require_close, tolerance
from engine.train.setup import TrainingSetup

TOKENS, WIDEST = 7, 256


def applies(setup: TrainingSetup) -> bool:
    """Whether the project's own operation, and not peft, computes the run's LoRA adapters."""
    return _own_layer(setup) is not None


def facts(setup: TrainingSetup) -> list[str]:
    """What the outcome depends on: dtypes, sizes, rank and scaling of the run's adapters."""
    layer = _require_layer(setup)
    weight = layer.lora_A[ADAPTER].weight
    return [str(setup.context.loaded.precision.compute), str(weight.dtype), str(_shape(layer)), str(_scaling(layer))]


def prove(setup: TrainingSetup) -> str:
    """Compare output and gradients of a stand-in for the run's first adapted layer with the formula in fp32. Returns
    what was shown, in a few words. Raises DisprovedError if they differ by more than rounding."""
    layer = _require_layer(setup)
    found, expected = _results(setup, layer, exact=False), _results(setup, layer, exact=True)
    limit = tolerance(setup.context.loaded.precision.compute)
    worst = max(require_close(name, found.get(name), expected[name], limit) for name in expected)
    return f"base(x) + B(A(x)) is within {worst:.1e} of fp32, gradients too"


def fall_back(setup: TrainingSetup) -> str:
    """Have peft compute every adapter; returns what the run does instead, in a few words."""
    compute_with_peft(setup.context.loaded.model)
    return "adapters are computed by peft"


def _results(setup: TrainingSetup, layer: Any, *, exact: bool) -> dict[str, Tensor]:
    """Compute a stand-in for `layer`, or with `exact` the formula in fp32; returns the output [1, T, outputs] and the
    gradients, by name. Inputs and weights are the same at each call.

    Raises DisprovedError if backward leaves no gradient.
    """
    loaded, (inputs, outputs, rank) = setup.context.loaded, _shape(layer)
    compute, trained = loaded.precision.compute, layer.lora_A[ADAPTER].weight.dtype
    weight_OI = drawn((outputs, inputs), compute, setup, 40) / inputs**0.5
    a_RI = drawn((rank, inputs), trained, setup, 41) / inputs**0.5
    b_OR = drawn((outputs, rank), trained, setup, 42) / rank**0.5
    x_TI, upstream_TO = drawn((1, TOKENS, inputs), compute, setup, 43), drawn((1, TOKENS, outputs), compute, setup, 44)
    if exact:
        weight_OI, a_RI, b_OR, x_TI, upstream_TO = (each.float() for each in (weight_OI, a_RI, b_OR, x_TI, upstream_TO))
    learning = [each.requires_grad_() for each in (x_TI, a_RI, b_OR)]
    with torch.enable_grad():
        if exact:
            output_TO = x_TI @ weight_OI.t() + (x_TI @ a_RI.t()) @ b_OR.t() * _scaling(layer)
        else:
            stand_in = _stand_in(weight_OI, rank, _scaling(layer))
            place: Any = stand_in.get_submodule("projection")
            learning[1:] = _put(place, a_RI, b_OR)
            with autocast(loaded):
                output_TO = stand_in(x_TI)
        output_TO.backward(upstream_TO.to(output_TO.dtype))
    if any(each.grad is None for each in learning):
        raise DisprovedError("backward leaves no gradient")
    names = ("the gradient of inputs", "the gradient of A", "the gradient of B")
    gradients = {name: each.grad for name, each in zip(names, learning, strict=True) if each.grad is not None}
    return {"output": output_TO.detach(), **gradients}


class _Block(nn.Module):
    """A model of one linear layer, named `projection`, into which an adapter is put."""

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        self.projection = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
        self.projection.weight = nn.Parameter(weight_OI, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        output: Tensor = self.projection(x)
        return output


def _stand_in(weight_OI: Tensor, rank: int, scaling: float) -> nn.Module:
    config = LoraConfig(r=rank, lora_alpha=scaling * rank, target_modules=["projection"])  # type: ignore[arg-type]  # peft says int, and takes any number
    block = inject_adapter_in_model(config, _Block(weight_OI), adapter_name=ADAPTER)
    compute_in_input_dtype(block)
    return block


def _put(place: Any, a_RI: Tensor, b_OR: Tensor) -> list[Tensor]:
    """Replace the adapter weights of the stand-in layer `place` by A [R, inputs] and B [outputs, R]; returns both
    parameters."""
    place.lora_A[ADAPTER].weight = nn.Parameter(a_RI.detach())
    place.lora_B[ADAPTER].weight = nn.Parameter(b_OR.detach())
    return [place.lora_A[ADAPTER].weight, place.lora_B[ADAPTER].weight]


def _own_layer(setup: TrainingSetup) -> LoraLayer | None:
    layers = (module for module in setup.context.loaded.model.modules() if isinstance(module, LoraLayer))
    return next((layer for layer in layers if is_ours(layer)), None)


def _require_layer(setup: TrainingSetup) -> Any:
    layer = _own_layer(setup)
    assert layer is not None, "applies() was not asked"
    return layer


def _shape(layer: Any) -> tuple[int, int, int]:
    """(inputs, outputs, rank) of the stand-in for `layer`: as in `layer`, with at most WIDEST inputs and outputs."""
    return min(WIDEST, layer.in_features), min(WIDEST, layer.out_features), int(layer.r[ADAPTER])


def _scaling(layer: Any) -> float:
    return float(layer.scaling[ADAPTER])
