"""Compiles a model's decoder layers with torch.compile, each as one graph (the recipe's `train.compile`).

Layers of one class share one compiled function, so a model is compiled once and not once per layer. Rows and tokens of
a micro-batch are dynamic: another length does not compile anew. One row, and a layer whose input needs no gradient, are
cases of their own to torch. Only the `forward` of each layer is replaced, on the instance: names in state dicts stay as
they are, so adapters and models are saved and reopened as without it. Evaluation and generation are not compiled.

Gradient checkpointing stays outside the compiled function, as it is without compilation. A layer that cannot be one
graph (a `print`, a value read back to the host, dropout whose masks depend on the step) is not compiled at all.

On the metered device the graphs are partitioned as by inductor, torch's compiler, but are executed operation by
operation: inductor's own code allocates buffers past torch's dispatcher, where they cannot be counted.

Try: `python -m pytest tests/train/test_compile.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.model.decoder import decoder_of
from engine.model.loaded import LoadedModel

BACKENDS = {"cpu": "inductor", "cuda": "inductor", "metered": "aot_eager_decomp_partition"}
"""torch's name of the backend that compiles, by kind of device."""

MOST_GRAPHS = 16
"""Graphs that one class of layers may be compiled to: one row or several, input with or without gradient, with or
without a mask, and each kind of attention or adapter rank among its layers. Beyond it layers are no longer compiled."""

COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)

log = logging.getLogger("tunedeck")


class CompiledLayers:
    """The decoder layers of a model, with a compiled function for each class of layers. They run compiled from `use` on
    until `stop`."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Prepare the layers; nothing is compiled before a layer is first called.

        torch's settings that this needs are set for the whole process: numbers of the model (scalings) are constants of
        a graph, and the graph of backward is compiled together with that of forward, so that a failure to compile is
        always met in forward.
        """
        torch._dynamo.config.specialize_float = True
        torch._functorch.config.force_non_lazy_backward_lowering = True
        self.loaded = loaded
        self.backend = BACKENDS[loaded.device.kind]
        self.in_use = False
        """Whether a layer that cannot be compiled is run as it is. Before `use` its error is raised."""
        self.layers = list(_outermost_layers(decoder_of(loaded.base)))
        functions = {kind: self._compiled(kind) for kind in {type(layer) for layer in self.layers}}
        self._calls = {layer: _LayerCall(self, layer, functions[type(layer)]) for layer in self.layers}

    def _compiled(self, kind: type[nn.Module]) -> Callable[..., Any]:
        options: dict[str, Any] = {"dynamic": True, "fullgraph": True, "recompile_limit": MOST_GRAPHS}
        compiled: Callable[..., Any] = torch.compile(_without_checkpointing(kind), backend=self.backend, **options)
        return compiled

    def call(self, layer: nn.Module) -> Callable[..., Any]:
        """Return the function that runs `layer` compiled, with the arguments of its `forward`."""
        return self._calls[layer]

    def use(self) -> None:
        """Run the layers compiled from now on, in training."""
        self.in_use = True
        for layer in self.layers:
            layer.forward = self._calls[layer]

    def stop(self, problem: str) -> None:
        """Run no layer compiled any more, because of `problem`, which becomes a notice of the device."""
        stop_compiling(self.loaded.model)
        notice = f"decoder layers are no longer compiled: {problem}"
        log.warning(notice)
        self.loaded.device.notices.append(notice)


class _LayerCall:
    """The forward method of one layer: compiled in training, else the layer's own."""

    def __init__(self, owner: CompiledLayers, layer: Any, compiled: Callable[..., Any]) -> None:
        self._owner, self._layer, self._compiled = owner, layer, compiled

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the layer on the arguments of its `forward`; returns its output."""
        layer = self._layer
        if not layer.training or not torch.is_grad_enabled():
            return type(layer).forward(layer, *inputs, **options)
        run = partial(self._run, [], options)
        return layer._gradient_checkpointing_func(run, *inputs) if layer.gradient_checkpointing else run(*inputs)

    def _run(self, ways: list[Callable[..., Any]], options: dict[str, Any], *inputs: Any) -> Any:
        """Run the compiled function, or the layer's own code if it cannot be compiled. `ways` keeps which one it was: a
        layer that is computed again in backward must save the same tensors."""
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


def _outermost_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of `module` that gradient checkpointing works on, without those inside another one."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _outermost_layers(child)


def _without_checkpointing(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward method as a class of layers defines it; transformers wraps it in one that checkpoints."""
    inner: Callable[..., Any] = vars(kind.forward)["__wrapped__"]
    return inner


def stop_compiling(model: nn.Module) -> None:
    """Undo `CompiledLayers.use` for every layer inside `model`."""
    for module in model.modules():
        if is_compiled(module):
            del module.__dict__["forward"]


def is_compiled(layer: nn.Module) -> bool:
    """Whether `CompiledLayers.use` replaced the forward method of this layer."""
    return isinstance(layer.__dict__.get("forward"), _LayerCall)


def compile_problem(error: BaseException) -> str:
    """Return in one line why a layer could not be compiled."""
    if isinstance(error, FailOnRecompileLimitHit):
        return f"a layer needs more than {MOST_GRAPHS} graphs, one for each kind of input"
    cause = getattr(error, "inner_exception", error)
    lines = (line.strip() for line in str(cause).splitlines())
    return f"{type(cause).__name__}: {next((line for line in lines if line), 'no reason given')}"
