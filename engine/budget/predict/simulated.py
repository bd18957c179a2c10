"""Predicts the memory of model families without a memory formula, from a simulation of their steps.

A process that may import torch simulates a run's step at a few shapes (`engine.extras.simulate.curves`) and writes the
results to the cache folder; the file's name is a hash of everything that they depend on. `SimulatedPredictor` reads
them and has the methods of `engine.budget.predict.prediction.Predictor`. Nothing here starts a simulation: if one is
missing, NotSimulatedError is raised, and `engine.launch.other_processes` runs the simulation.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.architecture.continued import find_adapter
from engine.architecture.facts import Architecture
from engine.architecture.lookup import find_config, start_of
from engine.budget.predict.inference import evaluates, generates, most_answers
from engine.budget.predict.non_torch_memory import host_capacity_bytes, non_torch_memory
from engine.budget.predict.parallel_layout import layout_of
from engine.budget.predict.prediction import COMPONENTS, Prediction, most_targets
from engine.budget.predict.shapes import MicroBatchShape
from engine.budget.trace.memory_config import MemoryConfig, fused_kernels, memory_config_of, resolved_loss
from engine.config.check.data_rules import image_key
from engine.config.files.caches import cache_folder, known_images
from engine.config.files.machine import installed
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import RunSpec
from engine.errors import AdapterError, NotSimulatedError, UnknownArchitectureError

FORMAT = 9
"""Version of the stored files; a change makes older files unused."""
UNITS = (
    "one", "rows", "length", "tokens", "rows x length^2", "length^2", "images", "images^2", "targets", "chunk",
)  # fmt: skip
"""The terms of a level: its coefficients are multiplied by their values (`units_of`) and added up to bytes."""
WINDOWS = ("sliding_window", "attention_window_size", "attention_chunk_size", "window_size")
"""Keys of a config with the number of tokens that a layer looks back; longer sequences run other operations."""
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "kernels")
MODEL_KEYS = {"dtype", "attention", "attention_dropout", "quantize"}
TRAIN_KEYS = {
    "loss", "gradient_checkpointing", "mlp_tiles", "activation_offload", "optimizer_offload", "optimizer", "rounding",
    "state_dtype",
}  # fmt: skip

ASSUMED = {
    "masks": "sizes that depend on the tokens are at their maximum: no token is left out",
    "routing": "sizes that depend on a router are at their maximum: all tokens go to the same experts",
}
"""What a plan says of the assumptions of `engine.extras.simulate.fake_tensors`."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json")


def units_of(rows: int, length: int, targets: int, chunk: int, images: float = 0) -> tuple[float, ...]:
    """The values of UNITS for a micro-batch of `rows` sequences padded to `length` tokens, of which `targets` count in
    the loss; the loss is computed for `chunk` targets at a time. `images` is in those of the largest row."""
    return 1, rows, length, rows * length, rows * length**2, length**2, images, images**2, targets, chunk


def shortest_window(facts: Mapping[str, Any]) -> int:
    """The smallest window in tokens of the model with the config `facts`; 0 if none is stated."""
    text = facts.get("text_config") or facts
    return min([int(text[key]) for key in WINDOWS if isinstance(text.get(key), int)], default=0)


