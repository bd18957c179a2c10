"""Memory of a vision encoder in a micro-batch, in bytes per patch, where the largest image has a known size.

Layers and merger are traced with a patch as the token. The result is a `VisionCost`. `engine.budget.predict.step` adds
it to the decoder's phases: the encoder runs forward before the decoder, and backward after the decoder's backward.

Try: `python -m pytest tests/budget/test_vision.py`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture.facts import Architecture
from engine.budget.architecture.vision_encoder import VisionEncoder
from engine.budget.architecture.vision_parameters import behind_vision_layers, vision_end_parameters
from engine.budget.predict.layer_traces import Sizes
from engine.budget.predict.static import vision_end_gradients, vision_layer_tensors
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, Node, TracedTensor
from engine.budget.trace.operations import FLOAT, activation, copy, gather, linear, rms_norm
from engine.budget.trace.polynomial import BYTE, NO_BYTES, PATCH, TOKEN, BytesPolynomial, highest, maxima
from engine.budget.trace.trainable import Trainable, trainable_vision_ends, vision_trainable_by_layer
from engine.budget.trace.vision_layer import VisionLayer, norm_of
from engine.budget.trace.weights import Weights


@dataclass(frozen=True)
class VisionBackward:
    """Bytes while one layer, the merger or the patch embedding of the encoder runs backward.

    `gradients`: of parameters that backward has already reached; `kept`: saved by the layers before this one;
    `working`: of the layer itself, at its local maxima.
    """

    gradients: int
    kept: BytesPolynomial
    working: Sizes


@dataclass(frozen=True)
class VisionCost:
    """Bytes of the encoder in one micro-batch; `inputs` are not included in the other fields."""

    inputs: BytesPolynomial
    """Pixels in fp32, as a transformers image processor returns them."""
    forward: Sizes
    held: BytesPolynomial
    """The encoder's output, and other tensors that local variables of the model refer to until the decoder is done."""
    kept: BytesPolynomial
    """Tensors that the encoder has saved for its backward pass."""
    backward: tuple[VisionBackward, ...]


@lru_cache(maxsize=256)
def vision_cost(arch: Architecture, config: MemoryConfig, accumulating: bool, *, learning: bool = True) -> VisionCost:
    """The cost of the encoder of `arch`, where images have at most `config.image_patches` patches. `accumulating`:
    gradients of an earlier micro-batch exist; without `learning`, nothing is saved for backward."""
    encoder = arch.vision_encoder
    assert encoder is not None
    by_layer = vision_trainable_by_layer(encoder, config.patterns)
    ends = trainable_vision_ends(encoder, config.patterns)
    follows = learning and any(not behind_vision_layers(name) for name in ends.trained)
    around, keeps = _around(encoder, config), learning and not config.activation_offload
    kept = _kept_around(encoder, config, ends, by_layer) if keeps else NO_BYTES
    around = around if encoder.kind == "siglip" else around - kept
    forward: list[BytesPolynomial] = []
    layers: list[tuple[VisionLayerTrace, BytesPolynomial, int]] = []
    for layer, trainable in enumerate(by_layer):
        windowed = encoder.window is not None and layer not in encoder.full_layers
        found = _layer_trace(encoder, config, trainable, follows, windowed, accumulating, learning)
        forward += [peak + kept + around for peak in found.forward]
        layers.append((found, kept, vision_layer_tensors(encoder, config, trainable).gradients))
        if not config.activation_offload:
            kept += found.saved
        follows = follows or bool(learning and (trainable.trained or trainable.adapted))
    merger = _merger_trace(encoder, config, ends, follows, accumulating, learning)
    forward += [peak + kept + around for peak in merger.forward]
    return VisionCost(
        inputs=FLOAT * encoder.patch_values * PATCH,
        forward=highest(forward),
        held=merger.held,
        kept=kept if config.activation_offload else kept + merger.saved,
        backward=_backward(encoder, config, merger, kept, layers) if merger.backward else (),
    )


def _backward(
    encoder: VisionEncoder,
    config: MemoryConfig,
    merger: MergerTrace,
    kept: BytesPolynomial,
    layers: list[tuple[VisionLayerTrace, BytesPolynomial, int]],
) -> tuple[VisionBackward, ...]:
    """The moments of the encoder's backward pass: the merger, then the layers from the last to the first that backward
    reaches, then the patch embedding if it is trained.

    `kept`: bytes saved when the merger runs backward; `layers`: each layer's trace, the bytes saved before it, and the
    bytes of its gradients.
    """
    moments = [VisionBackward(0, kept, merger.backward)]
    gradients = vision_end_gradients(encoder, config, behind=True)
    for found, below, made in reversed(layers):
        if not found.backward:
            break
        moments.append(VisionBackward(gradients, below, found.backward))
        gradients += made
    if patches := vision_end_gradients(encoder, config, behind=False):
        working = patches * BYTE + encoder.hidden * config.base_bytes * PATCH
        moments.append(VisionBackward(gradients, layers[0][1], (working,)))
    return tuple(moments)


