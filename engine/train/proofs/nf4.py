"""Proof: 4-bit weights differ from the original weights by no more than the rounding of NF4, and 4-bit layers multiply
by them correctly, gradients included.

Try: `pytest tests/train/proofs/test_kernels.py`
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from engine.errors import EnvironmentProblem
from engine.model.decoder import autocast
from engine.train.proofs.record import DisprovedError, drawn, require_close, tolerance
from engine.train.setup import TrainingSetup

OUTPUTS, INPUTS, TOKENS = 128, 192, 7
FORWARD = "forward"
WORST_QUANTISATION = 0.12
"""Largest relative error of NF4 with blocks of 64 on normal weights; 0.09 is usual (computed with the 16 codes of
Dettmers et al. 2023, appendix E)."""


class QuantisationError(DisprovedError):
    """Weights are quantised or dequantised wrongly, so no reference can be computed from them."""


def applies(setup: TrainingSetup) -> bool:
    """Whether the recipe quantises the base model."""
    return setup.spec.recipe.model.quantize == "nf4"


def facts(setup: TrainingSetup) -> list[str]:
    """What the outcome depends on besides device and versions: the compute dtype."""
    return [str(setup.context.loaded.precision.compute)]


def prove(setup: TrainingSetup) -> str:
    """Quantise a random weight as the loader does. Compare its dequantised values with the original, and the 4-bit
    layer with a plain linear layer of the dequantised values. Returns what was shown, in a few words. Raises
    DisprovedError if they differ by more than expected."""
    compute = setup.context.loaded.precision.compute
    weight = drawn((OUTPUTS, INPUTS), compute, setup, 50) / INPUTS**0.5
    layer = _layer(setup, weight)
    back = dequantize_module_weight(layer)
    try:
        lost = require_close("the weight read back", back, weight, WORST_QUANTISATION)
    except DisprovedError as error:
        raise QuantisationError(str(error)) from None
    worst = _compare(setup, layer, back)
    return f"4-bit weights are within {lost:.1e} of theirs, products within {worst:.1e} of fp32, gradients too"


def fall_back(setup: TrainingSetup) -> str:
    """Have 4-bit layers multiply by their dequantised weights with torch's own operation; returns what the run does
    instead, in a few words.

    Raises:
        EnvironmentProblem: the dequantised weights are wrong, so no layer can be computed.
    """
    try:
        prove(setup)
    except QuantisationError as error:
        raise EnvironmentProblem(
            f"bitsandbytes quantises wrongly on this device: {error}",
            expected=f"weights within {WORST_QUANTISATION} of those that were read",
            fix='set model.quantize = "none", or install another bitsandbytes',
        ) from error
    except Exception:  # noqa: BLE001  (the layer fails in any way: that is why it is replaced)
        pass
    for module in setup.context.loaded.model.modules():
        if type(module).__name__ == "Linear4bit" and isinstance(module, nn.Linear):
            setattr(module, FORWARD, MethodType(_multiply, module))
    return "4-bit layers multiply with the weights read back"


def _multiply(layer: Any, x: Tensor) -> Tensor:
    """The product of `x` and a 4-bit layer's dequantised weight, bias added, by torch's own operation."""
    weight = dequantize_module_weight(layer).to(x.dtype)
    return nn.functional.linear(x, weight, None if layer.bias is None else layer.bias.to(x.dtype))


def _layer(setup: TrainingSetup, weight: Tensor) -> Any:
    """A layer of the class that the loader puts into the model, with `weight` quantised on the run's device."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    device = setup.context.device
    compute = setup.context.loaded.precision.compute
    layer = Linear4bit(
        INPUTS, OUTPUTS, bias=False, compute_dtype=compute, compress_statistics=True, quant_type="nf4", device="meta"
    )
    options = {"requires_grad": False, "compress_statistics": True, "quant_type": "nf4", "module": layer}
    layer.weight = Params4bit(weight.detach(), **options).to(device.torch_device)
    return layer


def _compare(setup: TrainingSetup, layer: Any, back: Tensor) -> float:
    loaded = setup.context.loaded
    compute, limit = loaded.precision.compute, tolerance(loaded.precision.compute)
    x = drawn((TOKENS, INPUTS), compute, setup, 51).requires_grad_()
    upstream = drawn((TOKENS, OUTPUTS), compute, setup, 52)
    with torch.enable_grad(), autocast(loaded):
        output = layer(x)
    (gradient,) = torch.autograd.grad(output, x, upstream.to(output.dtype))
    return max(
        require_close("the product", output, x.detach().float() @ back.float().t(), limit),
        require_close("the gradient of inputs", gradient, upstream.float() @ back.float(), limit),
    )