def simulation_key(spec: RunSpec) -> str:
    """A hash, in hexadecimal, of everything that a simulation of this run depends on: runs with the same key share a
    simulation."""
    recipe, train = spec.recipe, spec.recipe.train
    model = recipe.model
    chosen = train.model_dump(mode="json", include=TRAIN_KEYS)
    if train.gradient_checkpointing == "auto":
        chosen["gradient_checkpointing"] = True  # what "auto" is planned as
    settings = {
        "model": model.model_dump(mode="json", include=MODEL_KEYS),
        "method": recipe.method.model_dump(mode="json"),
        "moe": recipe.moe.model_dump(mode="json"),
        "train": chosen,
        "switches": [train.label_smoothing > 0, train.momentum > 0, train.max_grad_norm > 0, recipe.data.packing],
        "evaluates": evaluates(recipe),
        "generate": recipe.generate.model_dump(mode="json") if generates(recipe) else None,
        "device": [spec.profile.device.kind, spec.profile.device.compute_capability],
        "images": _images(recipe),
        "fused": fused_kernels(spec),
        "loss": resolved_loss(spec),
    }
    facts = find_config(model.id, model.revision)
    reached = 0 < shortest_window(facts) < recipe.data.max_length
    adapter = find_adapter(model)
    continued = [] if adapter is None else [str(adapter.folder), dict(adapter.config), sorted(adapter.shapes.items())]
    parts = [FORMAT, [installed(name) for name in PACKAGES], facts, reached, settings, continued]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _images(recipe: Recipe) -> list[Any]:
    """What decides the images of a simulated row; empty for a run without images."""
    data, model = recipe.data, recipe.model
    if image_key(recipe) is None:
        return []
    known = known_images(recipe)
    bounds = [data.image_min_pixels, data.image_max_pixels]
    places = [where for where in (start_of(model.id, model.revision)[0], model.tokenizer) if where is not None]
    files = [(name, _text(place, name)) for place in places for name in PROCESSOR_FILES]
    return [known, None if known else data.max_length, bounds, places, files]


