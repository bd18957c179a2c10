"""Simulates a run's step at a few small shapes, and finds from these the memory of every shape.

A level is the number of allocated bytes after one allocation of the step. Each level is a linear combination of the
terms in `UNITS`, which depend on the micro-batch's shape. A step runs the same operations for every shape, so
simulations at up to eight shapes give the coefficients of each level. Where the operations differ between shapes, only
the coefficients of the phase's peak are computed. If all layers of a model are alike, models of two and of three layers
are simulated, and every level is extrapolated linearly to the model's depth.

Try: `tunedeck plan -p 80gb -r lora --set model.id=facebook/opt-1.3b`
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.budget.architecture.lookup import find_config
from engine.budget.architecture.trainable_families import SEQUENTIAL_FAMILIES
from engine.budget.predict.inference import evaluates, generates
from engine.budget.predict.simulated import UNITS, has_chunks, units_of
from engine.data.batch import Batch
from engine.device.allocation_tracker import bytes_of
from engine.model.dropout import keyed, keyed_dropouts
from engine.model.head import find_head
from engine.model.loaded import LoadedModel
from engine.model.loss import CHUNKED, LossFunction, choose_implementation
from engine.simulate.depth import at_depth, depth_of
from engine.simulate.device import SimulatedDevice
from engine.simulate.dropout import simulated_dropout
from engine.simulate.generate import simulate_generation
from engine.simulate.phase_series import EMBEDDING, PhaseSeries
from engine.simulate.step import (
    clip_gradients,
    gradients_of,
    leave_meta,
    on_meta,
    static_components,
)
from engine.spec.schema.run import RunSpec
from engine.train.step.optimizer import guarded_optimizer
from engine.train.step.optimizer_state import state_tensors

Levels = NDArray[np.float64]
"""Levels of one phase: a row for each shape, or for each unit; a column for each allocation."""

DEPTHS = (2, 3)
"""How many layers are simulated of a model whose layers are alike."""
LENGTH_STEP = 128
"""Simulated lengths are multiples of this, so that few tensors are rounded up to whole blocks of memory."""
SEQUENTIAL_STEP = 8
"""Simulated lengths are multiples of this for families that compute one token after the other: long sequences would
take long to simulate."""
WINDOWS = ("sliding_window", "attention_window_size", "attention_chunk_size", "window_size")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


class Trial(NamedTuple):
    """The shape of a simulated micro-batch: `rows` sequences of `length` tokens, of which `targets` count in the loss;
    the loss is computed for `chunk` targets at a time."""

    rows: int
    length: int
    targets: int
    chunk: int


def simulate_curves(spec: RunSpec) -> dict[str, Any]:
    """Simulate the steps of a run; returns the JSON-compatible document that `engine.budget.predict.simulated` stores
    and reads. Sizes are in bytes.

    Raises UsageError for a run that `train` would refuse.
    """
    began, facts = time.perf_counter(), find_config(spec.recipe.model.id, spec.recipe.model.revision)
    depth = depth_of(spec, facts)
    depths = DEPTHS if depth is not None else (None,)
    with _collected_by_hand():
        found = [_Simulated(spec, facts, each, _shapes(spec, facts)) for each in depths]
    document = found[-1].document() if depth is None else _continued(found[0].document(), found[1].document(), depth)
    for curves in document["passes"].values():
        for curve in curves.values():
            curve["sizes"] = _that_decide(np.array(curve["sizes"])).round(4).tolist()
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


def _shapes(spec: RunSpec, facts: dict[str, Any]) -> tuple[list[int], list[int]]:
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


def _trials(shapes: tuple[list[int], list[int]], *, chunked: bool) -> list[Trial]:
    """Return the shapes to simulate: each number of rows with each length of `shapes`, and one or two more with other
    numbers of targets. If `chunked`, the loss of each has two chunks, of which the first is full; if not, one chunk."""
    rows, lengths = shapes
    few = max(2, min(64, rows[0] * lengths[0] // 4))
    chunk = max(1, few // 2) if chunked else few
    trials = [Trial(each, length, few, chunk) for each, length in product(rows, lengths)]
    more = few + max(1, few // 4)
    half = -(-more // 2) if chunked else more
    trials.append(Trial(rows[0], lengths[0], more, half))
    if chunked:
        trials.append(Trial(rows[0], lengths[0], more, half + max(1, few // 8)))
    return trials


class _Simulated:
    """Simulates the steps of one model at several shapes: `shapes` is (numbers of rows, lengths in tokens), `depth` the
    number of layers, None for the config's own."""

    def __init__(
        self, spec: RunSpec, facts: dict[str, Any], depth: int | None, shapes: tuple[list[int], list[int]]
    ) -> None:
        self.spec, self.shapes, train = spec, shapes, spec.recipe.train
        self.device = SimulatedDevice.of(spec.profile.device)
        self.loaded: LoadedModel = on_meta(spec, self.device, facts if depth is None else at_depth(facts, depth))
        self.depth = depth
        with self.device.simulating(packed=spec.recipe.data.packing), simulated_dropout(spec.profile.device.kind):
            leave_meta(self.loaded.model)
            head = find_head(self.loaded.base)
            chosen = choose_implementation(train.loss, head, train.label_smoothing, self.device).name
            self.loss = LossFunction(self.loaded, head, chosen, train.label_smoothing, 1)
            self.loss.offload.on = train.activation_offload
            self.guard = guarded_optimizer(train, self.loaded, self.device)
            self.held = static_components(self.loaded, None if self.guard.host_state.on else self.guard.optimizer)
            state = [tensor for _, tensor in state_tensors(self.guard.optimizer, self.loaded.trainable())]
            self.host = {"optimizer": bytes_of(state)} if self.guard.host_state.on else {}
            self.series = PhaseSeries(self.device, self.loaded.base, lambda: bytes_of(gradients_of(self.loaded)))
            self.dropouts = keyed_dropouts(self.loaded.model)
            self._run()

    def document(self) -> dict[str, Any]:
        """The results of the simulation as a dict, sizes in bytes: static memory and offloaded optimizer state by
        component, gradients, the peak of the optimizer step, the coefficients of the levels by kind of pass and phase,
        and those of generation (None if the recipe generates nothing)."""
        return {
            "static": self.held,
            "host": self.host,
            "gradients": self.gradients,
            "update": self.update,
            "passes": self.passes,
            "generate": self.generated,
        }

    def _run(self) -> None:
        chunks = self.loss.implementation in CHUNKED and has_chunks(self.spec)
        several = _trials(self.shapes, chunked=True) if chunks else []
        single = _trials(self.shapes, chunked=False)
        taken: dict[str, list[tuple[dict[str, list[int]], dict[str, int]]]] = {}
        for trial in single:
            self.loaded.model.zero_grad(set_to_none=True)
            taken.setdefault("first", []).append(self._step(trial))
            taken.setdefault("later", []).append(self._step(trial))
        self.gradients = bytes_of(gradients_of(self.loaded))
        for trial in several:
            taken.setdefault("chunked", []).append(self._step(trial))
        self.update = self._optimizer_step()
        self.loaded.model.zero_grad(set_to_none=True)
        self.loaded.model.eval()
        with torch.no_grad():
            if evaluates(self.spec.recipe):
                taken["evaluate"] = [self._evaluation(trial) for trial in single]
                if chunks:
                    taken["evaluate_chunked"] = [self._evaluation(trial) for trial in several]
            self.generated = self._generation() if generates(self.spec.recipe) else None
        self.passes = {
            name: _curves(found, several if name.endswith("chunked") else single, self.depth is not None)
            for name, found in taken.items()
        }

    def _step(self, trial: Trial) -> tuple[dict[str, list[int]], dict[str, int]]:
        """Run a micro-batch forward and backward; returns its levels in bytes, and the bytes of gradients when each
        phase began, both by phase."""
        gc.collect(0)
        self.loss.chunk_tokens = trial.chunk
        batch = self._batch(trial)
        self.series.enter(EMBEDDING)
        with keyed(self.dropouts, seed=0, step=1, sample_ids=batch.sample_ids):
            total = self.loss(batch) / trial.targets
            with self.device.backward():
                total.backward()
        self.loss.offload.settle()
        return self.series.take()

    def _evaluation(self, trial: Trial) -> tuple[dict[str, list[int]], dict[str, int]]:
        gc.collect(0)
        self.loss.chunk_tokens = trial.chunk
        batch = self._batch(trial)
        self.series.enter(EMBEDDING)
        self.loss(batch)
        return self.series.take()

    def _optimizer_step(self) -> int:
        """Run gradient clipping and the optimizer step; returns their peak in bytes."""
        self.series.enter("optimizer_step")
        clip_gradients(self.spec.recipe.train.max_grad_norm, self.loaded)
        self.guard.host_state.make_room()
        self.guard.update.make_room()
        if not self.guard.never_allocates:  # a fused step allocates nothing, and its kernel rejects fake tensors
            self.guard.host_state.step(lambda: self.guard.update.step(1))
        self.guard.accept()
        return max(self.series.take()[0]["optimizer_step"])

    def _generation(self) -> list[float]:
        """Simulate the generation of answers; returns the coefficients of its peak in bytes: fixed, per row, per prompt
        token and per row × prompt length²."""
        rows, lengths = self.shapes
        shapes = [(1, lengths[0]), (rows[0], lengths[0]), (rows[0], lengths[1]), (rows[0], lengths[2])]
        peaks = []
        for count, prompt in shapes:
            gc.collect(0)
            generate = self.spec.recipe.generate
            simulate_generation(self.device, self.loaded, generate, self.series, rows=count, prompt=prompt)
            peaks.append(max(self.series.take()[0]["generate"]))
        units = np.array([(1, count, count * prompt, count * prompt**2) for count, prompt in shapes], dtype=float)
        return [float(each) for each in np.linalg.solve(units, np.array(peaks, dtype=float))]

    def _batch(self, trial: Trial) -> Batch:
        with self.device.host_region():
            ids = torch.zeros((trial.rows, trial.length), dtype=torch.int64)
            positions = torch.zeros_like(ids) if self.spec.recipe.data.packing else None
        batch = Batch(ids, ids, None, positions, tuple(range(trial.rows)), trial.targets)
        return replace(batch.moved(self.device.upload), labels_BS=self.device.upload(ids))


