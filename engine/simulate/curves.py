"""Simulates a run's step at a few small shapes, and finds from these the memory of every shape.

Three shapes are simulated, or more where these are too few (`engine.simulate.fit`). Of layers that are alike one is
run, or two, and what is recorded of it stands for all of them (`LayerStack`). Where that does not add up, all are run.

Try: `tunedeck plan -p 80gb -r lora --set model.id=facebook/opt-1.3b`
"""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from engine.budget.architecture.families import SEQUENTIAL_FAMILIES
from engine.budget.architecture.lookup import find_config
from engine.budget.predict.inference import evaluates, generates
from engine.budget.predict.simulated import shortest_window
from engine.config.schema.run import RunSpec
from engine.device.allocation_tracker import bytes_of
from engine.simulate.batch import StepShape
from engine.simulate.driver import SimulatedRun, simulated_run
from engine.simulate.fit import FEW_SHAPES, MORE_SHAPES, curves_of, deciding_levels, shapes_of
from engine.simulate.images import RowImages, images_of_rows
from engine.simulate.recorders import EMBEDDING, LOSS, PhaseLog, Segment, decoder_layers

LENGTH_STEP = 128
"""Simulated lengths are multiples of this, so that few tensors are rounded up to whole blocks of memory."""
SEQUENTIAL_STEP = 8
"""Simulated lengths are multiples of this for families that compute one token after the other: long sequences would
take long to simulate."""
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")

NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "idx")
"""Attributes in which a layer keeps its own number."""


