"""Runs the memory traces that predictions consist of: one for each kind of layer, and one for the model's end.

`engine.budget.predict.step` combines them to a training step, `engine.budget.predict.inference` to a pass without
gradients.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture.facts import Architecture
from engine.budget.trace.head import Head
from engine.budget.trace.layer import Layer
from engine.budget.trace.layer_kinds import LayerKind, body_learns
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, Node, TracedTensor
from engine.budget.trace.polynomial import NO_BYTES, TOKEN, BytesPolynomial, highest, maxima

Sizes = tuple[BytesPolynomial, ...]


class ForwardTrace(NamedTuple):
    """Bytes of a layer's forward pass. `forward`: live bytes at each local maximum; `saved`: saved for backward on the
    device; `casts`: autocast's copies of weights, which are cached until the loss; `offloaded`: saved for backward on
    the host; `largest_offloaded`: the largest tensor of these."""

    forward: Sizes
    saved: BytesPolynomial
    casts: BytesPolynomial
    offloaded: BytesPolynomial = NO_BYTES
    largest_offloaded: BytesPolynomial = NO_BYTES


def layer_forward(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> ForwardTrace:
    """Trace the forward pass of one layer. A layer that backward does not reach saves nothing; a checkpointed layer
    saves only its input."""
    config = layer_config(config)
    if not kind.learns:
        return inference_forward(arch, config, kind)
    return _layer_step(arch, config, _layer_view(config, kind)).forward


def layer_backward(arch: Architecture, config: MemoryConfig, kind: LayerKind, accumulating: bool) -> Sizes:
    """Live bytes at the local maxima of a layer's backward pass, including recomputation if it is checkpointed.
    `accumulating`: gradients of an earlier micro-batch of the same step exist."""
    config = layer_config(config)
    return _settled_backward(arch, config, _layer_view(config, kind), accumulating)


@lru_cache(maxsize=256)
def _settled_backward(arch: Architecture, config: MemoryConfig, kind: LayerKind, accumulating: bool) -> Sizes:
    return maxima(_layer_step(arch, config, kind).backward, accumulating)


def inference_forward(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> ForwardTrace:
    """Trace the forward pass of one layer without gradients, dropout or sequence parallelism."""
    config = inference_config(layer_config(config))
    return _inference_forward(arch, config, _layer_view(config, kind._replace(follows=False)))


class LayerStep(NamedTuple):
    """The traces of a layer's forward and backward pass."""

    forward: ForwardTrace
    backward: Sizes
    """Live bytes at the local maxima of the backward pass. Gradients of trained weights are still a coefficient of
    their own, as `BytesPolynomial.settled` expects."""


