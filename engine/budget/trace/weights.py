"""`Weights`, the base class of traced layers: their parameters, and their linear layers with or without an adapter.

A linear layer saves its input for backward only if its weight is trained. What else a layer computes is in
`engine.budget.trace.layer` and `engine.budget.trace.vision_layer`.

Try: `python -m pytest tests/budget/test_accuracy.py`
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.budget.architecture.parameter import Parameter
from engine.budget.blocks import round_to_blocks
from engine.budget.trace.adapter import AdaptedLayer, dora, plain_lora
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, TracedTensor
from engine.budget.trace.operations import half_linear, linear
from engine.budget.trace.trainable import Trainable


class Weights:
    """A traced layer's parameters, named relative to the layer.

    `transposed`: weights of linear layers are stored as [inputs, outputs].
    """

    def __init__(
        self,
        trace: MemoryTrace,
        config: MemoryConfig,
        trainable: Trainable,
        parameters: Iterable[Parameter],
        *,
        transposed: bool,
    ) -> None:
        self.trace = trace
        self.config = config
        self.trainable = trainable
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self.transposed = transposed

    def linear(self, module: str, x: TracedTensor, merged: int = 1) -> TracedTensor:
        """Trace the linear layer `module`, plus its adapter if it has one; each input vector joins the values of
        `merged` tokens."""
        parameter = self.parameters[f"{module}.weight"]
        if parameter.name not in self.trainable.adapted:
            return self._base(module, parameter, x, merged)
        biased, unpacked = f"{module}.bias" in self.parameters, self._unpacked(parameter)
        layer = AdaptedLayer(*self._shape(parameter), biased, merged, unpacked)
        if not self.config.dora:
            return plain_lora(self.trace, self.config, layer, x)
        # Nested, so that the base layer's output is freed as soon as the adapter's output has been added to it.
        return dora(self.trace, self.config, layer, x, self._base(module, parameter, x, merged))

    def _base(self, module: str, parameter: Parameter, x: TracedTensor, merged: int) -> TracedTensor:
        """Trace the linear layer without its adapter; `merged` as in `linear`."""
        trace, bias = self.trace, self.bias(module)
        weight, trained = self.parameter(parameter.name)
        outputs = -(-self._shape(parameter)[0] // merged)
        if trace.autocast:
            return half_linear(trace, x, outputs, parameter.elements, trained, bias)
        return linear(trace, x, outputs, weight, trained, bias, self._unpacked(parameter))

    def _unpacked(self, parameter: Parameter) -> int:
        """Bytes of the dequantised copy that a product with a quantised weight needs; 0 without quantisation."""
        return parameter.elements * self.config.base_bytes if self.config.quantized else 0

    def weight(self, module: str) -> tuple[int, bool]:
        """Bytes of the gradient of a module's weight, and whether the weight is trained."""
        return self.parameter(f"{module}.weight")

    def bias(self, module: str) -> int:
        """Bytes of the gradient of a module's bias; 0 if the module has no bias or the bias is not trained."""
        size, trained = self.parameter(f"{module}.bias")
        return size if trained else 0

    def parameter(self, name: str) -> tuple[int, bool]:
        """Bytes of a parameter's gradient, and whether the parameter is trained; (0, False) for unknown names."""
        parameter = self.parameters.get(name)
        if parameter is None:
            return 0, False
        return round_to_blocks(parameter.elements * self.config.base_bytes), name in self.trainable.trained

    def _shape(self, parameter: Parameter) -> tuple[int, int]:
        """Return (outputs, inputs) of a linear layer's weight."""
        rows, columns = parameter.shape
        return (columns, rows) if self.transposed else (rows, columns)
