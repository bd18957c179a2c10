"""The parameters of a traced layer, and its linear layers with or without a LoRA adapter: plain as
`engine.model.adapted_linear` computes it, DoRA as peft does.

The local variables are those of that module, and of `layer.py`, `bnb.py` and `dora.py` in `peft/tuners/lora/`: a tensor
stays allocated while one refers to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.architecture.parameters import Parameter
from engine.budget.calibration import round_to_blocks
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, Storage, TracedTensor
from engine.budget.trace.operations import add, copy, dropped, half_linear, linear, scale, scale_by_weight
from engine.budget.trace.polynomial import BYTE, NO_BYTES, TOKEN, BytesPolynomial
from engine.budget.trace.trainable import Trainable

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
    ("query", "key", "value"),
)
"""Names, in one module, of linear layers that read the same input: their adapters share one product
(`engine.model.adapted_linear`)."""


class AdaptedLayer(NamedTuple):
    outputs: int
    inputs: int
    biased: bool
    merged: int = 1
    """Tokens whose hidden states are concatenated to one input vector of the layer; 1 in most layers."""
    unpacked: int = 0
    """Bytes of the dequantised copy of a quantised weight, which exists during a product with it."""


def plain_lora(trace: MemoryTrace, config: MemoryConfig, layer: AdaptedLayer, x: TracedTensor) -> TracedTensor:
    """Trace base(x) + dropout(x) · Aᵀ · Bᵀ · scaling as one operation, in x's dtype. The adapter's weights are cast for
    each product; their gradients are live together until the operation's backward is over."""
    adapter_input = dropped(trace, config, x) if config.dropout else x
    itemsize, rank = x.itemsize, -(-config.rank // layer.merged) * TOKEN
    sides = [config.rank * width for width in (layer.inputs, layer.outputs)]
    casts = [count * itemsize * BYTE if config.casts_adapters else NO_BYTES for count in sides]
    gradients = [round_to_blocks(count * config.adapter_bytes) * BYTE for count in sides]
    size, whole_size, rank_size = x.size, layer.unpacked * BYTE, rank * itemsize
    x_wanted, dropout = x.node is not None, config.dropout

    def weight_gradient(side: int) -> Storage:
        product = trace.allocate(casts[side])
        gradient = trace.allocate(gradients[side])
        del product
        return gradient

    def passing(size: BytesPolynomial) -> None:
        temporary = trace.allocate(size)
        del temporary

    def backward(gradient: Storage) -> list[Storage | None]:
        grad_b = weight_gradient(1)
        low_rank = trace.allocate(casts[1])
        grad_low_rank = trace.allocate(rank_size)
        del low_rank
        grad_a = weight_gradient(0)
        whole = trace.allocate(whole_size)
        grad_x = trace.allocate(size) if x_wanted else None
        del whole
        a = trace.allocate(casts[0])
        grad_dropped = trace.allocate(size) if x_wanted and dropout else None
        del a, grad_low_rank
        trace.adopt_gradient(grad_a)
        trace.adopt_gradient(grad_b)
        return [grad_x, grad_dropped] if dropout else [grad_x]

    whole = trace.allocate(whole_size)
    output = trace.new(-(-layer.outputs // layer.merged) * TOKEN, itemsize)
    del whole
    a = trace.allocate(casts[0])
    low_rank = trace.new(rank, itemsize)
    del a
    passing(casts[1])
    inputs = [x, adapter_input] if config.dropout else [x]
    return trace.on_tape(output, inputs, backward, trace.save(adapter_input, low_rank), trains=True)


class SharedProduct:
    """Trace the product of x with the A's of several layers (`_ProductWithAll` of `engine.model.adapted_linear`).
    `linear` traces what each layer does on its own."""

    def __init__(
        self, trace: MemoryTrace, config: MemoryConfig, inputs: int, layers: list[str], x: TracedTensor
    ) -> None:
        self.trace, self.config, self.x = trace, config, x
        self.waiting = list(layers)
        """The layers still to be called."""
        rank = len(layers) * config.rank
        self._begun: list[Storage] = []
        """The gradient of the low-rank product, once a layer's backward has begun it."""
        joined, size = rank * inputs * x.itemsize * BYTE, x.size
        gradients = round_to_blocks(rank * inputs * config.adapter_bytes) * BYTE
        x_wanted, casts, begun = x.node is not None, config.casts_adapters, self._begun

        def backward(gradient: Storage) -> list[Storage | None]:
            grad_low_rank = begun.pop()
            product = trace.allocate(joined) if casts else None
            grads_a = trace.allocate(gradients)
            del product
            weights = trace.allocate(joined) if x_wanted else None
            del weights, grad_low_rank
            trace.adopt_gradient(grads_a)
            return [gradient if x_wanted else None]

        weights = trace.allocate(joined)
        low_rank = trace.new(rank * TOKEN, x.itemsize)
        del weights
        self._low_rank = low_rank
        self._alias = TracedTensor(x.storage, x.elements, x.itemsize, size)
        trace.on_tape(self._alias, [x], backward, trace.save(x), trains=True)

    def linear(self, module: str, layer: AdaptedLayer) -> TracedTensor:
        trace, config, itemsize = self.trace, self.config, self.x.itemsize
        self.waiting.remove(module)
        count = config.rank * layer.outputs
        cast_size = count * itemsize * BYTE if config.casts_adapters else NO_BYTES
        gradient_size = round_to_blocks(count * config.adapter_bytes) * BYTE
        size, low_rank_size, whole_size = self.x.size, self._low_rank.size, layer.unpacked * BYTE
        x_wanted, begun = self.x.node is not None, self._begun

        def backward(gradient: Storage) -> list[Storage | None]:
            product = trace.allocate(cast_size)
            grad_b = trace.allocate(gradient_size)
            del product
            first = not begun
            if first:
                begun.append(trace.allocate(low_rank_size))
            b = trace.allocate(cast_size)
            del b
            whole = trace.allocate(whole_size) if x_wanted else None
            grad_x = trace.allocate(size) if x_wanted and first else None
            del whole
            trace.adopt_gradient(grad_b)
            return [(grad_x or begun[0]) if first else None]

        whole = trace.allocate(whole_size)
        output = trace.new(layer.outputs * TOKEN, itemsize)
        del whole
        b = trace.allocate(cast_size)
        del b
        return trace.on_tape(output, [self._alias], backward, trace.save(self._low_rank), trains=True)


def dora(
    trace: MemoryTrace, config: MemoryConfig, layer: AdaptedLayer, x: TracedTensor, handed: list[TracedTensor]
) -> TracedTensor:
    """The one element of `handed` is base(x), which is taken out so that it can be freed here. Computed in the wider
    dtype of base and adapter, then cast to the base's."""
    itemsize = handed[0].itemsize
    result = copy(trace, handed.pop()) if config.quantized else handed.pop()
    if config.casts_adapters:
        x = trace.unary(x, x.elements, config.adapter_bytes)
    update = _dora(trace, config, layer, [x], result)
    return trace.unary(update, update.elements, itemsize) if config.casts_adapters else update


def _low_rank(
    trace: MemoryTrace, config: MemoryConfig, layer: AdaptedLayer, handed: list[TracedTensor]
) -> TracedTensor:
    """B(A(x)), where A and B are the two matrices of the adapter; x is taken out of `handed`."""
    rank, itemsize = config.rank, config.adapter_bytes
    weight = round_to_blocks(rank * layer.inputs * itemsize)
    first = linear(trace, handed.pop(), -(-rank // layer.merged), weight, True)
    outputs = -(-layer.outputs // layer.merged)
    return linear(trace, first, outputs, round_to_blocks(rank * layer.outputs * itemsize), True)


def _dora(
    trace: MemoryTrace, config: MemoryConfig, layer: AdaptedLayer, given: list[TracedTensor], result: TracedTensor
) -> TracedTensor:
    """`DoraLinearLayer.forward`: result + (m - 1) · base + m · B(A(x)) · scaling, where m is the magnitude divided by
    the norm of W + B·A, which has no gradient. B·A, the identity it is computed from, and a copy of W in the adapter's
    dtype stay allocated until the function returns. `base` is the result, with dropout the product of W's copy with
    what dropout left of x. The one element of `given` is x."""
    itemsize, base_result = config.adapter_bytes, result
    x = dropped(trace, config, given.pop()) if config.dropout else given.pop()
    whole = layer.outputs * layer.inputs * BYTE
    held = [trace.allocate(inputs * layer.inputs * itemsize * BYTE) for inputs in (layer.inputs, config.rank)]
    held.append(trace.allocate(itemsize * whole))
    weight = trace.new(whole, itemsize) if config.casts_adapters or config.quantized else None
    summed = [trace.allocate(itemsize * whole), trace.allocate(itemsize * whole)]
    del summed
    vector = round_to_blocks(layer.outputs * itemsize)
    low_rank = _low_rank(trace, config, layer, [x])
    if config.dropout:
        base_result = _product_with_copy(trace, x, weight, -(-layer.outputs // layer.merged))
    elif layer.biased:
        base_result = copy(trace, base_result)
    left = scale_by_weight(trace, base_result, vector, True, itemsize)
    right = scale(trace, scale_by_weight(trace, low_rank, vector, True, itemsize))
    update = add(trace, left, right)
    del left, right, low_rank, base_result, held, weight
    return add(trace, result, update)


def _product_with_copy(trace: MemoryTrace, x: TracedTensor, weight: TracedTensor | None, outputs: int) -> TracedTensor:
    """The product of x with a frozen weight, of which backward needs this copy; None: the weight itself."""
    saved = trace.save(weight) if x.node is not None else None
    return trace.unary(x, outputs * TOKEN, x.itemsize, saved)


class Weights:
    """A traced layer's parameters, by name in it. `transposed`: linear weights are stored as [inputs, outputs]."""

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
        self._shared: SharedProduct | None = None

    def linear(self, module: str, x: TracedTensor, merged: int = 1) -> TracedTensor:
        """Trace a linear layer with its adapter, if any; each input vector joins the values of `merged` tokens."""
        parameter = self.parameters[f"{module}.weight"]
        if parameter.name not in self.trainable.adapted:
            return self._base(module, parameter, x, merged)
        biased, unpacked = f"{module}.bias" in self.parameters, self._unpacked(parameter)
        layer = AdaptedLayer(*self._shape(parameter), biased, merged, unpacked)
        if not self.config.dora:
            return self._plain_lora(module, layer, x)
        return dora(self.trace, self.config, layer, x, [self._base(module, parameter, x, merged)])

    def _plain_lora(self, module: str, layer: AdaptedLayer, x: TracedTensor) -> TracedTensor:
        """One of several layers that read the same input, or one alone."""
        if self._shared is None and len(sharing := self._sharing(module)) > 1 and sharing[0] == module:
            self._shared = SharedProduct(self.trace, self.config, layer.inputs, sharing, x)
        if self._shared is None:
            return plain_lora(self.trace, self.config, layer, x)
        output = self._shared.linear(module, layer)
        if not self._shared.waiting:
            self._shared = None
        return output

    def _sharing(self, module: str) -> list[str]:
        """The adapted layers, `module` among them, whose adapters share a product."""
        parent, _, last = module.rpartition(".")
        names = next((names for names in SIBLINGS if last in names), ())
        modules = [f"{parent}.{name}" for name in names if not self.config.dropout]
        return [each for each in modules if f"{each}.weight" in self.trainable.adapted]

    def _base(self, module: str, parameter: Parameter, x: TracedTensor, merged: int) -> TracedTensor:
        trace, bias = self.trace, self.bias(module)
        weight, trained = self.parameter(parameter.name)
        outputs = -(-self._shape(parameter)[0] // merged)
        if trace.autocast:
            return half_linear(trace, x, outputs, parameter.elements, trained, bias)
        return linear(trace, x, outputs, weight, trained, bias, self._unpacked(parameter))

    def _unpacked(self, parameter: Parameter) -> int:
        """Bytes of the dequantised copy that a product with a quantised weight needs."""
        return parameter.elements * self.config.base_bytes if self.config.quantized else 0

    def weight(self, module: str) -> tuple[int, bool]:
        """Bytes of the gradient of a module's weight, and whether the weight is trained."""
        return self.parameter(f"{module}.weight")

    def bias(self, module: str) -> int:
        """Bytes of the gradient of a module's bias; 0 if there is none or it is not trained."""
        size, trained = self.parameter(f"{module}.bias")
        return size if trained else 0

    def parameter(self, name: str) -> tuple[int, bool]:
        """Bytes of a parameter's gradient, and whether the parameter is trained; (0, False) for unknown names."""
        parameter = self.parameters.get(name)
        if parameter is None:
            return 0, False
        return round_to_blocks(parameter.elements * self.config.base_bytes), name in self.trainable.trained

    def _shape(self, parameter: Parameter) -> tuple[int, int]:
        """(outputs, inputs)."""
        rows, columns = parameter.shape
        return (columns, rows) if self.transposed else (rows, columns)
