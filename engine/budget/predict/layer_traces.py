"""Runs the memory traces that predictions consist of: one for each kind of layer, and one for the model's end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from engine.architecture.facts import Architecture
from engine.budget.trace.head import Head
from engine.budget.trace.layer import Layer, LayerKind, body_learns
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, Node, TracedTensor
from engine.budget.trace.polynomial import NO_BYTES, TOKEN, BytesPolynomial, highest, maxima

Sizes = tuple[BytesPolynomial, ...]


class ForwardTrace(NamedTuple):
    """Bytes of a layer's forward pass: live at each local maximum, saved for backward on the device, autocast's
    copies of weights (cached until the loss), saved on the host, and the largest tensor of these."""

    forward: Sizes
    saved: BytesPolynomial
    casts: BytesPolynomial
    offloaded: BytesPolynomial = NO_BYTES
    largest_offloaded: BytesPolynomial = NO_BYTES


def layer_forward(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> ForwardTrace:
    """Trace the forward pass of one layer. One that backward does not reach saves nothing; a checkpointed one its
    input."""
    if not kind.learns:
        return inference_forward(arch, layer_config(config), kind, holds_input=kind.recomputed)
    config = layer_config(_of_kind(config, kind))
    return _layer_step(arch, config, _layer_view(config, kind)).forward


def layer_backward(arch: Architecture, config: MemoryConfig, kind: LayerKind, accumulating: bool) -> Sizes:
    """Live bytes at the local maxima of a layer's backward pass, with recomputation if it is checkpointed."""
    config = layer_config(_of_kind(config, kind))
    return _settled_backward(arch, config, _layer_view(config, kind), accumulating)


def _of_kind(config: MemoryConfig, kind: LayerKind) -> MemoryConfig:
    """The config with checkpointing on or off for all layers, as it is for those of this kind."""
    return config if config.checkpointing == kind.recomputed else _checkpointing(config, kind.recomputed)


@lru_cache(maxsize=256)
def _checkpointing(config: MemoryConfig, on: bool) -> MemoryConfig:
    return replace(config, checkpointing=on)


@lru_cache(maxsize=256)
def _settled_backward(arch: Architecture, config: MemoryConfig, kind: LayerKind, accumulating: bool) -> Sizes:
    return maxima(_layer_step(arch, config, kind).backward, accumulating)


def inference_forward(
    arch: Architecture, config: MemoryConfig, kind: LayerKind, *, holds_input: bool = False
) -> ForwardTrace:
    """Trace the forward pass of one layer without gradients, dropout or sequence parallelism. `holds_input`: gradient
    checkpointing keeps the input until the layer is done, though nothing in it learns."""
    config = inference_config(layer_config(config))
    return _inference_forward(arch, config, _layer_view(config, kind._replace(follows=False)), holds_input)


class LayerStep(NamedTuple):
    forward: ForwardTrace
    backward: Sizes
    """Gradients of trained weights are still a coefficient of their own, as `BytesPolynomial.settled` expects."""


@dataclass(frozen=True)
class LayerPass:
    """A layer of the decoder or of a vision encoder, to be traced together with its input."""

    config: MemoryConfig
    width: int
    """Values per token of the input."""
    follows: bool
    """The input needs a gradient."""
    layer_on: Callable[[MemoryTrace], Callable[[TracedTensor], TracedTensor]]
    """Makes the layer on a trace; returns its forward function."""

    def step(self) -> LayerStep:
        """Trace the layer forward, again if it is checkpointed, and backward."""
        config = self.config
        trace = MemoryTrace(metered=config.metered, autocast=config.autocast, offloads=config.activation_offload)
        arguments, run = [layer_input(trace, self.width, config, self.follows)], self.layer_on(trace)
        held = arguments[0].storage if config.checkpointing else None  # stays allocated until backward is over
        if held is not None:
            forward = self.forward(learning=True)
            forward = forward._replace(saved=held.size)
            output = trace.checkpoint(lambda: run(arguments.pop()))
        else:
            output = run(arguments.pop())
            with_casts = trace.live
            trace.casts.clear()
            saved, casts = trace.live - output.size, with_casts - trace.live
            peaks = highest(trace.take_peaks())
            forward = ForwardTrace(peaks, saved, casts, trace.offloaded, trace.largest_offloaded)
        assert output.node is not None
        size, node = output.size, output.node
        del output
        node.gradient = trace.allocate(size)
        trace.backward()
        return LayerStep(forward, highest(trace.take_peaks()))

    def forward(self, *, learning: bool, holds_input: bool = False) -> ForwardTrace:
        """Trace the forward pass of a layer that saves nothing: without gradients, or (`learning`) checkpointed."""
        config = self.config
        trace = MemoryTrace(metered=config.metered, autocast=config.autocast, learning=learning, keeps_saved=False)
        arguments, run = [layer_input(trace, self.width, config, self.follows)], self.layer_on(trace)
        held = arguments[0] if holds_input else None
        run(arguments.pop())
        del held
        peaks = highest(trace.take_peaks())
        return ForwardTrace(peaks, NO_BYTES, sum([weight.size for weight in trace.casts], NO_BYTES))


