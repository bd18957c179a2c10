"""The weights of one layer in a memory trace, and its linear layers: trained weights decide what is saved.

The operations of layers are in `engine.budget.trace.layer` and `engine.budget.trace.vision_layer`.

Try: `python -m pytest tests/budget/test_accuracy.py`
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.budget.architecture.parameter import Parameter
from engine.budget.blocks import round_to_blocks
from engine.budget.trace.adapter import AdaptedLayer, adapted
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, TracedTensor
from engine.budget.trace.operations import half_linear, linear
from engine.budget.trace.trainable import Trainable


class Weights:
    """The parameters of a layer, by names relative to it. `transposed`: linear weights are [inputs, outputs]."""

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
        """A linear layer, with peft's adapter beside it where it has one; it takes `merged` tokens at once."""
        parameter = self.parameters[f"{module}.weight"]
        if parameter.name not in self.trainable.adapted:
            return self._base(module, parameter, x, merged)
        layer = AdaptedLayer(*self._shape(parameter), f"{module}.bias" in self.parameters, merged)
        # Nested, so that the base's output is freed as soon as the sum with it is made.
        return adapted(self.trace, self.config, layer, x, self._base(module, parameter, x, merged))

    def _base(self, module: str, parameter: Parameter, x: TracedTensor, merged: int) -> TracedTensor:
        """The linear layer without its adapter."""
        trace, bias = self.trace, self.bias(module)
        weight, trained = self.parameter(parameter.name)
        outputs = -(-self._shape(parameter)[0] // merged)
        if trace.autocast:
            return half_linear(trace, x, outputs, parameter.elements, trained, bias)
        return linear(trace, x, outputs, weight, trained, bias, self._unpacked(parameter))

    def _unpacked(self, parameter: Parameter) -> int:
        """Bytes of a quantised weight unpacked; 0 for weights that are not quantised."""
        return parameter.elements * self.config.base_bytes if self.config.quantized else 0

    def weight(self, module: str) -> tuple[int, bool]:
        """Bytes of a module's weight gradient, and whether it is trained."""
        return self.parameter(f"{module}.weight")

    def bias(self, module: str) -> int:
        """Bytes of the gradient of its bias; 0 where it has none, or none that is trained."""
        size, trained = self.parameter(f"{module}.bias")
        return size if trained else 0

    def parameter(self, name: str) -> tuple[int, bool]:
        """Bytes of a parameter's gradient, and whether it is trained."""
        parameter = self.parameters.get(name)
        if parameter is None:
            return 0, False
        return round_to_blocks(parameter.elements * self.config.base_bytes), name in self.trainable.trained

    def _shape(self, parameter: Parameter) -> tuple[int, int]:
        """(outputs, inputs) of a linear layer's weight."""
        rows, columns = parameter.shape
        return (columns, rows) if self.transposed else (rows, columns)