def _text(place: str, name: str) -> str | None:
    """The content of a file of a model's folder; None if `place` is a hub id, or the folder has no such file."""
    try:
        return Path(place, name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def simulation_file(spec: RunSpec) -> Path:
    """The path of the file with a run's simulation, whether or not it exists."""
    return cache_folder() / "simulations" / f"{simulation_key(spec)}.json"


def keep_simulation(spec: RunSpec, document: Mapping[str, Any]) -> None:
    """Write the simulation of a run, as `simulate_curves` returns it, to `simulation_file(spec)`, whole or not at
    all."""
    path = simulation_file(spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        json.dump(document, file)
    os.replace(temporary, path)


def refuse_simulation(spec: RunSpec, unknown: UnknownArchitectureError) -> None:
    """Raise `unknown`, extended by the reason, for a run that cannot be simulated: with a 4-bit base, or on several
    devices."""
    obstacle = ""
    if spec.recipe.model.quantize != "none":
        obstacle = "a 4-bit base needs kernels of a GPU"
    elif layout_of(spec.profile).ranks > 1:
        obstacle = "a simulation has one device"
    if obstacle:
        raise UnknownArchitectureError(
            f"{unknown.found}, and the run cannot be simulated: {obstacle}", expected=unknown.expected, fix=unknown.fix
        )


def simulated_predictor(
    spec: RunSpec, unknown: UnknownArchitectureError, row_targets: int | None = None
) -> SimulatedPredictor:
    """The predictor of a run whose model family has no memory formula. `unknown` is the error that said so; its text is
    part of the errors raised here. `row_targets`: as in `Predictor`.

    Raises:
        NotSimulatedError: no simulation of this run is kept on this machine.
        AdapterError: the adapter that the run continues does not fit its model.
        UnknownArchitectureError: the run cannot be simulated, or its simulation refused it or failed, with the reason.
    """
    refuse_simulation(spec, unknown)
    document = _read(simulation_file(spec))
    if document is None:
        raise NotSimulatedError(spec)
    if "adapter" in document:
        raise AdapterError(**document["adapter"])
    if "refused" in document:
        raise UnknownArchitectureError(**document["refused"])
    if "problem" in document:
        raise UnknownArchitectureError(f"{unknown.found}, and the simulation failed: {document['problem']}")
    return SimulatedPredictor(spec, document, row_targets)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return _parse(path, path.stat().st_mtime_ns)
    except (OSError, ValueError):
        return None  # never made, or damaged: it is made again


@lru_cache(maxsize=64)
def _parse(path: Path, _changed: int) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return parsed


@dataclass(frozen=True)
class SimulatedCostModel:
    """The micro-batch cost of a simulated family; see `engine.budget.predict.prediction.CostModel`."""

    predictor: SimulatedPredictor
    known: dict[tuple[int, int], int] = field(default_factory=dict)
    """Cache that maps (rows, length) to bytes, because a run asks for the same shapes in every step."""

    def bytes(self, rows: int, length: int, patches: int | None = None) -> int:
        """Bytes above the static bytes at the peak of a micro-batch of `rows` sequences padded to `length` tokens, with
        images of `patches` tokens in all; None: each sequence has the images of the one that has most."""
        if patches is not None:
            return self._computed(rows, length, patches)
        shape = rows, length
        if shape not in self.known:
            self.known[shape] = self._computed(rows, length, None)
        return self.known[shape]

    def _computed(self, rows: int, length: int, patches: int | None) -> int:
        predictor = self.predictor
        accumulating = predictor.batch > 1
        phases = predictor.step_phases(MicroBatchShape(rows, length, None, accumulating, patches))
        peak_bytes = max(sum(row.values()) for row in phases.values())
        return max(0, peak_bytes - predictor.static_bytes)


class SimulatedPredictor:
    """Predictions for micro-batches of one run, computed from the document that `simulate_curves` returned.
    `row_targets`: as in `Predictor`."""

    simulated = True
    arch: Architecture | None = None

    def __init__(self, spec: RunSpec, document: Mapping[str, Any], row_targets: int | None = None) -> None:
        self.row_targets = row_targets
        self.recipe, self.layout = spec.recipe, layout_of(spec.profile)
        self.config: MemoryConfig = memory_config_of(_outline(spec), spec)
        self.batch = spec.recipe.sequences_per_step
        self.capacity_bytes = spec.profile.device.capacity_bytes
        self.seconds = float(document["seconds"])
        """How long the simulation took."""
        self.why_whole: str | None = document["why_whole"]
        """Why one layer of a kind could not stand for others, so that all were run; None where it could."""
        self.assumed: str | None = ASSUMED.get(document["assumed"])
        """What was assumed of sizes that depend on values, as a sentence; None of nothing."""
        self._static: dict[str, int] = document["static"]
        self._document = document
        self._profile = spec.profile
        self._non_torch = non_torch_memory(spec)

    @property
    def image_tokens(self) -> int:
        """Tokens for parts of the images with which simulated rows began; 0 without images."""
        return int(self._document["image_tokens"])

    @property
    def static_bytes(self) -> int:
        """Bytes that are held throughout: weights, adapters and optimizer state."""
        return sum(self._static.values())

    @property
    def cost_model(self) -> SimulatedCostModel:
        """The cost model of the run's micro-batches."""
        return SimulatedCostModel(self)

    def host(self, rows: int, length: int) -> dict[str, int]:
        """Bytes of offloaded optimizer state on the host of one machine, by what is offloaded; the same for every
        shape. What offloaded activations take is not simulated."""
        return dict(self._document["host"])

    def host_fits(self, rows: int, length: int) -> bool:
        """Whether the host's memory holds the offloaded optimizer state; the same for every shape."""
        return sum(self.host(rows, length).values()) <= host_capacity_bytes(self._profile)

    def fits(self, rows: int, length: int) -> bool:
        """Whether the predicted peak for `rows` sequences of `length` tokens is within the device's capacity."""
        return self.predict(rows, length).device_bytes <= self.capacity_bytes

    def predict(self, rows: int, length: int) -> Prediction:
        """Predict all phases for a micro-batch of `rows` sequences padded to `length` tokens, with as many targets as
        there may be."""
        return self.predict_shape(MicroBatchShape(rows, length))

    def predict_shape(self, micro_batch: MicroBatchShape) -> Prediction:
        """Predict the memory of every phase for a micro-batch of this shape."""
        weights = {name: self._static[name] for name in ("weights", "adapters")}
        phases = {"load": weights} | self.step_phases(micro_batch)
        if evaluates(self.recipe):
            peaks = self._peaks("evaluate", micro_batch)
            phases["evaluate"] = self._row(max(peaks.values()), 0)
        if generates(self.recipe):
            rows = self.generation_rows(micro_batch.length)
            phases["generate"] = self._row(self._generation(rows, micro_batch.length), 0)
        sums = {phase: sum(parts.values()) for phase, parts in phases.items()}
        deciding = max(sums, key=sums.__getitem__)
        components = dict.fromkeys(COMPONENTS, 0) | phases[deciding] | self._non_torch.components(sums[deciding])
        used_bytes, reserved = sum(components.values()), self._non_torch.reserved_context_bytes
        return Prediction(phases, sums[deciding], deciding, components, used_bytes, reserved)

    def step_phases(self, micro_batch: MicroBatchShape) -> dict[str, dict[str, int]]:
        """Bytes of each phase of a step with micro-batches of this shape, by component."""
        accumulating = micro_batch.accumulating
        if accumulating is None:
            accumulating = micro_batch.rows < self.batch
        phases = {}
        name = "later" if accumulating else "first"
        curves = self._document["passes"][name]
        for phase, peak_bytes in self._peaks(name, micro_batch).items():
            phases[phase] = self._row(peak_bytes, int(curves[phase]["gradients"]))
        phases["optimizer_step"] = self._row(int(self._document["update"]), int(self._document["gradients"]))
        return phases

    def generation_rows(self, length: int) -> int:
        """How many answers to prompts of `length` tokens the engine generates at once: as many as the recipe asks for,
        halved until they fit into the capacity."""
        rows = most_answers(self.recipe)
        room_bytes = self._non_torch.room_bytes(self.capacity_bytes)
        while rows > 1 and self._generation(rows, length) > room_bytes:
            rows //= 2
        return rows

    def _peaks(self, name: str, micro_batch: MicroBatchShape) -> dict[str, int]:
        """The peak of each phase of a pass, in bytes. Layers with a state pad a sequence to whole periods; the pass was
        simulated at whole ones, at those that lack all tokens but one, between which padding is proportional, and
        within one."""
        rows, length, *_ = micro_batch
        targets = micro_batch.targets
        if targets is None:
            known = most_targets(rows, length, self.row_targets, self.layout)
            targets = rows * length if known is None else known
        images = rows if self.image_tokens else 0  # every row as the largest: smaller images are not told apart yet
        units = units_of(rows, length, targets, min(targets, self.config.chunk_tokens), images)
        period = int(self._document["period"])
        short = length <= period and name in self._document["short"]
        lacking = 0.0 if short else -length % period / max(1, period - 1)
        found = {}
        for phase, curve in self._document["short" if short else "passes"][name].items():
            found[phase] = max(_value(size, units) for size in curve["sizes"])
            if lacking:
                padded = max(_value(size, units) for size in self._document["padded"][name][phase]["sizes"])
                found[phase] += lacking * (padded - found[phase])
        return {phase: round(peak) for phase, peak in found.items()}

    def _generation(self, rows: int, prompt: int) -> int:
        units = (1, rows, rows * prompt, rows * prompt**2)
        return round(_value(self._document["generate"], units))

    def _row(self, peak_bytes: int, gradient_bytes: int) -> dict[str, int]:
        """Split the peak of a phase by component, in bytes; bytes that are neither static nor gradients count as
        activations."""
        rest = max(0, peak_bytes - self.static_bytes - gradient_bytes)
        static = self._static
        row = {"weights": static["weights"], "adapters": static["adapters"], "gradients": gradient_bytes}
        return row | {"optimizer": static["optimizer"], "activations": rest}


def _value(coefficients: Sequence[float], units: Sequence[float]) -> float:
    return sum([each * unit for each, unit in zip(coefficients, units, strict=True)])


def _outline(spec: RunSpec) -> Architecture:
    """For a `MemoryConfig` of which only what comes from the recipe is read: only the vocabulary size is real."""
    return Architecture("unknown", "llama", _vocabulary(spec), 64, 64, 1, 1, 1, 64, False, "silu")


def _vocabulary(spec: RunSpec) -> int:
    facts = find_config(spec.recipe.model.id, spec.recipe.model.revision)
    return int((facts.get("text_config") or facts).get("vocab_size") or 32_000)
