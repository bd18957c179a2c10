"""Memory of a vision encoder in a micro-batch, in bytes per patch, where the largest image has a known size.

Layers and merger are traced with a patch as the token. `engine.budget.predict.step` adds the result to the decoder's
phases: the encoder runs forward before the decoder, and backward after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.architecture.facts import Architecture
from engine.architecture.parameters import behind_vision_layers, vision_end_parameters
from engine.architecture.vision_encoder import VisionEncoder
from engine.budget.predict.layer_traces import ForwardTrace, LayerPass, LayerStep, Sizes, layer_input
from engine.budget.predict.static import vision_end_gradients, vision_layer_tensors
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, TracedTensor
from engine.budget.trace.operations import FLOAT, activation, cast, copy, gather, linear, rms_norm
from engine.budget.trace.polynomial import BYTE, NO_BYTES, PATCH, TOKEN, BytesPolynomial, highest, maxima
from engine.budget.trace.trainable import Trainable, trainable_vision_ends, vision_trainable_by_layer
from engine.budget.trace.vision_layer import VisionLayer, norm_of
from engine.budget.trace.weights import Weights


@dataclass(frozen=True)
class _Family:
    """What encoders of one kind keep allocated."""

    merger: Callable[[Weights, VisionEncoder, list[TracedTensor]], list[TracedTensor]]
    """Returns the tensors to which the model refers while the decoder runs, the encoder's output last."""
    rotary: bool
    """Local variables refer to rotary tables and cast pixels; else to the embeddings of patches."""
    in_turn: bool
    """Without gradients, attention handles images or windows one by one, and frees each one's scores."""


@dataclass(frozen=True)
class VisionBackward:
    """Bytes while one layer, the merger or the patch embedding runs backward: gradients that exist already, tensors
    saved before it, and its own at each local maximum."""

    gradients: int
    kept: BytesPolynomial
    working: Sizes


@dataclass(frozen=True)
class VisionCost:
    """Bytes of the encoder in one micro-batch; `inputs` are not included in the other fields."""

    inputs: BytesPolynomial
    """Pixels in fp32, as an image processor returns them."""
    forward: Sizes
    held: BytesPolynomial
    """The encoder's output, and what else local variables refer to until the decoder is done."""
    kept: BytesPolynomial
    """Saved for the encoder's backward pass."""
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
    around, kept = _around_layers(encoder, config, ends, by_layer, learning and not config.activation_offload)
    forward: list[BytesPolynomial] = []
    layers: list[tuple[LayerStep, BytesPolynomial, int]] = []
    for layer, trainable in enumerate(by_layer):
        windowed = encoder.window is not None and layer not in encoder.full_layers
        found = _layer_step(encoder, config, trainable, follows, windowed, accumulating, learning)
        forward += [peak + kept + around for peak in found.forward.forward]
        layers.append((found, kept, vision_layer_tensors(encoder, config, trainable).gradients))
        if not config.activation_offload:
            kept += found.forward.saved
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
    layers: list[tuple[LayerStep, BytesPolynomial, int]],
) -> tuple[VisionBackward, ...]:
    """The moments of backward: the merger, the layers from the last to the first that backward reaches, and the
    patch embedding if it is trained. `layers`: each layer's trace, the bytes saved before it, and its gradients."""
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