def _layer_pass(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> LayerPass:
    return LayerPass(config, arch.hidden, kind.follows, lambda trace: Layer(trace, arch, config, kind).forward)


@lru_cache(maxsize=256)
def _layer_step(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> LayerStep:
    return _layer_pass(arch, config, kind).step()


@lru_cache(maxsize=256)
def _inference_forward(arch: Architecture, config: MemoryConfig, kind: LayerKind, holds_input: bool) -> ForwardTrace:
    return _layer_pass(arch, config, kind).forward(learning=False, holds_input=holds_input)


@lru_cache(maxsize=256)
def caching_forward(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> Sizes:
    """Live bytes of a forward pass that fills the key-value cache, the layer's part of the cache included."""

    def caching_layer(trace: MemoryTrace) -> Callable[[TracedTensor], TracedTensor]:
        layer = Layer(trace, arch, config, kind)
        layer.cached = []
        return layer.forward

    return replace(_layer_pass(arch, config, kind), layer_on=caching_layer).forward(learning=False).forward


def _layer_view(config: MemoryConfig, kind: LayerKind) -> LayerKind:
    """The kind without the facts that do not change its trace, so that more kinds share one."""
    return kind._replace(masked=kind.masked and config.attention == "sdpa", slides=False, recomputed=False)


def head_step(arch: Architecture, config: MemoryConfig, accumulating: bool) -> Sizes:
    """Live bytes at the local maxima from the last layer's output to the loss, and back to that output's gradient."""
    return maxima(_head_step(arch, head_config(config))[0], accumulating)


def head_offloaded(arch: Architecture, config: MemoryConfig) -> BytesPolynomial:
    """Bytes that the model's end (final norm, head, loss) saves on the host, with activation offload."""
    return _head_step(arch, head_config(config))[1]


@lru_cache(maxsize=256)
def _head_step(arch: Architecture, config: MemoryConfig) -> tuple[Sizes, BytesPolynomial]:
    trace = MemoryTrace(metered=config.metered, autocast=config.autocast, offloads=config.activation_offload)
    arguments = [layer_input(trace, arch.hidden, config, body_learns(arch, config))]
    loss = Head(trace, arch, config).forward(arguments)
    trace.casts.clear()
    if loss.node is not None:  # None: the recipe trains nothing, which the engine refuses once it has the model
        loss.node.gradient = trace.allocate(NO_BYTES)
        trace.backward()
    return highest(trace.take_peaks()), trace.offloaded


def inference_head(arch: Architecture, config: MemoryConfig) -> Sizes:
    """Live bytes at the local maxima of the model's end without gradients."""
    return _inference_head(arch, head_config(inference_config(config)))


@lru_cache(maxsize=256)
def _inference_head(arch: Architecture, config: MemoryConfig) -> Sizes:
    trace = MemoryTrace(metered=config.metered, autocast=config.autocast, learning=False)
    arguments = [layer_input(trace, arch.hidden, config, False)]
    Head(trace, arch, config).forward(arguments)
    return highest(trace.take_peaks())


def layer_input(trace: MemoryTrace, width: int, config: MemoryConfig, gradient: bool) -> TracedTensor:
    """Allocate the hidden states that go into a layer, `width` values per token; `gradient`: whether they need one."""
    hidden = trace.new(width * TOKEN, config.base_bytes)
    if gradient:
        hidden.node = Node(hidden.size)
    return hidden


@lru_cache(maxsize=256)
def step_config(config: MemoryConfig) -> MemoryConfig:
    """The config without the choices that matter only to the optimizer's step, so that more configs share a trace."""
    return replace(config, optimizer="adamw", momentum=False, optimizer_offload=False)


@lru_cache(maxsize=256)
def layer_config(config: MemoryConfig) -> MemoryConfig:
    """The config without the choices that do not matter to a layer's trace."""
    return replace(
        step_config(config),
        loss="plain",
        chunk_tokens=0,
        watches_experts=False,
        balances_experts=False,
        prefetches=False,
        kept_layers=0,
        # A checkpointed layer offloads only its input, which its trace does not count.
        activation_offload=config.activation_offload and not config.checkpointing,
    )


@lru_cache(maxsize=256)
def inference_config(config: MemoryConfig) -> MemoryConfig:
    """The config of a pass without gradients, which one rank runs alone, on whole sequences."""
    return replace(
        config,
        checkpointing=False,
        kept_layers=0,
        dropout=False,
        attention_dropout=False,
        residual_dropout=False,
        embedding_dropout=False,
        sequence=1,
    )


@lru_cache(maxsize=256)
def head_config(config: MemoryConfig) -> MemoryConfig:
    """The config without the choices that do not matter to the model's end."""
    return replace(
        layer_config(config),
        loss=config.loss,
        checkpointing=False,
        activation_offload=config.activation_offload,
    )
