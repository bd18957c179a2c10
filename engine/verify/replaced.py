"""Proofs of decoder layers whose computation is replaced: by fused kernels, by torch.compile, and by pieces of the
sequence. Each gives what the layers give as they are."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from engine.data.batch import Batch
from engine.device.oom import classify
from engine.model.compiled import COMPILE_ERRORS, CompiledLayers, compile_problem, stop_compiling
from engine.model.decoder import autocast, decoder_output, eval_mode
from engine.model.dropout import keyed_dropouts
from engine.model.tiled_mlp import input_size
from engine.model.trained import checkpointing_layers
from engine.train.step.computation import StepComputation
from engine.verify.record import (
    DisprovedError,
    Proof,
    ProvedRun,
    UndecidedError,
    drawn,
    require_close,
    tolerance,
    worst_error,
)

TILED_TOKENS = 6
ROUNDINGS = 4
"""A layer is some ten operations deep, and a compiler rounds fewer of their results: its errors may be this many times
as large as those of one kernel."""


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
    return f"{fused} with fused kernels: layers are within {worst:.1e} of torch at {shapes} tokens, also in gradients"


def _stop_fusing(run: ProvedRun) -> str:
    fused, run.context.loaded.fused = run.context.loaded.fused, None
    if fused is not None:
        fused.remove()
    return "torch computes these modules, which needs more memory than planned"


def _fused_facts(run: ProvedRun) -> list[str]:
    loaded = run.context.loaded
    return [str(loaded.fused), loaded.config.to_json_string(), str(loaded.precision), str(run.spec.recipe.method)]


def prove_expert_adapters(run: ProvedRun) -> str:
    """Compare a decoder layer of each class whose adapters on experts are computed in groups with the layer as peft
    computes it, on the run's own micro-batches. Raises DisprovedError if results differ by more than rounding."""
    adapters = run.context.loaded.expert_adapters
    assert adapters is not None
    blocks = {id(block) for block in adapters.blocks}
    layers = [layer for layer in checkpointing_layers(run.context.loaded.base) if _holds(layer, blocks)]
    of_each_class = list({type(layer): layer for layer in layers}.values())
    replaced = ReplacedLayers(of_each_class, lambda layer: partial(type(layer).forward, layer), adapters.off)
    try:
        worst, shapes = _replaced_error(run, replaced)
    except MemoryRanOutError as error:
        raise UndecidedError(str(error)) from None  # peft's way, to fall back to, needs more
    return f"adapters on {len(blocks)} blocks of experts are within {worst:.1e} of peft's at {shapes} tokens"


def _holds(layer: nn.Module, blocks: set[int]) -> bool:
    return any(id(module) in blocks for module in layer.modules())


def _leave_to_peft(run: ProvedRun) -> str:
    adapters, run.context.loaded.expert_adapters = run.context.loaded.expert_adapters, None
    if adapters is not None:
        adapters.remove()
    return "peft computes them, which needs more memory and time than planned"


def prove_tiled_mlp(run: ProvedRun) -> str:
    """Compute one feed-forward block of each class on a few random tokens, whole and in pieces. Raises DisprovedError
    if the results differ by more than rounding: the block looks at other tokens."""
    loaded, worst = run.context.loaded, 0.0
    assert loaded.tiles is not None
    limit = ROUNDINGS * tolerance(loaded.precision.compute)
    for layer, block in loaded.tiles.of_each_class:
        x = drawn((1, TILED_TOKENS, input_size(block)), loaded.precision.compute, run, 60)
        with gathered(layer), eval_mode(block):
            whole, pieces = (loaded.tiles.compute(block, x, count) for count in (1, 2))
        worst = max(worst, require_close(f"{type(block).__name__} in pieces", pieces, whole, limit))
    return f"{len(loaded.tiles.blocks)} feed-forward blocks in pieces are within {worst:.1e} of the whole"


def _stop_tiling(run: ProvedRun) -> str:
    tiles, run.context.loaded.tiles = run.context.loaded.tiles, None
    if tiles is not None:
        tiles.remove()
    return "feed-forward blocks are computed whole, which needs more memory than with train.mlp_tiles"


