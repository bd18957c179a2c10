"""Simulates a run's step at a few small shapes, and finds from these the memory of every shape.

Three shapes are simulated, or more where these are too few (`engine.extras.simulate.fit`). Of layers that are alike,
one or two are run, and the recording is used for all of them (`LayerStack`). Where that does not add up, all are run.

Try: `tunedeck plan -p 80gb -r lora --set model.id=facebook/opt-1.3b`
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.architecture.families import SEQUENTIAL_FAMILIES
from engine.architecture.lookup import find_config
from engine.budget.predict.inference import evaluates, generates
from engine.budget.predict.simulated import shortest_window
from engine.config.schema.run import RunSpec
from engine.device.allocation_tracker import bytes_of
from engine.extras.simulate.batch import RowImages, StepShape, images_of_rows
from engine.extras.simulate.driver import SimulatedRun, simulated_run
from engine.extras.simulate.fake_tensors import Assumed, assuming
from engine.extras.simulate.fit import FEW_SHAPES, MORE_SHAPES, curves_of, deciding_levels, shapes_of
from engine.extras.simulate.layers import STRANGE_ERRORS, Held, LayerStack, StackError
from engine.extras.simulate.recorders import PhaseLog, Segment

LENGTH_STEP = 128
"""Simulated lengths are multiples of this, so that few tensors are rounded up to whole blocks of memory."""
SEQUENTIAL_STEP = 8
"""Simulated lengths are multiples of this for families that compute one token after the other: long sequences would
take long to simulate."""
LENGTHS = ("passes", "padded", "short")
"""The parts of a document with curves."""
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def simulate_curves(spec: RunSpec) -> dict[str, Any]:
    """Simulate the steps of a run; returns the JSON-compatible document that `engine.budget.predict.simulated` stores
    and reads. Sizes are in bytes.

    Raises UsageError for a run that `train` would refuse.
    """
    began, facts = time.perf_counter(), find_config(spec.recipe.model.id, spec.recipe.model.revision)
    row_images = images_of_rows(spec)
    sizes = _sizes(spec, facts, row_images)
    with _collected_by_hand():
        document, assumed = assuming(partial(_simulated, spec, facts, sizes, row_images))
    for curves in (each for name in LENGTHS for each in document[name].values()):
        for curve in curves.values():
            curve["sizes"] = deciding_levels(np.array(curve["sizes"])).round(4).tolist()
    document["assumed"] = assumed
    document["image_tokens"] = row_images.parts if row_images is not None else 0
    return document | {"seconds": round(time.perf_counter() - began, 1)}


def _simulated(
    spec: RunSpec,
    facts: dict[str, Any],
    sizes: tuple[list[int], list[int]],
    row_images: RowImages | None,
    assumed: Assumed | None,
) -> dict[str, Any]:
    """Simulate the steps with as few layers as can stand for all; "why_whole" says why all were run, or is None."""
    simulate = partial(_document, spec, facts, sizes, row_images, assumed)
    document, why_whole = None, None
    for of_each_kind in (1, 2):
        try:
            document = simulate(of_each_kind=of_each_kind)
            why_whole = why_whole if document is None else None
            break
        except (StackError, *STRANGE_ERRORS) as error:
            why_whole = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    document = document or simulate(of_each_kind=None)
    assert document is not None
    return document | {"why_whole": why_whole}


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
    assumed: Assumed | None = None,
    *,
    of_each_kind: int | None,
) -> dict[str, Any] | None:
    """Simulate steps at several shapes. `of_each_kind`: how many layers of those that are alike are run
    (`LayerStack.choose`); None: all. Returns None if no layer can be left out. Raises StackError, or an error of the
    model's own code, if some cannot stand for others."""
    with simulated_run(spec, PhaseLog, facts, row_images, assumed) as run:
        stack = LayerStack(run.loaded.base)
        if of_each_kind is None:
            return _document_of(run, stack, sizes)
        stack.choose(of_each_kind)
        return None if stack.is_whole else _document_of(run, stack, sizes)


def _document_of(run: SimulatedRun[PhaseLog], stack: LayerStack, sizes: tuple[list[int], list[int]]) -> dict[str, Any]:
    recipe = run.spec.recipe
    stack.gradient_bytes = run.make_gradients()
    run.loaded.model.zero_grad(set_to_none=True)  # of all layers, while it has them
    period = stack.period if all(length % stack.period == 0 for length in sizes[1]) else 1
    curves = _curves(run, stack, sizes, period, _training, ("first", "later"))
    if not stack.is_whole:
        run.make_gradients(without=stack.without_gradient)
    document: dict[str, Any] = {"static": run.static_components(), "host": run.host_components()}
    document["gradients"] = run.gradient_bytes()
    run.optimizer_step()
    document["update"] = run.recorder.take_peak()
    run.end_training()
    if evaluates(recipe):
        more = _curves(run, stack, sizes, period, _evaluation, ("evaluate",))
        curves = {name: found | more[name] for name, found in curves.items()}
    document["generate"] = _generation(run, stack, sizes) if generates(recipe) else None
    return document | {"period": period, **curves}


Simulate = Callable[[SimulatedRun[PhaseLog], LayerStack, StepShape], list[list[Segment]]]
"""Simulates passes through a model for one shape; returns what is recorded of each."""


def _curves(
    run: SimulatedRun[PhaseLog],
    stack: LayerStack,
    sizes: tuple[list[int], list[int]],
    period: int,
    simulate: Simulate,
    names: tuple[str, ...],
) -> dict[str, dict[str, Any]]:
    """Return the curves of the passes `names` by LENGTHS: "passes" at whole periods, "padded" at those that lack all
    tokens but one. Where operations differ between periods, the largest of them may be another one when there is only
    one: "short" is within that."""
    (rows, lengths), images = sizes, run.row_images
    found: dict[str, dict[str, Any]] = {name: {} for name in LENGTHS}

    def fitted(lengths: list[int]) -> tuple[dict[str, Any], bool]:
        return _fitted(partial(simulate, run, stack), names, shapes_of((rows, lengths), with_images=images is not None))

    with stack.only_chosen():
        found["passes"], differ = fitted(lengths)
        if period > 1:
            found["padded"], _ = fitted([length - period + 1 for length in lengths])
            if differ and images is None:
                found["short"], _ = fitted([period // 4, period // 2, period])
    return found


def _fitted(
    simulate: Callable[[StepShape], list[list[Segment]]], names: tuple[str, ...], shapes: list[StepShape]
) -> tuple[dict[str, Any], bool]:
    """Return the curves of the passes `names`, of which `simulate` returns what is recorded for a shape, and whether
    operations differ between shapes."""
    found: list[list[list[Segment]]] = []
    curves: list[dict[str, Any] | None] = [None]
    for count in (FEW_SHAPES, MORE_SHAPES, len(shapes)):
        if None in curves:
            found += [simulate(shape) for shape in shapes[len(found) : count]]
            curves = [curves_of(each, shapes[:count]) for each in zip(*found, strict=True)]
    counts = {tuple(len(each.log) for segments in passes for each in segments) for passes in found}
    return dict(zip(names, curves, strict=True)), len(counts) > 1


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
            raise StackError("the gradients of the simulated layers do not add up to those of all layers")
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
