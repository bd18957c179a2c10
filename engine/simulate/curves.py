"""Simulates a run's step at a few small shapes, and finds from these the memory of every shape.

Three shapes are simulated, or eight where these are too few (`engine.simulate.fit`). If all layers of a model are
alike, models of two and of three layers are simulated, and every level is extrapolated linearly to the model's depth.

Try: `tunedeck plan -p 80gb -r lora --set model.id=facebook/opt-1.3b`
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

from engine.budget.architecture.families import SEQUENTIAL_FAMILIES
from engine.budget.architecture.lookup import find_config
from engine.budget.predict.inference import evaluates, generates
from engine.config.schema.run import RunSpec
from engine.simulate.batch import StepShape
from engine.simulate.device import SimulatedDevice
from engine.simulate.driver import SimulatedRun, on_meta, simulated_run
from engine.simulate.fit import FEW_SHAPES, curves_of, deciding_levels, shapes_of
from engine.simulate.recorders import PhaseLog, Segment, decoder_layers

DEPTHS = (2, 3)
"""How many layers are simulated of a model whose layers are alike."""
LENGTH_STEP = 128
"""Simulated lengths are multiples of this, so that few tensors are rounded up to whole blocks of memory."""
SEQUENTIAL_STEP = 8
"""Simulated lengths are multiples of this for families that compute one token after the other: long sequences would
take long to simulate."""
WINDOWS = ("sliding_window", "attention_window_size", "attention_chunk_size", "window_size")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
FEWEST_LAYERS = 5
"""Models of fewer layers are simulated with all their layers."""
NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "idx")
"""Attributes in which a layer keeps its own number."""


def simulate_curves(spec: RunSpec) -> dict[str, Any]:
    """Simulate the steps of a run; returns the JSON-compatible document that `engine.budget.predict.simulated` stores
    and reads. Sizes are in bytes.

    Raises UsageError for a run that `train` would refuse.
    """
    began, facts = time.perf_counter(), find_config(spec.recipe.model.id, spec.recipe.model.revision)
    depth, sizes = depth_of(spec, facts), _sizes(spec, facts)
    with _collected_by_hand():
        if depth is None:
            document = _document(spec, facts, sizes, ends_only=False)
        else:
            shallow, deep = (_document(spec, at_depth(facts, each), sizes, ends_only=True) for each in DEPTHS)
            document = _continued(shallow, deep, depth)
    for curves in document["passes"].values():
        for curve in curves.values():
            curve["sizes"] = deciding_levels(np.array(curve["sizes"])).round(4).tolist()
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


def _sizes(spec: RunSpec, facts: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return (numbers of rows, lengths in tokens) to simulate for the model with the config `facts`.

    All lengths are above the sliding window if the run's sequences can be longer than it, else below it, and within the
    model's positions: a model may run other operations beyond these limits. Families that compute one token after the
    other are simulated at a few tokens, whatever their window: hundreds would take minutes.
    """
    text = facts.get("text_config") or facts
    if text.get("model_type") in SEQUENTIAL_FAMILIES:
        return [2, 4], [SEQUENTIAL_STEP, 2 * SEQUENTIAL_STEP, 3 * SEQUENTIAL_STEP]
    window = min([int(text[key]) for key in WINDOWS if isinstance(text.get(key), int)], default=0)
    positions = min([int(text[key]) for key in POSITIONS if isinstance(text.get(key), int)], default=1 << 30)
    reached = 0 < window < spec.recipe.data.max_length
    before = -(-window // LENGTH_STEP) * LENGTH_STEP if reached else 0
    most = positions if reached or not window else min(window, positions)
    if before + 3 > most:
        before = 0
    step = max(1, min(LENGTH_STEP, (most - before) // 3))
    return [2, 4], [before + step, before + 2 * step, before + 3 * step]


def _document(
    spec: RunSpec, facts: dict[str, Any], sizes: tuple[list[int], list[int]], *, ends_only: bool
) -> dict[str, Any]:
    """Simulate the steps of the model with the config `facts` at several shapes; returns static memory and offloaded
    optimizer state by component, gradients, the peak of the optimizer step, the coefficients of the levels by kind of
    pass and phase, and those of generation (None if the recipe generates nothing). Sizes are in bytes."""
    shapes = shapes_of(sizes)
    with simulated_run(spec, PhaseLog, facts) as run:
        passes = _fitted(lambda shape: _training(run, shape), ("first", "later"), shapes, ends_only)
        document: dict[str, Any] = {"static": run.static_components(), "host": run.host_components()}
        document["gradients"] = run.gradient_bytes()
        run.optimizer_step()
        document["update"] = run.recorder.take_peak()
        run.end_training()
        if evaluates(spec.recipe):
            passes |= _fitted(lambda shape: _evaluation(run, shape), ("evaluate",), shapes, ends_only)
        document["generate"] = _generation(run, sizes) if generates(spec.recipe) else None
    return document | {"passes": passes}


def _fitted(
    simulate: Callable[[StepShape], list[list[Segment]]],
    names: tuple[str, ...],
    shapes: list[StepShape],
    ends_only: bool,
) -> dict[str, Any]:
    """Return the curves of the passes `names`, of which `simulate` returns what is recorded for a shape."""
    found = [simulate(shape) for shape in shapes[:FEW_SHAPES]]
    curves = [curves_of(each, shapes[:FEW_SHAPES], ends_only=ends_only) for each in zip(*found, strict=True)]
    if None in curves:
        found += [simulate(shape) for shape in shapes[FEW_SHAPES:]]
        curves = [curves_of(each, shapes, ends_only=ends_only) for each in zip(*found, strict=True)]
    return dict(zip(names, curves, strict=True))


def _training(run: SimulatedRun[PhaseLog], shape: StepShape) -> list[list[Segment]]:
    """Simulate a micro-batch that makes the gradients and one that adds to them."""
    run.loaded.model.zero_grad(set_to_none=True)
    recorded = []
    for _ in range(2):
        gc.collect(0)
        run.micro_batch(shape)
        recorded.append(run.recorder.take())
    return recorded


def _evaluation(run: SimulatedRun[PhaseLog], shape: StepShape) -> list[list[Segment]]:
    gc.collect(0)
    run.evaluate(shape)
    return [run.recorder.take()]


def _generation(run: SimulatedRun[PhaseLog], sizes: tuple[list[int], list[int]]) -> list[float]:
    """Simulate the generation of answers; returns the coefficients of its peak in bytes: fixed, per row, per prompt
    token and per row × prompt length²."""
    rows, lengths = sizes
    shapes = [(1, lengths[0]), (rows[0], lengths[0]), (rows[0], lengths[1]), (rows[0], lengths[2])]
    peaks = []
    for count, prompt in shapes:
        gc.collect(0)
        run.generate(rows=count, prompt=prompt)
        peaks.append(run.recorder.take_peak())
    units = np.array([(1, count, count * prompt, count * prompt**2) for count, prompt in shapes], dtype=float)
    return [float(each) for each in np.linalg.solve(units, np.array(peaks, dtype=float))]


def _continued(shallow: dict[str, Any], deep: dict[str, Any], depth: int) -> dict[str, Any]:
    """Extrapolate two documents (`_document`) linearly to a model of `depth` layers: `shallow` is of a model
    of DEPTHS[0] layers, `deep` of one of DEPTHS[1] layers."""
    times = depth - DEPTHS[1]

    def on(low: Any, high: Any) -> Any:
        return high + times * (high - low)

    passes: dict[str, dict[str, Any]] = {}
    for name, curves in deep["passes"].items():
        passes[name] = {}
        for phase, curve in curves.items():
            other = shallow["passes"][name][phase]
            low, high = (np.array(each["sizes"]) for each in (other, curve))
            if low.shape != high.shape:
                low, high = low.max(axis=0, keepdims=True), high.max(axis=0, keepdims=True)
            passes[name][phase] = {"gradients": on(other["gradients"], curve["gradients"]), "sizes": on(low, high)}
    generated = deep["generate"]
    if generated is not None:
        generated = [on(low, high) for low, high in zip(shallow["generate"], generated, strict=True)]
    return {
        "static": {name: on(shallow["static"][name], size) for name, size in deep["static"].items()},
        "host": {name: on(shallow["host"][name], size) for name, size in deep["host"].items()},
        "gradients": on(shallow["gradients"], deep["gradients"]),
        "update": on(shallow["update"], deep["update"]),
        "passes": passes,
        "generate": generated,
    }


def depth_of(spec: RunSpec, facts: dict[str, Any]) -> int | None:
    """The number of a model's layers; None if they are not all alike, if there are fewer than FEWEST_LAYERS, or if not
    exactly one key of the config (`facts`) gives their number."""
    place = _depth_place(facts)
    if place is None or place[0][place[1]] < FEWEST_LAYERS:
        return None
    layers = list(decoder_layers(on_meta(spec, SimulatedDevice(like_a_card=True), facts).base))
    kinds = {tuple(_outline(layer)) for layer in layers}
    return len(layers) if len(kinds) == 1 and len(layers) == place[0][place[1]] else None


def at_depth(facts: dict[str, Any], depth: int) -> dict[str, Any]:
    """A copy of the config `facts` with `depth` layers; lists with an entry per layer are shortened. Requires that
    `depth_of` found the model's depth."""
    place = _depth_place(facts)
    assert place is not None
    table, key = place
    layers = table[key]
    changed = {
        name: value[:depth] if isinstance(value, list) and len(value) == layers else value
        for name, value in table.items()
    } | {key: depth}
    return changed if table is facts else {**facts, "text_config": changed}


def _depth_place(facts: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return (table, key): the table of the config `facts` that contains the number of layers, and its key there; None
    unless exactly one of DEPTH_KEYS is set."""
    table = facts.get("text_config") or facts
    keys = [key for key in DEPTH_KEYS if isinstance(table.get(key), int)]
    return (table, keys[0]) if len(keys) == 1 else None


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