def _curves(
    found: list[tuple[dict[str, list[int]], dict[str, int]]], trials: list[Trial], ends_only: bool
) -> dict[str, dict[str, Any]]:
    """Fit the allocated bytes of each phase as a function of a micro-batch's size, from simulations of several sizes.

    Returns {phase of a plan: {"gradients": bytes of gradients when it begins, "sizes": float[levels, units]}}: a level
    is the allocated bytes at one moment of the phase, its row the factors of the units (`units_of` a size: rows,
    tokens, …) that add up to it. `found` has (levels, gradient bytes), both by recorded phase, of the simulation of
    each of `trials`. `_phases` says which recorded phases a plan's phase consists of, and what `ends_only` leaves
    out."""
    units = np.array([units_of(*trial) for trial in trials], dtype=float)
    if len(trials) < len(UNITS):  # one chunk: its targets are all targets
        units = units[:, :-1]
    layers = 1 + max(int(phase.split()[1]) for phase in found[0][0] if phase.startswith("forward"))
    curves: dict[str, dict[str, Any]] = {}
    for name, phases in _phases(list(found[0][0]), layers, ends_only):
        series = [[level for phase in phases for level in levels[phase]] for levels, _ in found]
        if len({len(each) for each in series}) > 1:
            series = [[max(each)] for each in series]
        made = np.linalg.solve(units, np.array(series, dtype=float))
        sizes = np.vstack([made, np.zeros((len(UNITS) - len(made), made.shape[1]))]).T
        curves[name] = {"gradients": found[0][1][phases[-1]], "sizes": sizes}
    return curves


