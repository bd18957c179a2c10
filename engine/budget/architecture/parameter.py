"""One tensor of a model by name and shape; a model's tensors are listed in `engine.budget.architecture.parameters`.

Try: `python -m pytest tests/budget/test_parameters.py`
"""

from __future__ import annotations

from math import prod


class Parameter:
    """One tensor of a model. `linear` marks the weight of a linear layer, which can get an adapter."""

    __slots__ = ("elements", "linear", "name", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], linear: bool = False) -> None:
        self.name = name
        self.shape = shape
        self.linear = linear
        self.elements = prod(shape)

    @property
    def module(self) -> str:
        """Dotted name of the module that the parameter belongs to: the parameter's name without its last part."""
        return self.name.rpartition(".")[0]


def linear(name: str, inputs: int, outputs: int, bias: bool) -> list[Parameter]:
    """The parameters of a `torch.nn.Linear`: weight [outputs, inputs] and, if `bias`, the bias."""
    weight = Parameter(f"{name}.weight", (outputs, inputs), linear=True)
    return [weight, Parameter(f"{name}.bias", (outputs,))] if bias else [weight]


def vectors(name: str, size: int, *, bias: bool) -> list[Parameter]:
    """The parameters of a norm: the weight [size] and, if `bias` (a layer norm), the bias [size]."""
    return [Parameter(f"{name}.{part}", (size,)) for part in (("weight", "bias") if bias else ("weight",))]