def _model_facts(run: ProvedRun) -> list[str]:
    loaded = run.context.loaded
    return [loaded.config.to_json_string(), str(loaded.precision), str(run.spec.recipe.method)]


@contextmanager
def gathered(layer: nn.Module) -> Iterator[None]:
    """Inside the block, all ranks hold the weights of a layer whole, if they are sharded."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def prove_compiled(run: ProvedRun) -> str:
    """Compile the decoder layers, compare every one with the layer as it is on the run's own micro-batches, and run
    them compiled from now on. Raises DisprovedError if results differ by more than rounding, if a layer cannot be
    compiled, or if memory runs out: layers that were not compared are not used."""
    _require_compilable(run)
    layers = CompiledLayers(run.context.loaded)
    if not layers.layers:
        raise DisprovedError("the model has no layers that support gradient checkpointing, and only those are compiled")
    began = time.perf_counter()
    try:
        worst, shapes = _replaced_error(run, ReplacedLayers(layers.layers, layers.call, nullcontext, False))
    except COMPILE_ERRORS as error:
        raise DisprovedError(f"{layers.backend} cannot compile them: {compile_problem(error)}") from None
    layers.use()
    seconds = time.perf_counter() - began
    return (
        f"{len(layers.layers)} layers compiled by {layers.backend} in {seconds:.1f} s are within {worst:.1e} "
        f"of the uncompiled layers at {shapes} tokens, also in gradients"
    )


def _stop_compiling(run: ProvedRun) -> str:
    stop_compiling(run.context.loaded.model)
    return "layers are not compiled"


def _require_compilable(run: ProvedRun) -> None:
    if keyed_dropouts(run.context.loaded.model):
        raise DisprovedError("the model has dropout, whose masks depend on the step and cannot be part of a graph")
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


class MemoryRanOutError(DisprovedError):
    """Layers could not be compared for want of memory."""


class ReplacedLayers(NamedTuple):
    """Decoder layers, what is to compute them, and a context in which their class computes them as they are."""

    layers: list[nn.Module]
    call: Callable[[nn.Module], Callable[..., Any]]
    as_they_are: Callable[[], AbstractContextManager[None]]
    choices_are_seen: bool = True
    """Whether torch sees each operation of `call`, and with it the choices of routers."""


class SameChoices(TorchFunctionMode):
    """Records which elements each top-k chooses; inside `again()` the same ones are chosen in the same order.

    A router gives the tokens of a mixture to the experts of the highest scores. Of nearly equal scores a rounding
    decides, and what another expert computes is no rounding: layers are compared with every token at the same experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._chosen: list[Tensor] = []
        self._left: Iterator[Tensor] | None = None

    @contextmanager
    def again(self) -> Iterator[None]:
        self._left = iter(self._chosen)
        with self:
            yield

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return found
        if self._left is None:
            self._chosen.append(found.indices)
            return found
        chosen, asked = next(self._left, found.indices), inspect.signature(_topk).bind(*args, **(kwargs or {}))
        if chosen.shape != found.indices.shape:
            return found
        return type(found)((asked.arguments["input"].gather(asked.arguments.get("dim", -1), chosen), chosen))


def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> None:
    """The arguments of torch.topk, whose signature Python does not know."""


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
        raise MemoryRanOutError(f"memory ran out while they were compared: {error}") from None
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
            choices = SameChoices()
            with replaced.as_they_are(), choices:
                expected = given.results(partial(type(layer).forward, layer), layer, run)
            with choices.again() if replaced.choices_are_seen else nullcontext():
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


FUSED = Proof("fused", prove_fused, _stop_fusing, lambda run: run.context.loaded.fused is not None, _fused_facts)
EXPERT_ADAPTERS = Proof(
    "expert_adapters",
    prove_expert_adapters,
    _leave_to_peft,
    lambda run: run.context.loaded.expert_adapters is not None and run.context.loaded.shards is None,
    _model_facts,
)
TILED_MLP = Proof(
    "tiled_mlp",
    prove_tiled_mlp,
    _stop_tiling,
    lambda run: run.context.loaded.tiles is not None,
    _model_facts,
    votes=True,
)
COMPILED = Proof("compile", prove_compiled, _stop_compiling, lambda run: run.spec.recipe.train.compile)