def _phases(recorded: list[str], layers: int, ends_only: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each phase of a plan with the recorded phases that it consists of. With `ends_only`, which suits a model
    whose layers are all alike, only the last layer's forward pass and the first and last layer's backward pass are
    included: these have the peak."""
    last = layers - 1
    forward = [EMBEDDING, *(f"forward {n}" for n in range(layers) if n == last or not ends_only)]
    between = [f"backward {n}" for n in range(last - 1, 0, -1) if not ends_only]
    parts = {
        "forward": forward,
        "loss_backward": ["loss_backward"],
        "layer_first": [f"backward {last}", *between],
        "layer_last": ["backward 0"],
        "embedding_backward": ["embedding_backward"],
    }
    for name, phases in parts.items():
        there = [phase for phase in phases if phase in recorded]
        if there:
            yield name, there


def _continued(shallow: dict[str, Any], deep: dict[str, Any], depth: int) -> dict[str, Any]:
    """Extrapolate two documents (`_Simulated.document`) linearly to a model of `depth` layers: `shallow` is of a model
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


def _that_decide(sizes: Levels) -> Levels:
    """Return those levels of a phase that can be its peak: the ones that are highest for at least one shape of a grid
    of micro-batches. A level is the allocated bytes after one allocation; `sizes` and the result have its coefficients,
    shape (levels, units)."""
    lengths = [2**power for power in range(3, 19)]
    grid = [
        units_of(rows, length, max(1, int(share * rows * length)), max(1, min(int(share * rows * length), chunk)))
        for rows in (1, 2, 3, 4, 8, 16, 32, 64, 256, 1024)
        for length in lengths
        for share in (0.02, 0.2, 0.6, 1.0)
        for chunk in (128, 4096, 1 << 40)
    ]
    best = np.unique((np.array(grid, dtype=float) @ sizes.T).argmax(axis=1))
    chosen: Levels = sizes[best]
    return chosen
