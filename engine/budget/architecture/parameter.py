"""One tensor of a model by name and shape; a model's tensors are listed in `engine.budget.architecture.parameters`.

Try: `python -m pytest tests/budget/test_parameters.py`
"""

from __future__ import annotations

from math import prod


class Parameter:
    """One tensor, never changed. `linear` marks the weight of a linear layer, which an adapter can be put beside."""

    __slots__ = ("elements", "linear", "name", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], linear: bool = False) -> None:
        self.name = name
        self.shape = shape
        self.linear = linear
        self.elements = prod(shape)

    @property
    def module(self) -> str:
        """Dotted name of the module that owns it."""
        return self.name.rpartition(".")[0]


def linear(name: str, inputs: int, outputs: int, bias: bool) -> list[Parameter]:
    """A torch Linear: weight [outputs, inputs] and, where there is one, its bias."""
    weight = Parameter(f"{name}.weight", (outputs, inputs), linear=True)
    return [weight, Parameter(f"{name}.bias", (outputs,))] if bias else [weight]


def vectors(name: str, size: int, *, bias: bool) -> list[Parameter]:
    """A norm: its weight and, for a layer norm, its bias."""
    return [Parameter(f"{name}.{part}", (size,)) for part in (("weight", "bias") if bias else ("weight",))]