def simulate_curves(spec: RunSpec) -> dict[str, Any]:
    """Simulate the steps of a run; returns the JSON-compatible document that `engine.budget.predict.simulated` stores
    and reads. Sizes are in bytes.

    Raises UsageError for a run that `train` would refuse.
    """
    began, facts = time.perf_counter(), find_config(spec.recipe.model.id, spec.recipe.model.revision)
    row_images = images_of_rows(spec)
    sizes = _sizes(spec, facts, row_images)
    document, why_whole = None, None
    with _collected_by_hand():
        for of_each_kind in (1, 2):
            try:
                document = _document(spec, facts, sizes, row_images, of_each_kind=of_each_kind)
                why_whole = why_whole if document is None else None
                break
            except (StackError, *STRANGE_ERRORS) as error:
                why_whole = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        document = document or _document(spec, facts, sizes, row_images, of_each_kind=None)
    assert document is not None
    for curves in (*document["passes"].values(), *document["padded"].values()):
        for curve in curves.values():
            curve["sizes"] = deciding_levels(np.array(curve["sizes"])).round(4).tolist()
    document["why_whole"] = why_whole
    document["image_tokens"] = row_images.parts if row_images is not None else 0
    return document | {"seconds": round(time.perf_counter() - began, 1)}


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    """Switch Python's automatic garbage collection off inside the block: a collection during a simulated step would
    free tensors and so change the recorded bytes. Callers collect the youngest generation between simulations; a full
    collection takes 0.3 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _sizes(spec: RunSpec, facts: dict[str, Any], row_images: RowImages | None) -> tuple[list[int], list[int]]:
    """Return (numbers of rows, lengths in tokens) to simulate for the model with the config `facts`; with
    images, lengths that hold these.

    All lengths are above the sliding window if the run's sequences can be longer than it, else below it, and within the
    model's positions: a model may run other operations beyond these limits. Families that compute one token after the
    other are simulated at a few tokens, whatever their window: hundreds would take minutes.
    """
    text = facts.get("text_config") or facts
    if text.get("model_type") in SEQUENTIAL_FAMILIES:
        return [2, 4], [SEQUENTIAL_STEP, 2 * SEQUENTIAL_STEP, 3 * SEQUENTIAL_STEP]
    window = shortest_window(facts)
    positions = min([int(text[key]) for key in POSITIONS if isinstance(text.get(key), int)], default=1 << 30)
    reached = 0 < window < spec.recipe.data.max_length
    before = -(-window // LENGTH_STEP) * LENGTH_STEP if reached else 0
    most = positions if reached or not window else min(window, positions)
    if row_images is not None:
        before = max(before, -(-len(row_images.tokens) // LENGTH_STEP) * LENGTH_STEP)
        most = max(most, before + 3 * LENGTH_STEP)
    if before + 3 > most:
        before = 0
    step = max(1, min(LENGTH_STEP, (most - before) // 3))
    return [2, 4], [before + step, before + 2 * step, before + 3 * step]


def _document(
    spec: RunSpec,
    facts: dict[str, Any],
    sizes: tuple[list[int], list[int]],
    row_images: RowImages | None = None,
    *,
    of_each_kind: int | None,
) -> dict[str, Any] | None:
    """Simulate the steps of the model with the config `facts` at several shapes; returns static memory and offloaded
    optimizer state by component, gradients, the peak of the optimizer step, the coefficients of the levels by kind of
    pass and phase, and those of generation (None if the recipe generates nothing). Sizes are in bytes.

    `of_each_kind`: how many layers of those that are alike are run (`LayerStack.choose`); None: all. Returns None if no
    layer can be left out. Raises StackError, or an error of the model's own code, if some cannot stand for others.
    """
    with simulated_run(spec, PhaseLog, facts, row_images) as run:
        stack = LayerStack(run.loaded.base)
        if of_each_kind is None:
            return _document_of(run, stack, sizes)
        stack.choose(of_each_kind)
        return None if stack.is_whole else _document_of(run, stack, sizes)


def _document_of(run: SimulatedRun[PhaseLog], stack: LayerStack, sizes: tuple[list[int], list[int]]) -> dict[str, Any]:
    recipe, with_images = run.spec.recipe, run.row_images is not None
    shapes = shapes_of(sizes, with_images=with_images)
    stack.gradient_bytes = run.make_gradients()
    run.loaded.model.zero_grad(set_to_none=True)  # of all layers, while it has them
    rows, lengths = sizes
    period = stack.period if all(length % stack.period == 0 for length in lengths) else 1
    shorter = [length - period + 1 for length in lengths]
    short = shapes_of((rows, shorter), with_images=with_images) if period > 1 else []
    with stack.only_chosen():
        passes = _fitted(lambda shape: _training(run, stack, shape), ("first", "later"), shapes)
        padded = _fitted(lambda shape: _training(run, stack, shape), ("first", "later"), short)
    if not stack.is_whole:
        run.make_gradients(without=stack.without_gradient)
    document: dict[str, Any] = {"static": run.static_components(), "host": run.host_components()}
    document["gradients"] = run.gradient_bytes()
    run.optimizer_step()
    document["update"] = run.recorder.take_peak()
    run.end_training()
    if evaluates(recipe):
        with stack.only_chosen():
            passes |= _fitted(lambda shape: _evaluation(run, stack, shape), ("evaluate",), shapes)
            padded |= _fitted(lambda shape: _evaluation(run, stack, shape), ("evaluate",), short)
    document["generate"] = _generation(run, stack, sizes) if generates(recipe) else None
    return document | {"period": period, "passes": passes, "padded": padded}


def _fitted(
    simulate: Callable[[StepShape], list[list[Segment]]], names: tuple[str, ...], shapes: list[StepShape]
) -> dict[str, Any]:
    """Return the curves of the passes `names`, of which `simulate` returns what is recorded for a shape. None without
    shapes."""
    if not shapes:
        return {}
    found: list[list[list[Segment]]] = []
    curves: list[dict[str, Any] | None] = [None]
    for count in (FEW_SHAPES, MORE_SHAPES, len(shapes)):
        if None in curves:
            found += [simulate(shape) for shape in shapes[len(found) : count]]
            curves = [curves_of(each, shapes[:count]) for each in zip(*found, strict=True)]
    return dict(zip(names, curves, strict=True))


def _training(run: SimulatedRun[PhaseLog], stack: LayerStack, shape: StepShape) -> list[list[Segment]]:
    """Simulate a micro-batch that makes the gradients and one that adds to them."""
    run.loaded.model.zero_grad(set_to_none=True)
    recorded: list[list[Segment]] = []
    more = Held(0, 0)
    for _ in range(2):
        gc.collect(0)
        before_bytes = run.device.memory().allocated_bytes
        run.micro_batch(shape)
        segments, more = stack.spliced(run.recorder.take(), more, run.gradient_bytes())
        made_bytes = run.device.memory().allocated_bytes - before_bytes + more.level
        if not recorded:
            stack.find_without_gradient(run.loaded.trainable())
        gradient_bytes = stack.gradient_bytes - bytes_of(stack.without_gradient)
        if not (stack.is_whole or recorded or made_bytes == gradient_bytes):
            raise StackError("gradients of the layers that were run do not add up to those of all")
        recorded.append(segments)
    return recorded


def _evaluation(run: SimulatedRun[PhaseLog], stack: LayerStack, shape: StepShape) -> list[list[Segment]]:
    gc.collect(0)
    run.evaluate(shape)
    return [stack.spliced(run.recorder.take(), Held(0, 0), 0)[0]]


def _generation(run: SimulatedRun[PhaseLog], stack: LayerStack, sizes: tuple[list[int], list[int]]) -> list[float]:
    """Simulate the generation of answers; returns the coefficients of its peak in bytes: fixed, per row, per prompt
    token and per row × prompt length². A layer that is left out adds what one more of its kind adds."""
    with stack.only_chosen():
        few = _generated(run, sizes)
    total = few
    for layer, times in stack.left_out.items():
        with stack.only_chosen(layer):
            total = total + times * (_generated(run, sizes) - few)
    return [float(each) for each in total]


def _generated(run: SimulatedRun[PhaseLog], sizes: tuple[list[int], list[int]]) -> NDArray[np.float64]:
    rows, lengths = sizes
    shapes = [(1, lengths[0]), (rows[0], lengths[0]), (rows[0], lengths[1]), (rows[0], lengths[2])]
    peaks = []
    for count, prompt in shapes:
        gc.collect(0)
        run.generate(rows=count, prompt=prompt)
        peaks.append(run.recorder.take_peak())
    units = np.array([(1, count, count * prompt, count * prompt**2) for count, prompt in shapes], dtype=float)
    solved: NDArray[np.float64] = np.linalg.solve(units, np.array(peaks, dtype=float))
    return solved


class StackError(Exception):
    """Raised if what the layers that are run record does not add up to what all layers hold."""


STRANGE_ERRORS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError)
"""What a model whose layers were taken out may raise: its own code may count on all of them."""


class Held(NamedTuple):
    """What all layers hold between two passes beyond those that are run, in bytes: everything, and gradients."""

    level: int
    gradients: int


class LayerStack:
    """The decoder layers of a model, of which some stand for others: all of them, until `choose` is called."""

    def __init__(self, base: PreTrainedModel) -> None:
        self._layers, self._text = decoder_layers(base), base.config.get_text_config()
        self._every = list(self._layers)
        self._stands_for = list(range(len(self._every)))
        """By layer, the number of the one that is run in its place."""
        self.left_out: dict[int, int] = {}
        """How many layers are left out, by the number of one of them that stands for those of its kind."""
        self.gradient_bytes = 0
        """What the gradients of everything that is trained take."""
        self.without_gradient: list[nn.Parameter] = []
        """What is trained and gets no gradient, such as an indexer's adapters: it only chooses tokens to attend to."""
        self.period = max(
            map(_chunk_of, {type(each): each for layer in self._every for each in layer.modules()}.values())
        )
        """To a multiple of how many tokens a kernel of the layers pads a sequence; 1 if none does."""

    def choose(self, of_each_kind: int = 1) -> None:
        """Leave out layers like another one: the first of a kind stands for them. The first and the last layer are run
        in any case: they free or keep tensors of the embedding and of the output head. With 2 `of_each_kind`, so is the
        last one of each kind: where layers share keys and values, the one that comes first in the backward pass makes
        the gradients to which the others add."""
        self._stands_for = list(range(len(self._every)))
        first: dict[tuple[Any, ...], int] = {}
        left_out: dict[int, list[int]] = {}
        last = {self._kind(number): number for number in range(1, len(self._every) - 1)} if of_each_kind > 1 else {}
        for number in range(1, len(self._every) - 1):
            kind = self._kind(number)
            self._stands_for[number] = chosen = number if last.get(kind) == number else first.setdefault(kind, number)
            if chosen != number:
                left_out.setdefault(chosen, []).append(number)
        self.left_out = {numbers[0]: len(numbers) for numbers in left_out.values()}

    def _kind(self, number: int) -> tuple[Any, ...]:
        return (*_outline(self._every[number]), *(str(values[number]) for values in self._by_layer().values()))

    @property
    def is_whole(self) -> bool:
        return not self.left_out

    def _by_layer(self) -> dict[str, list[Any]]:
        """The lists in the model's config that have an entry for each layer."""
        table = vars(self._text).items()
        return {key: value for key, value in table if isinstance(value, list) and len(value) == len(self._every)}

    @contextmanager
    def only_chosen(self, more: int | None = None) -> Iterator[None]:
        """Inside the block, the model has the layers that are run alone, and one more (`more`), numbered without
        gaps."""
        numbers = sorted({*self._stands_for, *([] if more is None else [more])})
        lists, renumbered = self._by_layer(), []
        for place, number in enumerate(numbers):
            for module in self._every[number].modules():
                renumbered += [(module, key, place, number) for key in NUMBERS if vars(module).get(key) == number]
        try:
            self._set([self._every[number] for number in numbers])
            for key, values in lists.items():
                setattr(self._text, key, [values[number] for number in numbers])
            for module, key, place, _ in renumbered:
                setattr(module, key, place)
            yield
        finally:
            self._set(self._every)
            for key, values in lists.items():
                setattr(self._text, key, values)
            for module, key, _, number in renumbered:
                setattr(module, key, number)

    def _set(self, layers: list[nn.Module]) -> None:
        del self._layers[:]
        self._layers.extend(layers)

    def find_without_gradient(self, trained: Iterable[tuple[str, nn.Parameter]]) -> None:
        """After a pass through the layers that are run, find `without_gradient`."""
        of_run = [dict(self._every[number].named_parameters()) for number in self._stands_for]
        self.without_gradient = [
            parameter
            for layer, run in zip(self._every, of_run, strict=True)
            for name, parameter in layer.named_parameters()
            if parameter.requires_grad and run[name].grad is None
        ]
        inside = {id(parameter) for layer in self._every for parameter in layer.parameters()}
        self.without_gradient += [each for _, each in trained if each.grad is None and id(each) not in inside]

    def spliced(self, found: list[Segment], more: Held, gradients_after: int) -> tuple[list[Segment], Held]:
        """Return what running all layers would have recorded, and what these hold afterwards. `found` was recorded of
        those that are run; `more` is what all layers held before.

        Raises StackError if something was allocated between two phases, or if layers ran in another order.
        """
        if self.is_whole:
            return found, Held(0, 0)
        if [each.phase for each in found] != _phases(found, sorted(set(self._stands_for))):
            raise StackError("layers ran in another order than that of the model")
        if any(other.log[0] != sum(each.log) for each, other in pairwise(found)):
            raise StackError("something was allocated between two layers")
        ends = [*(each.gradient_bytes for each in found[1:]), gradients_after]
        recorded = {
            each.phase: (each.log[1:], end - each.gradient_bytes) for each, end in zip(found, ends, strict=True)
        }
        level, gradients = found[0].log[0] + more.level, found[0].gradient_bytes + more.gradients
        segments = []
        for phase in _phases(found, range(len(self._every))):
            changes, made_bytes = recorded[self._source(phase)]
            segments.append(Segment(phase, gradients, [level, *changes]))
            level, gradients = level + sum(changes), gradients + made_bytes
        return segments, Held(level - sum(found[-1].log), gradients - gradients_after)

    def _source(self, phase: str) -> str:
        """The phase whose record stands for `phase`."""
        kind, _, number = phase.partition(" ")
        return f"{kind} {self._stands_for[int(number)]}" if _of_layer(phase) else phase


