"""Proof: the decoder layers compiled by torch.compile give the output and the gradients of the layers as they are.

Every layer is compared, on the inputs that it has in the run's own micro-batches. This is also where layers are
compiled, before the first step. They run compiled only after the comparison; it must be the last proof, because a layer
that was called under another dispatch mode first, as when host syncs are counted, is never compiled.

Try: `pytest tests/train/test_compile.py`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.data.batch import Batch
from engine.device.oom import classify
from engine.model.compiled import COMPILE_ERRORS, CompiledLayers, compile_problem, stop_compiling
from engine.model.decoder import autocast, decoder_output
from engine.model.dropout import keyed_dropouts
from engine.train.proofs.record import DisprovedError, drawn, require_close, tolerance
from engine.train.setup import TrainingSetup
from engine.train.step.computation import StepComputation

ROUNDINGS = 4
"""A layer is some ten operations deep, and a compiler rounds fewer of their results: its errors may be this many times
as large as those of one kernel."""


def applies(setup: TrainingSetup) -> bool:
    """Whether the recipe asks for compiled layers."""
    return setup.spec.recipe.train.compile


def prove(setup: TrainingSetup) -> str:
    """Compile the decoder layers, compare them with the layers as they are, and run them compiled from now on. Returns
    what was shown, in a few words. Raises DisprovedError if results differ by more than rounding, if a layer cannot be
    compiled, or if memory runs out: layers that were not compared are not used."""
    _require_compilable(setup)
    layers = CompiledLayers(setup.context.loaded)
    if not layers.layers:
        raise DisprovedError("the model has no layers that gradient checkpointing works on, which are those compiled")
    began = time.perf_counter()
    try:
        batches = [StepComputation(setup.context).batch(samples) for samples in _micro_batches(setup)]
        worst = max(_worst_error(setup, layers, batch) for batch in batches)
    except COMPILE_ERRORS as error:
        raise DisprovedError(f"{layers.backend} cannot compile them: {compile_problem(error)}") from None
    except Exception as error:  # of any kind: memory that runs out has many
        if classify(error) is None:
            raise
        raise DisprovedError(f"memory ran out while they were compared: {error}") from None
    layers.use()
    seconds = time.perf_counter() - began
    shapes = ", ".join(" x ".join(map(str, batch.input_ids_BS.shape)) for batch in batches)
    return (
        f"{len(layers.layers)} layers compiled by {layers.backend} in {seconds:.1f} s are within {worst:.1e} of the "
        f"layers as they are at {shapes} tokens, gradients too"
    )


def fall_back(setup: TrainingSetup) -> str:
    """Run all layers as they are; returns what the run does instead, in a few words."""
    stop_compiling(setup.context.loaded.model)
    return "layers are not compiled"


def _require_compilable(setup: TrainingSetup) -> None:
    if keyed_dropouts(setup.context.loaded.model):
        raise DisprovedError("the model has dropout, whose masks depend on the step and are not part of a graph")
    if setup.context.loss.balance is not None:
        raise DisprovedError("the router logits of the experts are collected inside the layers, outside of a graph")


def _micro_batches(setup: TrainingSetup) -> list[NDArray[np.int64]]:
    """Samples of the micro-batches on which layers are compared: the longest sample alone; two samples, if the recipe
    and the memory budget allow two rows; last the shortest, whose length no graph has been compiled for."""
    context, rows = setup.context, setup.spec.recipe.train.batch_size // setup.context.ranks.size
    lengths, budget_bytes = context.data.lengths, context.budget.budget_bytes
    by_length = lengths.argsort(kind="stable")
    in_pairs = [sample for sample in by_length if context.cost(2, int(lengths[sample])) <= budget_bytes]
    if rows < 2 or len(in_pairs) < 2:
        return [by_length[-1:], by_length[:1]]
    return [by_length[-1:], np.array(in_pairs[-2:]), np.array(in_pairs[:2])]


def _worst_error(setup: TrainingSetup, layers: CompiledLayers, batch: Batch) -> float:
    """The largest relative error of a compiled layer while the decoder runs on `batch`. Raises DisprovedError if one is
    above rounding."""
    context = setup.context
    limit, errors = ROUNDINGS * tolerance(context.loaded.precision.compute), [0.0]
    learns = _learns(context.loaded.base.get_input_embeddings()) or bool(batch.images)

    def compare(layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal learns
        number, given = layers.layers.index(layer), _Given(inputs, options, learns)
        with _stirred(layer, setup), context.loss.offload.saving(), torch.enable_grad():
            expected = given.results(partial(type(layer).forward, layer), layer, setup)
            found = given.results(layers.call(layer), layer, setup)
        for name, tensor in expected.items():
            errors.append(require_close(f"{name} of layer {number}", found.get(name), tensor, limit))
        learns = learns or _learns(layer)

    with ExitStack() as hooks, torch.no_grad(), autocast(context.loaded):
        for layer in layers.layers:
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

    def results(self, call: Callable[..., Any], layer: nn.Module, setup: TrainingSetup) -> dict[str, Tensor]:
        """Run `call`, a forward method of `layer`; returns the output and all gradients, by name."""
        hidden_BSH = self.inputs[0].detach().requires_grad_(self.learns)
        output = call(hidden_BSH, *self.inputs[1:], **self.options)
        output_BSH: Tensor = output[0] if isinstance(output, tuple) else output
        learning = {"the gradient of the input": hidden_BSH} if self.learns else {}
        learning |= {f"the gradient of {name}": p for name, p in layer.named_parameters() if p.requires_grad}
        if not learning:
            return {"output": output_BSH.detach()}
        upstream_BSH = drawn(tuple(output_BSH.shape), output_BSH.dtype, setup, 50)
        # Not backward(): the gradients of the run's parameters stay as they are.
        gradients = torch.autograd.grad(output_BSH, tuple(learning.values()), upstream_BSH, allow_unused=True)
        found = zip(learning, gradients, strict=True)
        return {"output": output_BSH.detach(), **{name: each for name, each in found if each is not None}}


@contextmanager
def _stirred(layer: nn.Module, setup: TrainingSetup) -> Iterator[None]:
    """Inside the block, trained parameters of `layer` that are zero, as the B matrices of a new adapter, hold other
    numbers: beside a zero B, all gradients of A are zero."""
    zeros = [p for p in layer.parameters() if p.requires_grad and not p.any()]
    try:
        with torch.no_grad():
            for parameter in zeros:
                parameter.copy_(drawn(tuple(parameter.shape), parameter.dtype, setup, 51).mul_(0.02))
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