def _around(encoder: VisionEncoder, config: MemoryConfig) -> BytesPolynomial:
    """Bytes of the tensors that stay allocated while the encoder's layers run, because local variables of its forward
    refer to them."""
    if encoder.kind == "siglip":  # the embeddings of patches, which the first layer gets
        return encoder.hidden * config.base_bytes * PATCH
    return _tables(encoder, config) + _cast_pixels(encoder, config)


def _kept_around(
    encoder: VisionEncoder, config: MemoryConfig, ends: Trainable, layers: Sequence[Trainable]
) -> BytesPolynomial:
    """Bytes saved for backward outside the layers: pixels for the patch embedding, tables for the rotary embedding.
    `ends` and `layers` tell what is trained outside the layers and in each of them."""
    first = vision_end_parameters(encoder)[0].name in ends.trained
    kept = _cast_pixels(encoder, config) if first else NO_BYTES
    turned = encoder.kind != "siglip" and (first or any(layer.trained or layer.adapted for layer in layers))
    return kept + _tables(encoder, config) if turned else kept


def _cast_pixels(encoder: VisionEncoder, config: MemoryConfig) -> BytesPolynomial:
    """Bytes of the pixels cast to the encoder's dtype; zero if that is fp32, which needs no cast."""
    itemsize = 0 if config.base_bytes == FLOAT else config.base_bytes
    return itemsize * encoder.patch_values * PATCH


def _tables(encoder: VisionEncoder, config: MemoryConfig) -> BytesPolynomial:
    """Bytes of the fp32 rotary tables of all patches."""
    return 2 * FLOAT * encoder.hidden // encoder.heads * PATCH


class VisionLayerTrace(NamedTuple):
    """Bytes of one layer: at the local maxima of forward, saved for backward, at the local maxima of backward."""

    forward: Sizes
    saved: BytesPolynomial
    backward: Sizes


@lru_cache(maxsize=256)
def _layer_trace(
    encoder: VisionEncoder,
    config: MemoryConfig,
    trainable: Trainable,
    follows: bool,
    windowed: bool,
    accumulating: bool,
    learning: bool,
) -> VisionLayerTrace:
    """Trace the forward and backward pass of one layer. `follows`: its input needs a gradient; `windowed`: it attends
    within windows; `accumulating`: gradients of an earlier micro-batch exist; without `learning`, nothing is saved for
    backward."""
    learns = learning and (follows or bool(trainable.trained or trainable.adapted))
    window = encoder.window if windowed else None
    in_turn = encoder.kind != "siglip" and not learns

    def sizes(peaks: Iterable[BytesPolynomial]) -> Sizes:
        settled = maxima(peaks, accumulating)
        return highest([_by_patch(size, config.image_patches, window, one_by_one=in_turn) for size in settled])

    def forward_alone(*, keeps_saved: bool) -> tuple[MemoryTrace, TracedTensor]:
        trace = MemoryTrace(metered=config.metered, autocast=config.autocast, learning=learns, keeps_saved=keeps_saved)
        arguments = [_encoder_input(trace, encoder, config, follows)]
        return trace, VisionLayer(trace, encoder, config, trainable).forward(arguments.pop())

    again = config.checkpointing and learns
    trace, output = forward_alone(keeps_saved=not again)
    forward = sizes(trace.take_peaks())
    if not learns:
        return VisionLayerTrace(forward, NO_BYTES, ())
    if not again:
        trace.casts.clear()
    else:
        trace = MemoryTrace(metered=config.metered, autocast=config.autocast)
        x = _encoder_input(trace, encoder, config, follows)  # stays allocated until the layer's backward is over
        output = trace.checkpoint(lambda: VisionLayer(trace, encoder, config, trainable).forward(x))
    assert output.node is not None
    saved, size, node = trace.live - output.size, output.size, output.node
    del output
    trace.backward(node, trace.allocate(size))
    (kept,) = sizes([saved])
    return VisionLayerTrace(forward, kept, sizes(trace.take_peaks()))


def _encoder_input(trace: MemoryTrace, encoder: VisionEncoder, config: MemoryConfig, gradient: bool) -> TracedTensor:
    hidden = trace.new(encoder.hidden * TOKEN, config.base_bytes)
    if gradient:
        hidden.node = Node(hidden.size)
    return hidden


