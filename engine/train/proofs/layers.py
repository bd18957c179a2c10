"""Proofs of layers: a LoRA layer gives base(x) + B(A(x))·scaling, 4-bit layers multiply by what was quantised, and
layers compiled by torch.compile give what the layers give as they are.

Shapes: T tokens, R rank, I inputs, O outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, inject_adapter_in_model
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from engine.budget.trace.weights import SIBLINGS
from engine.data.batch import Batch
from engine.device.oom import classify
from engine.errors import EnvironmentProblem
from engine.model.adapted_linear import compute_in_input_dtype, compute_with_peft, is_ours, shares_input
from engine.model.compiled import COMPILE_ERRORS, CompiledLayers, compile_problem, stop_compiling
from engine.model.decoder import autocast, decoder_output
from engine.model.dropout import keyed_dropouts
from engine.model.loaded import ADAPTER
from engine.train.proofs.record import DisprovedError, Proof, ProvedRun, drawn, require_close, tolerance, worst_error
from engine.train.step.computation import StepComputation

ADAPTER_TOKENS, WIDEST = 7, 256
"""A stand-in for an adapted layer has at most WIDEST inputs and outputs."""
NF4_OUTPUTS, NF4_INPUTS, NF4_TOKENS = 128, 192, 7
WORST_QUANTISATION = 0.12
"""Largest relative error of NF4 with blocks of 64 on normal weights; 0.09 is usual (computed with the 16 codes of
Dettmers et al. 2023, appendix E)."""
FORWARD = "forward"
ROUNDINGS = 4
"""A layer is some ten operations deep, and a compiler rounds fewer of their results: its errors may be this many times
as large as those of one kernel."""


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
    beside = ", alone and beside another layer" if shared else ""
    return f"base(x) + B(A(x)){beside} is within {worst:.1e} of fp32, gradients too"


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
        lost = require_close("the weight read back", back, weight, WORST_QUANTISATION)
    except DisprovedError as error:
        raise QuantisationError(str(error)) from None
    worst = _nf4_error(run, layer, back)
    return f"4-bit weights are within {lost:.1e} of theirs, products within {worst:.1e} of fp32, gradients too"


def multiply_dequantised(run: ProvedRun) -> str:
    """Have 4-bit layers multiply by their dequantised weights with torch's own operation. Raises EnvironmentProblem if
    these are wrong, so that no layer can be computed."""
    try:
        prove_nf4(run)
    except QuantisationError as error:
        raise EnvironmentProblem(
            f"bitsandbytes quantises wrongly on this device: {error}",
            expected=f"weights within {WORST_QUANTISATION} of those that were read",
            fix='set model.quantize = "none", or install another bitsandbytes',
        ) from error
    except Exception:  # noqa: BLE001  (the layer fails in any way: that is why it is replaced)
        pass
    for module in run.context.loaded.model.modules():
        if type(module).__name__ == "Linear4bit" and isinstance(module, nn.Linear):
            setattr(module, FORWARD, MethodType(_multiply, module))
    return "4-bit layers multiply with the weights read back"


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


def prove_fused(run: ProvedRun) -> str:
    """Compare decoder layers whose modules fused kernels compute with the layers as they are, on the run's own
    micro-batches: the first and the last of those that are made of the same classes, for the others compute the same.
    Raises DisprovedError if results differ by more than rounding, or if memory runs out."""
    fused = run.context.loaded.fused
    assert fused is not None
    alike: dict[tuple[type[nn.Module], ...], list[nn.Module]] = {}
    for layer in fused.layers:
        alike.setdefault(tuple(type(module) for module in layer.modules()), []).append(layer)
    ends = {id(layer) for layers in alike.values() for layer in (layers[0], layers[-1])}
    compared = [layer for layer in fused.layers if id(layer) in ends]
    replaced = ReplacedLayers(compared, lambda layer: partial(type(layer).forward, layer), fused.off)
    worst, shapes = _replaced_error(run, replaced)
    return f"{fused} by fused kernels: layers are within {worst:.1e} of torch's at {shapes} tokens, gradients too"


def _stop_fusing(run: ProvedRun) -> str:
    fused, run.context.loaded.fused = run.context.loaded.fused, None
    if fused is not None:
        fused.remove()
    return "torch computes these modules, and needs more memory for it than planned"


def _fused_facts(run: ProvedRun) -> list[str]:
    loaded = run.context.loaded
    return [str(loaded.fused), loaded.config.to_json_string(), str(loaded.precision), str(run.spec.recipe.method)]


def prove_compiled(run: ProvedRun) -> str:
    """Compile the decoder layers, compare every one with the layer as it is on the run's own micro-batches, and run
    them compiled from now on. Raises DisprovedError if results differ by more than rounding, if a layer cannot be
    compiled, or if memory runs out: layers that were not compared are not used."""
    _require_compilable(run)
    layers = CompiledLayers(run.context.loaded)
    if not layers.layers:
        raise DisprovedError("the model has no layers that gradient checkpointing works on, which are those compiled")
    began = time.perf_counter()
    try:
        worst, shapes = _replaced_error(run, ReplacedLayers(layers.layers, layers.call, nullcontext))
    except COMPILE_ERRORS as error:
        raise DisprovedError(f"{layers.backend} cannot compile them: {compile_problem(error)}") from None
    layers.use()
    seconds = time.perf_counter() - began
    return (
        f"{len(layers.layers)} layers compiled by {layers.backend} in {seconds:.1f} s are within {worst:.1e} of the "
        f"layers as they are at {shapes} tokens, gradients too"
    )


def _stop_compiling(run: ProvedRun) -> str:
    stop_compiling(run.context.loaded.model)
    return "layers are not compiled"


def _require_compilable(run: ProvedRun) -> None:
    if keyed_dropouts(run.context.loaded.model):
        raise DisprovedError("the model has dropout, whose masks depend on the step and are not part of a graph")
    if run.context.loss.balance is not None:
        raise DisprovedError("the router logits of the experts are collected inside the layers, outside of a graph")


def _micro_batches(run: ProvedRun) -> list[NDArray[np.int64]]:
    """Samples of the micro-batches on which layers are compared: the longest sample alone; two samples, if the recipe
    and the memory budget allow two rows; last the shortest, whose length no graph has been compiled for."""
    context, rows = run.context, run.spec.recipe.sequences_per_step // run.context.ranks.size
    lengths, budget_bytes = context.data.lengths, context.budget.budget_bytes
    by_length = lengths.argsort(kind="stable")
    in_pairs = [sample for sample in by_length if context.cost(2, int(lengths[sample])) <= budget_bytes]
    if rows < 2 or len(in_pairs) < 2:
        return [by_length[-1:], by_length[:1]]
    return [by_length[-1:], np.array(in_pairs[-2:]), np.array(in_pairs[:2])]


class ReplacedLayers(NamedTuple):
    """Decoder layers, what is to compute them, and a context in which their class computes them as they are."""

    layers: list[nn.Module]
    call: Callable[[nn.Module], Callable[..., Any]]
    as_they_are: Callable[[], AbstractContextManager[None]]


def _replaced_error(run: ProvedRun, replaced: ReplacedLayers) -> tuple[float, str]:
    """Compare the layers on a few of the run's micro-batches. Returns the largest relative error and the micro-batches'
    shapes, in words. Raises DisprovedError if an error is above rounding, or if memory runs out."""
    try:
        batches = [StepComputation(run.context).batch(samples) for samples in _micro_batches(run)]
        worst = max(_error_on(run, replaced, batch) for batch in batches)
    except COMPILE_ERRORS:
        raise
    except Exception as error:  # of any kind: memory that runs out has many
        if classify(error) is None:
            raise
        raise DisprovedError(f"memory ran out while they were compared: {error}") from None
    return worst, ", ".join(" x ".join(map(str, batch.input_ids_BS.shape)) for batch in batches)


def _error_on(run: ProvedRun, replaced: ReplacedLayers, batch: Batch) -> float:
    """The largest relative error of a replaced layer while the decoder runs on `batch`."""
    context = run.context
    limit, errors = ROUNDINGS * tolerance(context.loaded.precision.compute), [0.0]
    learns = _learns(context.loaded.base.get_input_embeddings()) or bool(batch.images)

    def compare(layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal learns
        number, given = replaced.layers.index(layer), _Given(inputs, options, learns)
        with _stirred(layer, run), context.loss.offload.saving(), torch.enable_grad():
            with replaced.as_they_are():
                expected = given.results(partial(type(layer).forward, layer), layer, run)
            found = given.results(replaced.call(layer), layer, run)
        errors.append(worst_error(found, expected, limit, f" of layer {number}"))
        learns = learns or _learns(layer)

    with ExitStack() as hooks, torch.no_grad(), autocast(context.loaded):
        for layer in replaced.layers:
            hooks.callback(layer.register_forward_pre_hook(compare, with_kwargs=True).remove)
        decoder_output(context.loaded, batch)
    context.loss.offload.settle()
    return max(errors)


class _Given(NamedTuple):
    """The arguments of a layer's forward method, and whether its input [B, S, H], the first of them, is computed from
    trained parameters."""

    inputs: tuple[Any, ...]
    options: dict[str, Any]
    learns: bool

    def results(self, call: Callable[..., Any], layer: nn.Module, run: ProvedRun) -> dict[str, Tensor]:
        """Run `call`, a forward method of `layer`; returns the output and all gradients, by name."""
        hidden_BSH = self.inputs[0].detach().requires_grad_(self.learns)
        output = call(hidden_BSH, *self.inputs[1:], **self.options)
        output_BSH: Tensor = output[0] if isinstance(output, tuple) else output
        learning = {"the gradient of the input": hidden_BSH} if self.learns else {}
        learning |= {f"the gradient of {name}": p for name, p in layer.named_parameters() if p.requires_grad}
        if not learning:
            return {"output": output_BSH.detach()}
        upstream_BSH = drawn(tuple(output_BSH.shape), output_BSH.dtype, run, 50)
        # Not backward(): the gradients of the run's parameters stay as they are.
        gradients = torch.autograd.grad(output_BSH, tuple(learning.values()), upstream_BSH, allow_unused=True)
        found = zip(learning, gradients, strict=True)
        return {"output": output_BSH.detach(), **{name: each for name, each in found if each is not None}}


@contextmanager
def _stirred(layer: nn.Module, run: ProvedRun) -> Iterator[None]:
    """Inside the block, trained parameters of `layer` that are zero, as the B matrices of a new adapter, hold other
    numbers: beside a zero B, all gradients of A are zero."""
    zeros = [p for p in layer.parameters() if p.requires_grad and not p.any()]
    try:
        with torch.no_grad():
            for parameter in zeros:
                parameter.copy_(drawn(tuple(parameter.shape), parameter.dtype, run, 51).mul_(0.02))
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


ADAPTED = Proof("adapter", prove_adapter, _use_peft, lambda run: _own_adapter(run) is not None, _adapter_facts)
NF4 = Proof(
    "nf4",
    prove_nf4,
    multiply_dequantised,
    lambda run: run.spec.recipe.model.quantize == "nf4",
    lambda run: [str(run.context.loaded.precision.compute)],
)
FUSED = Proof("fused", prove_fused, _stop_fusing, lambda run: run.context.loaded.fused is not None, _fused_facts)
COMPILED = Proof("compile", prove_compiled, _stop_compiling, lambda run: run.spec.recipe.train.compile)