@lru_cache(maxsize=256)
def _layer_step(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> LayerStep:
    trace = MemoryTrace(metered=config.metered, autocast=config.autocast, offloads=config.activation_offload)
    layer, arguments = Layer(trace, arch, config, kind), [layer_input(trace, arch, config, kind.follows)]
    if config.checkpointing:
        forward = _checkpointed_forward(arch, config, kind)
        held = arguments[0].storage  # the input stays allocated until the layer's backward is over
        output = trace.checkpoint(lambda: layer.forward(arguments.pop()))
    else:
        output = layer.forward(arguments.pop())
        with_casts = trace.live
        trace.casts.clear()
        saved, casts = trace.live - output.size, with_casts - trace.live
        peaks = highest(trace.take_peaks())
        forward = ForwardTrace(peaks, saved, casts, trace.offloaded, trace.largest_offloaded)
    assert output.node is not None
    size, node = output.size, output.node
    del output
    trace.backward(node, trace.allocate(size))
    backward = highest(trace.take_peaks())
    if config.checkpointing:
        del held
    return LayerStep(forward, backward)


def _checkpointed_forward(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> ForwardTrace:
    """Trace the first forward pass of a checkpointed layer, which saves only its input."""
    trace = MemoryTrace(metered=config.metered, autocast=config.autocast, keeps_saved=False)
    peaks, casts = _forward_alone(trace, Layer(trace, arch, config, kind), arch, config, kind)
    return ForwardTrace(peaks, arch.hidden * config.base_bytes * TOKEN, casts)


@lru_cache(maxsize=256)
def _inference_forward(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> ForwardTrace:
    trace = MemoryTrace(metered=config.metered, autocast=config.autocast, learning=False)
    peaks, casts = _forward_alone(trace, Layer(trace, arch, config, kind), arch, config, kind)
    return ForwardTrace(peaks, NO_BYTES, casts)


@lru_cache(maxsize=256)
def caching_forward(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> Sizes:
    """Live bytes at the local maxima of a layer's forward pass that fills the key-value cache; the layer's cached keys
    and values are included."""
    trace = MemoryTrace(metered=config.metered, autocast=config.autocast, learning=False)
    layer = Layer(trace, arch, config, kind)
    layer.cached = []
    return _forward_alone(trace, layer, arch, config, kind)[0]


def _forward_alone(
    trace: MemoryTrace, layer: Layer, arch: Architecture, config: MemoryConfig, kind: LayerKind
) -> tuple[Sizes, BytesPolynomial]:
    """Trace a forward pass without backward; returns the live bytes at its local maxima, and the bytes of the
    half-precision copies of weights that autocast made."""
    arguments = [layer_input(trace, arch, config, kind.follows)]
    output = layer.forward(arguments.pop())
    del output
    return highest(trace.take_peaks()), sum([weight.size for weight in trace.casts], NO_BYTES)


def _layer_view(config: MemoryConfig, kind: LayerKind) -> LayerKind:
    """The kind without the facts that do not change a layer's trace, so that more kinds share a trace: the sliding
    window, and the mask unless attention is sdpa."""
    return kind._replace(masked=kind.masked and config.attention == "sdpa", slides=False)


def head_step(arch: Architecture, config: MemoryConfig, accumulating: bool) -> Sizes:
    """Live bytes at the local maxima from the last layer's output to the loss, and back to that output's gradient.
    `accumulating`: gradients of an earlier micro-batch of the same step exist."""
    return maxima(_head_step(arch, head_config(config))[0], accumulating)


def head_offloaded(arch: Architecture, config: MemoryConfig) -> BytesPolynomial:
    """Bytes that the model's end (final norm, head, loss) saves for backward on the host, with activation offload."""
    return _head_step(arch, head_config(config))[1]


@lru_cache(maxsize=256)
def _head_step(arch: Architecture, config: MemoryConfig) -> tuple[Sizes, BytesPolynomial]:
    """Live bytes at the local maxima of the model's end (final norm, head, loss), forward and backward, and the bytes
    that it saves on the host."""
    trace = MemoryTrace(metered=config.metered, autocast=config.autocast, offloads=config.activation_offload)
    arguments = [layer_input(trace, arch, config, body_learns(arch, config))]
    loss = Head(trace, arch, config).forward(arguments.pop())
    trace.casts.clear()
    if loss.node is not None:  # None: the recipe trains nothing, which the engine refuses once it has the model
        trace.backward(loss.node, trace.allocate(NO_BYTES))
    return highest(trace.take_peaks()), trace.offloaded


def inference_head(arch: Architecture, config: MemoryConfig) -> Sizes:
    """Bytes of the model's end (final norm, head, loss) without gradients: those live at each local maximum of memory
    over time, as polynomials in the rows and tokens of the micro-batch."""
    return _inference_head(arch, head_config(inference_config(config)))


@lru_cache(maxsize=256)
def _inference_head(arch: Architecture, config: MemoryConfig) -> Sizes:
    trace = MemoryTrace(metered=config.metered, autocast=config.autocast, learning=False)
    arguments = [layer_input(trace, arch, config, False)]
    Head(trace, arch, config).forward(arguments.pop())
    return highest(trace.take_peaks())


def layer_input(trace: MemoryTrace, arch: Architecture, config: MemoryConfig, gradient: bool) -> TracedTensor:
    """Allocate the hidden states that go into a layer; `gradient`: whether they need a gradient."""
    hidden = trace.new(arch.hidden * TOKEN, config.base_bytes)
    if gradient:
        hidden.node = Node(hidden.size)
    return hidden


@lru_cache(maxsize=256)
def step_config(config: MemoryConfig) -> MemoryConfig:
    """The config with choices that matter only to the optimizer's step set to fixed values, so that more configs share
    a trace."""
    return replace(config, optimizer="adamw", momentum=False, optimizer_offload=False)


@lru_cache(maxsize=256)
def layer_config(config: MemoryConfig) -> MemoryConfig:
    """The config with choices that do not matter to a layer's trace set to fixed values, so that more configs share
    a trace."""
    return replace(
        step_config(config),
        loss="plain",
        liger=False,
        chunk_tokens=0,
        watches_experts=False,
        balances_experts=False,
        prefetches=False,
        # A checkpointed layer offloads only its input, which its trace does not count.
        activation_offload=config.activation_offload and not config.checkpointing,
    )


@lru_cache(maxsize=256)
def inference_config(config: MemoryConfig) -> MemoryConfig:
    """The config of a pass without gradients: without checkpointing and dropout, and with whole sequences, because one
    rank runs the pass alone."""
    return replace(
        config,
        checkpointing=False,
        dropout=False,
        attention_dropout=False,
        residual_dropout=False,
        embedding_dropout=False,
        sequence=1,
    )


@lru_cache(maxsize=256)
def head_config(config: MemoryConfig) -> MemoryConfig:
    """The config with choices that do not matter to the trace of the model's end set to fixed values, so that more
    configs share a trace."""
    return replace(
        layer_config(config),
        loss=config.loss,
        liger=config.liger,
        checkpointing=False,
        activation_offload=config.activation_offload,
    )
