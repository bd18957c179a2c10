"""Compiles a model's decoder layers with torch.compile, each as one graph (the recipe's `train.compile`).

Layers of one class share a compiled function; rows and tokens are dynamic, but one row, and an input without gradient,
are cases of their own. Only the `forward` of each instance is replaced, so state dicts keep their names. Gradient
checkpointing stays outside the graph. Evaluation and generation are not compiled, nor a layer that cannot be one graph
(a `print`, a value read back to the host, dropout whose masks depend on the step).

On the metered device graphs are partitioned as by inductor but run operation by operation: inductor's own code
allocates buffers past torch's dispatcher, where they cannot be counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from engine.model.loaded import LoadedModel
from engine.model.trained import checkpointing_layers, decoder_of

BACKENDS = {"cpu": "inductor", "cuda": "inductor", "metered": "aot_eager_decomp_partition"}
"""torch's name of the backend that compiles, by kind of device."""

MOST_GRAPHS = 16
"""Graphs per class of layers: one row or several, input with or without gradient, with or without a mask, and each kind
of attention or adapter rank. Beyond it layers are no longer compiled."""

COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)

log = logging.getLogger("tunedeck")


class CompiledLayers:
    """The decoder layers of a model, compiled by class; they run compiled from `use` on until `stop`."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Prepare the layers; nothing is compiled before a layer is first called.

        Sets torch's settings for the whole process: the model's numbers (scalings) are constants of a graph, backward
        is compiled together with forward, so that a failure to compile is always met in forward, and a layer has at
        most MOST_GRAPHS graphs.
        """
        torch._dynamo.config.recompile_limit = MOST_GRAPHS  # torch.compile takes it as an argument from 2.12 on
        torch._dynamo.config.specialize_float = True
        torch._functorch.config.force_non_lazy_backward_lowering = True
        self.loaded = loaded
        self.backend = BACKENDS[loaded.device.kind]
        self.in_use = False
        """Whether a layer that cannot be compiled is run as it is. Before `use` its error is raised."""
        self.layers = list(checkpointing_layers(decoder_of(loaded.base)))
        functions = {kind: self._compiled(kind) for kind in {type(layer) for layer in self.layers}}
        self._calls = {layer: _LayerCall(self, layer, functions[type(layer)]) for layer in self.layers}

    def _compiled(self, kind: type[nn.Module]) -> Callable[..., Any]:
        forward = _without_checkpointing(kind)
        return torch.compile(forward, backend=self.backend, dynamic=True, fullgraph=True)

    def call(self, layer: nn.Module) -> Callable[..., Any]:
        return self._calls[layer]

    def use(self) -> None:
        self.in_use = True
        for layer in self.layers:
            layer.forward = self._calls[layer]

    def stop(self, problem: str) -> None:
        """Run no layer compiled any more; `problem` becomes a notice of the device."""
        stop_compiling(self.loaded.model)
        notice = f"decoder layers are no longer compiled: {problem}"
        log.warning(notice)
        self.loaded.device.notices.append(notice)


class _LayerCall:
    """The forward method of one layer: compiled in training, else the layer's own."""

    def __init__(self, owner: CompiledLayers, layer: Any, compiled: Callable[..., Any]) -> None:
        self._owner, self._layer, self._compiled = owner, layer, compiled

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        layer = self._layer
        if not layer.training or not torch.is_grad_enabled():
            return type(layer).forward(layer, *inputs, **options)
        run = partial(self._run, [], options)
        return layer._gradient_checkpointing_func(run, *inputs) if layer.gradient_checkpointing else run(*inputs)

    def _run(self, ways: list[Callable[..., Any]], options: dict[str, Any], *inputs: Any) -> Any:
        """`ways` keeps which way it ran: a layer that is computed again in backward must save the same tensors."""
        if ways:
            return ways[0](self._layer, *inputs, **options)
        try:
            output = self._compiled(self._layer, *inputs, **options)
            ways.append(self._compiled)
            return output
        except COMPILE_ERRORS as error:
            if not self._owner.in_use:
                raise
            self._owner.stop(compile_problem(error))
        ways.append(_without_checkpointing(type(self._layer)))
        return ways[0](self._layer, *inputs, **options)


def _without_checkpointing(kind: type[nn.Module]) -> Callable[..., Any]:
    """The class's own forward method; transformers wraps it in one that checkpoints."""
    inner: Callable[..., Any] = vars(kind.forward)["__wrapped__"]
    return inner


def stop_compiling(model: nn.Module) -> None:
    for module in model.modules():
        if is_compiled(module):
            del module.__dict__["forward"]


def is_compiled(layer: nn.Module) -> bool:
    return isinstance(layer.__dict__.get("forward"), _LayerCall)


def compile_problem(error: BaseException) -> str:
    if isinstance(error, FailOnRecompileLimitHit):
        return f"a layer needs more than {MOST_GRAPHS} graphs, one for each kind of input"
    cause = getattr(error, "inner_exception", error)
    lines = (line.strip() for line in str(cause).splitlines())
    return f"{type(cause).__name__}: {next((line for line in lines if line), 'no reason given')}"