def _chunk_of(module: nn.Module) -> int:
    """Tokens in a chunk, for a layer that works through a sequence in chunks: its own setting, or the default of a
    function that it calls; else 1."""
    forward = inspect.unwrap(type(module).forward)
    called = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    defaults = [inspect.signature(each).parameters.get("chunk_size") for each in called if inspect.isfunction(each)]
    sizes = [vars(module).get("chunk_size"), *(each.default for each in defaults if each is not None)]
    return max([size for size in sizes if isinstance(size, int)], default=1)


def _phases(found: list[Segment], numbers: Sequence[int]) -> list[str]:
    """The phases of a pass through the layers `numbers` of the decoder, of those kinds that are in `found`, and around
    them those of `found` itself."""
    names = [each.phase for each in found]
    first = names.index(LOSS)
    ahead = [name for name in names[:first] if not _of_layer(name)]
    behind = [name for name in names[first + 1 :] if not _of_layer(name)]
    backward = [f"backward {number}" for number in reversed(numbers)] if len(names) - first - 1 > len(behind) else []
    return [*ahead, *(f"forward {number}" for number in numbers), LOSS, *backward, *behind]


def _of_layer(phase: str) -> bool:
    """Whether a phase is that of one layer of the decoder."""
    return phase.startswith(("forward ", "backward ")) and phase != EMBEDDING


def _outline(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple for each module of a layer: its name, class, settings, and the shapes of its parameters and whether
    each is trained. Two layers are alike if they yield the same tuples."""
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str, bool, type(None))) and key not in NUMBERS
        }
        own = module.named_parameters(recurse=False)
        shapes = tuple((key, tuple(tensor.shape), tensor.requires_grad) for key, tensor in own)
        yield name, type(module).__name__, tuple(sorted(settings.items(), key=str)), shapes