def _by_patch(size: BytesPolynomial, patches: int, window: int | None, *, one_by_one: bool = False) -> BytesPolynomial:
    """Convert a trace's size, whose tokens are patches, to bytes per patch of images with at most `patches` patches.

    A patch attends to the patches of its window (None: of its image). `one_by_one`: attention handles images or windows
    one after the other and frees each one's scores before the next.
    """
    seen, per_token = min(window or patches, patches), size.per_token + size.per_block_token
    fixed = (size.fixed + size.per_position * patches) * BYTE
    if one_by_one:
        return fixed + size.per_square * seen * seen * BYTE + per_token * PATCH
    return fixed + (per_token + size.per_square * seen) * PATCH


@dataclass(frozen=True)
class MergerTrace:
    """Bytes of the merger, which turns the last layer's output into tokens of the decoder, as polynomials in the rows
    of a micro-batch."""

    forward: Sizes
    """Live bytes at the local maxima of the forward pass."""
    held: BytesPolynomial
    """Bytes of tensors that stay allocated while the decoder runs, because local variables refer to them, without those
    in `saved`."""
    saved: BytesPolynomial
    """Bytes kept for the backward pass."""
    backward: Sizes
    """Live bytes at the local maxima of the backward pass; empty if no gradient passes the merger."""


def _merger_trace(
    encoder: VisionEncoder, config: MemoryConfig, ends: Trainable, follows: bool, accumulating: bool, learning: bool
) -> MergerTrace:
    """Trace the merger's forward and backward pass; the gradient of its output is copied out of the gradient of the
    decoder's input.

    `ends`: what is trained outside the layers; `follows`: the merger's input needs a gradient; `accumulating` and
    `learning`: as in `vision_cost`.
    """
    trace = MemoryTrace(metered=config.metered, autocast=config.autocast, learning=learning)
    weights = Weights(trace, config, ends, vision_end_parameters(encoder), transposed=False)
    merge = _siglip_merger if encoder.kind == "siglip" else _qwen_merger
    held = merge(weights, encoder, _encoder_input(trace, encoder, config, follows))

    def sizes(peaks: Iterable[BytesPolynomial]) -> Sizes:
        return highest([_by_patch(size, config.image_patches, None) for size in maxima(peaks, accumulating)])

    forward, with_held = sizes(trace.take_peaks()), trace.live
    trace.casts.clear()
    node, size = held[-1].node, held[-1].size
    held.clear()
    (saved,) = sizes([trace.live])
    (beside,) = sizes([with_held - trace.live])
    if node is None:
        return MergerTrace(forward, beside, NO_BYTES, ())
    taken = [trace.allocate(size), trace.allocate(size)]
    incoming = taken.pop()
    taken.clear()
    trace.backward(node, incoming)
    return MergerTrace(forward, beside, saved, sizes(trace.take_peaks()))


def _qwen_merger(weights: Weights, encoder: VisionEncoder, x: TracedTensor) -> list[TracedTensor]:
    """Trace Qwen's `PatchMerger`, which joins the tokens of all images in a copy; Qwen2.5-VL also reorders them.

    Returns the tensors to which the model refers while the decoder runs, the encoder's output last.
    """
    trace, merged = weights.trace, encoder.merge**2
    hidden = norm_of(weights, "model.visual.merger.ln_q", x)
    hidden = weights.linear("model.visual.merger.mlp.0", hidden, merged)
    hidden = activation(trace, hidden)
    hidden = weights.linear("model.visual.merger.mlp.2", hidden, merged)
    if encoder.window is not None:
        hidden = gather(trace, hidden, None, hidden.elements)  # None: the index stays allocated anyway
    return [x, hidden, copy(trace, hidden)]


def _siglip_merger(weights: Weights, encoder: VisionEncoder, x: TracedTensor) -> list[TracedTensor]:
    """Trace the encoder's last norm, then `Gemma3MultiModalProjector`: average pooling, norm in fp32, projection.

    Returns the tensors to which the model refers while the decoder runs, the encoder's output last.
    """
    trace = weights.trace
    last = norm_of(weights, "model.vision_tower.post_layernorm", x)
    del x
    laid_out = copy(trace, last)
    pooled = _pooled(trace, laid_out, -(-encoder.hidden // encoder.merge**2) * TOKEN)
    size, trained = weights.weight("model.multi_modal_projector.mm_soft_emb_norm")
    normed = rms_norm(trace, pooled, TOKEN, size, trained, weights.config.base_bytes, wide=True)
    size, trained = weights.parameter("model.multi_modal_projector.mm_input_projection_weight")
    projected = linear(trace, normed, -(-encoder.output // encoder.merge**2), size, trained)
    return [last, projected]


def _pooled(trace: MemoryTrace, x: TracedTensor, elements: BytesPolynomial) -> TracedTensor:
    """Trace `avg_pool2d` with an output of `elements` elements; the input is saved for backward."""
    saved = trace.save(x) if x.node is not None else None
    return trace.unary(x, elements, x.itemsize, saved)