def _around_layers(
    encoder: VisionEncoder, config: MemoryConfig, ends: Trainable, layers: Sequence[Trainable], keeps: bool
) -> tuple[BytesPolynomial, BytesPolynomial]:
    """Trace what stays allocated while the layers run: bytes to which only local variables refer, and bytes saved
    for backward (if it `keeps` any). The processor's pixels are not counted."""
    trace, rotary = MemoryTrace(metered=config.metered, learning=keeps), _FAMILIES[encoder.kind].rotary
    embeds = vision_end_parameters(encoder)[0].name in ends.trained
    turns = rotary and (embeds or any(layer.trained or layer.adapted for layer in layers))
    pixels = trace.new(encoder.patch_values * TOKEN, FLOAT)
    narrow = cast(trace, pixels, config.base_bytes)
    tables = trace.new(2 * encoder.hidden // encoder.heads * TOKEN, FLOAT)
    saved = [*trace.save(narrow if embeds else None), *trace.save(tables if turns else None)]
    local = [narrow, tables] if rotary else [trace.new(encoder.hidden * TOKEN, config.base_bytes)]
    del narrow, tables
    together = trace.live
    local.clear()
    beside, kept = together - trace.live, trace.live - pixels.size
    del saved  # not earlier: it keeps tensors allocated
    return beside.per_token * PATCH, kept.per_token * PATCH


@lru_cache(maxsize=256)
def _layer_step(
    encoder: VisionEncoder,
    config: MemoryConfig,
    trainable: Trainable,
    follows: bool,
    windowed: bool,
    accumulating: bool,
    learning: bool,
) -> LayerStep:
    """The traces of one layer, in bytes per patch. `follows`: its input needs a gradient; `windowed`: it attends
    within windows; `accumulating` and `learning` as in `vision_cost`."""
    learns = learning and (follows or bool(trainable.trained or trainable.adapted))
    window = encoder.window if windowed else None
    in_turn = _FAMILIES[encoder.kind].in_turn and not learns
    one = LayerPass(
        replace(config, activation_offload=False),
        encoder.hidden,
        follows,
        lambda trace: VisionLayer(trace, encoder, config, trainable).forward,
    )

    def by_patch(sizes: Iterable[BytesPolynomial]) -> Sizes:
        settled = maxima(sizes, accumulating)
        return highest([_by_patch(size, config.image_patches, window, one_by_one=in_turn) for size in settled])

    step = one.step() if learns else LayerStep(one.forward(learning=False), ())
    (saved,) = by_patch([step.forward.saved])
    return LayerStep(ForwardTrace(by_patch(step.forward.forward), saved, NO_BYTES), by_patch(step.backward))


def _by_patch(size: BytesPolynomial, patches: int, window: int | None, *, one_by_one: bool = False) -> BytesPolynomial:
    """Convert a trace's size, whose tokens are patches, to bytes per patch of images with at most `patches` patches.
    A patch attends to those of its window (None: of its image). `one_by_one`: as `_Family.in_turn`."""
    seen, per_token = min(window or patches, patches), size.per_token + size.per_block_token
    fixed = (size.fixed + size.per_position * patches) * BYTE
    if one_by_one:
        return fixed + size.per_square * seen * seen * BYTE + per_token * PATCH
    return fixed + (per_token + size.per_square * seen) * PATCH


@dataclass(frozen=True)
class MergerTrace:
    """Bytes of the merger, which turns the last layer's output into tokens of the decoder."""

    forward: Sizes
    held: BytesPolynomial
    """Stay allocated while the decoder runs, because local variables refer to them; without `saved`."""
    saved: BytesPolynomial
    backward: Sizes
    """Empty if no gradient passes the merger."""


def _merger_trace(
    encoder: VisionEncoder, config: MemoryConfig, ends: Trainable, follows: bool, accumulating: bool, learning: bool
) -> MergerTrace:
    """Trace the merger's forward and backward pass; the gradient of its output is copied out of the gradient of the
    decoder's input. `follows`: the merger's input needs a gradient."""
    trace = MemoryTrace(metered=config.metered, autocast=config.autocast, learning=learning)
    weights = Weights(trace, config, ends, vision_end_parameters(encoder), transposed=False)
    held = _FAMILIES[encoder.kind].merger(weights, encoder, [layer_input(trace, encoder.hidden, config, follows)])

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
    node.gradient = taken.pop()
    taken.clear()
    trace.backward()
    return MergerTrace(forward, beside, saved, sizes(trace.take_peaks()))


def _qwen_merger(weights: Weights, encoder: VisionEncoder, handed: list[TracedTensor]) -> list[TracedTensor]:
    """Trace Qwen's `PatchMerger`, which joins the tokens of all images in a copy; Qwen2.5-VL also reorders them."""
    trace, merged, x = weights.trace, encoder.merge**2, handed.pop()
    hidden = norm_of(weights, "model.visual.merger.ln_q", x)
    hidden = weights.linear("model.visual.merger.mlp.0", hidden, merged)
    hidden = activation(trace, hidden)
    hidden = weights.linear("model.visual.merger.mlp.2", hidden, merged)
    if encoder.window is not None:
        hidden = gather(trace, hidden, None, hidden.elements)  # None: the index stays allocated anyway
    return [x, hidden, copy(trace, hidden)]


def _siglip_merger(weights: Weights, encoder: VisionEncoder, handed: list[TracedTensor]) -> list[TracedTensor]:
    """Trace the last norm, then `Gemma3MultiModalProjector`: average pooling, norm in fp32, projection."""
    trace = weights.trace
    last = norm_of(weights, "model.vision_tower.post_layernorm", handed.pop())
    laid_out = copy(trace, last)
    pooled = _pooled(trace, laid_out, -(-encoder.hidden // encoder.merge**2) * TOKEN)
    size, trained = weights.weight("model.multi_modal_projector.mm_soft_emb_norm")
    normed = rms_norm(trace, pooled, TOKEN, size, trained, weights.config.base_bytes, wide=True)
    size, trained = weights.parameter("model.multi_modal_projector.mm_input_projection_weight")
    projected = linear(trace, normed, -(-encoder.output // encoder.merge**2), size, trained)
    return [last, projected]


def _pooled(trace: MemoryTrace, x: TracedTensor, elements: BytesPolynomial) -> TracedTensor:
    """Trace `avg_pool2d`; the input is saved for backward."""
    saved = trace.save(x) if x.node is not None else None
    return trace.unary(x, elements, x.itemsize, saved)


_FAMILIES: Mapping[str, _Family] = {
    "siglip": _Family(_siglip_merger, rotary=False, in_turn=False),
    "qwen2_vl": _Family(_qwen_merger, rotary=True, in_turn=True),
    "qwen2_5_vl": _Family(_qwen_merger, rotary=True, in_turn=True),
}
