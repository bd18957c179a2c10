"""The weights of one layer in a walk, and what is computed with them: which learn decides what is kept.

Which operations a layer consists of is `engine.budget.layer` and `engine.budget.vision`.

Try: `python -m pytest tests/budget/test_accuracy.py`
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.budget.adapter import Adapted, adapted, adapted_linear
from engine.budget.ghost import Ghost, Walk
from engine.budget.operations import half_linear, linear
from engine.budget.parameter import Parameter
from engine.budget.selection import Selection
from engine.budget.setting import Setting
from engine.budget.static import rounded


class Weights:
    """Parameters by their names relative to the layer. `transposed`: linear weights are [inputs, outputs]."""

    def __init__(
        self, walk: Walk, setting: Setting, chosen: Selection, parameters: Iterable[Parameter], *, transposed: bool
    ) -> None:
        self.walk = walk
        self.setting = setting
        self.chosen = chosen
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self.transposed = transposed

    def linear(self, module: str, x: Ghost, merged: int = 1) -> Ghost:
        """A linear layer, with peft's adapter beside it where it has one; it takes `merged` tokens at once."""
        name, setting = f"{module}.weight", self.setting
        parameter = self.parameters[name]
        if name not in self.chosen.adapted:
            return self._base(module, parameter, x, merged)
        outputs, inputs = self._shape(parameter)
        bias = f"{module}.bias"
        if not (setting.dora or setting.dropout or bias in self.chosen.trained or self.walk.autocast):
            return adapted_linear(self.walk, setting, x, outputs, inputs, merged, self._unpacked(parameter))
        layer = Adapted(outputs, inputs, bias in self.parameters, merged)
        # Nested, so that what the base gives is let go of as soon as the sum with it is made.
        return adapted(self.walk, setting, layer, x, self._base(module, parameter, x, merged))

    def _base(self, module: str, parameter: Parameter, x: Ghost, merged: int) -> Ghost:
        """The layer's own weight and bias."""
        walk, weight, trained, bias = self.walk, 0, False, 0
        if self.chosen.trained and (walk.learning or walk.autocast):  # which keeps what it cast in any pass
            weight, trained = self.parameter(parameter.name)
            bias = self.bias(module)
        outputs = -(-self._shape(parameter)[0] // merged)
        if walk.autocast:
            return half_linear(walk, x, outputs, parameter.elements, trained, bias)
        return linear(walk, x, outputs, weight, trained, bias, self._unpacked(parameter))

    def _unpacked(self, parameter: Parameter) -> int:
        """Bytes of a quantised weight while it is multiplied with; 0 of one that is as it is used."""
        return parameter.elements * self.setting.base_bytes if self.setting.quantized else 0

    def weight(self, module: str) -> tuple[int, bool]:
        """Bytes of a module's weight gradient, and whether it is trained."""
        return self.parameter(f"{module}.weight")

    def bias(self, module: str) -> int:
        """Bytes of the gradient of its bias; 0 where it has none, or none that is trained."""
        size, trained = self.parameter(f"{module}.bias")
        return size if trained else 0

    def parameter(self, name: str) -> tuple[int, bool]:
        """The same of any of the parameters."""
        parameter = self.parameters.get(name)
        if parameter is None:
            return 0, False
        return rounded(parameter.elements * self.setting.base_bytes), name in self.chosen.trained

    def _shape(self, parameter: Parameter) -> tuple[int, int]:
        """(outputs, inputs) of a linear layer's weight."""
        rows, columns = parameter.shape
        return (columns, rows) if self.transposed else (rows, columns)
