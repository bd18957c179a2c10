"""Plans a run: the micro-batch to start with, the verdict, and the prediction they are based on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.architecture.facts import Architecture
from engine.architecture.lookup import ModelFacts, find_facts
from engine.budget.advise.auto_settings import Choice, choice_of, choose, numbers_of_layers
from engine.budget.advise.plan_time import PlanTime, plan_time
from engine.budget.predict.non_torch_memory import host_capacity_bytes
from engine.budget.predict.parallel_layout import NetworkTraffic, network_traffic
from engine.budget.predict.prediction import Prediction, Predictor, in_whole_samples
from engine.budget.predict.recompute import recomputed_layers
from engine.budget.predict.simulated import SimulatedPredictor, simulated_predictor
from engine.budget.trace.memory_config import MemoryConfig, why_whole
from engine.config.files.caches import SequenceBounds, known_bounds
from engine.config.schema.run import RunSpec
from engine.errors import UnknownArchitectureError

Verdict = Literal["fits", "fits_smaller", "does_not_fit"]
"""fits_smaller: only a smaller micro-batch, or a remedy that leaves learning unchanged, fits. does_not_fit: one
sequence with every such remedy exceeds capacity."""


ERROR_SHARE = 0.01
"""By how much a peak may exceed its prediction (`tests/budget/capacity_runs.py` allows as much)."""


@dataclass(frozen=True)
class Plan:
    """The predicted memory of a run, and its division of the batch into micro-batches."""

    verdict: Verdict
    capacity_bytes: int
    prediction: Prediction
    micro_batch: int
    accumulation: int
    length: int
    """Tokens of the sequences that the run is planned for."""
    basis: Literal["data", "max_length"]
    """Whether `length` is that of the longest sequence, or data.max_length because the data are unknown."""
    row_targets: int | None
    """Most target tokens of one sequence; None: unknown, so that the plan counts every token as one."""
    config: MemoryConfig
    simulated: bool
    ranks: int
    """Devices of the run; all bytes are those of one device."""
    image_tokens: int
    """Of the image that each sequence is planned with; 0 for text alone."""
    remedies: dict[str, Any]
    """By recipe key: values with which a run of verdict fits_smaller fits; empty for other verdicts."""
    host: dict[str, int] = field(default_factory=dict)
    """Of offloads on the host of one machine, by what is offloaded (activations, optimizer)."""
    host_capacity_bytes: int = 0
    """Host memory of one machine: the profile's value, else that of the machine that plans."""
    generation_rows: int = 0
    """Answers that an evaluation during training generates at once; 0 if none are generated."""
    parallel: str = ""
    """`provenance.parallel`: how strategy and sequence were decided, and which keys of the profile were replaced."""
    network: NetworkTraffic | None = None
    """Between machines; None for a run on one machine."""
    learning_rate: float | None = None
    """The peak: the recipe's, or the default of its method."""
    layers: int | None = None
    """Decoder layers of the model; None if no memory formula knows them."""
    recomputed_layers: int | None = None
    """How many of them recompute their activations in backward; None if no memory formula knows them."""
    considered: tuple[Choice, ...] = ()
    """The settings that "auto" was chosen from, the best first."""
    time: PlanTime | None = None
    """None where nothing is known of the device's speed, or no memory formula knows the model."""
    simulated_seconds: float | None = None
    """Duration of the simulation that the prediction is based on; None for a memory formula."""
    why_whole: str | None = None
    """Why it ran all layers, where one of a kind could not stand for others."""
    assumed: str | None = None
    """What it assumed of sizes that depend on values, as a sentence; None of nothing."""

    @property
    def predictor(self) -> Literal["closed_form", "simulated"]:
        return "closed_form" if self.simulated_seconds is None else "simulated"

    @property
    def checkpointing(self) -> bool | int:
        """`train.gradient_checkpointing` as planned, without "auto"."""
        if self.layers is None or self.recomputed_layers is None:
            return self.config.checkpointing
        some = 0 < self.recomputed_layers < self.layers
        return self.recomputed_layers if some else self.recomputed_layers > 0

    @property
    def peak_bytes(self) -> int:
        return self.prediction.peak_bytes

    @property
    def margin_bytes(self) -> int:
        """Negative if the run does not fit."""
        return self.capacity_bytes - self.prediction.device_bytes

    @property
    def is_tight(self) -> bool:
        """Whether the run fits, with less left than the prediction may be wrong by."""
        return self.verdict == "fits" and 0 <= self.margin_bytes < ERROR_SHARE * self.prediction.device_bytes

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def host_fits(self) -> bool:
        """True if nothing is offloaded."""
        return not self.host or self.host_bytes <= self.host_capacity_bytes

    @property
    def target_tokens(self) -> int:
        """Most tokens of one sequence that are planned as targets."""
        return self.length if self.row_targets is None else min(self.length, self.row_targets)

    @property
    def tokens_per_micro_batch(self) -> int:
        """Of one micro-batch at the longest length, padding included."""
        return self.micro_batch * self.length

    @property
    def generate_adds_bytes(self) -> int:
        """By which generation during training raises the peak; 0 if it needs less memory than the optimizer steps."""
        sums = {name: sum(row.values()) for name, row in self.prediction.phases.items()}
        return max(0, sums.pop("generate", 0) - max(sums.values()))

    def as_json(self) -> dict[str, Any]:
        """The content of plan.json, and what `tunedeck plan --json` prints."""
        return {
            "verdict": self.verdict,
            "capacity_bytes": self.capacity_bytes,
            "peak_bytes": self.peak_bytes,
            "device_bytes": self.prediction.device_bytes,
            "margin_bytes": self.margin_bytes,
            "deciding_phase": self.prediction.deciding_phase,
            "components": self.prediction.components,
            "reserved_context_bytes": self.prediction.reserved_context_bytes,
            "host_bytes": self.host_bytes,
            "host_components": self.host,
            "host_capacity_bytes": self.host_capacity_bytes,
            "phases": self.prediction.phases,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "tokens_per_micro_batch": self.tokens_per_micro_batch,
            "length": self.length,
            "basis": self.basis,
            "target_tokens": self.target_tokens,
            "generate_adds_bytes": self.generate_adds_bytes,
            "generation_rows": self.generation_rows,
            "remedies": self.remedies,
            "learning_rate": self.learning_rate,
            "layers": self.layers,
            "recomputed_layers": self.recomputed_layers,
            "time": self.time.as_json() if self.time else None,
            "ranks": self.ranks,
            "parallel": self.parallel,
            "network": self.network.as_json(self.accumulation) if self.network else None,
            "image_tokens": self.image_tokens,
            "predicted_only": self.ranks > 1,
            "predictor": self.predictor,
            "simulated_seconds": self.simulated_seconds,
            "assumed": self.assumed,
        }


def make_plan(spec: RunSpec, *, known: SequenceBounds | None = None, facts: ModelFacts | None = None) -> Plan:
    """Plan a run on data of which `known` is known: by default what is recorded if they were read before, else that no
    sequence is longer than data.max_length. `facts`: what is known of its model, if that was found before.

    Raises EnvironmentProblem or UsageError when the model's architecture cannot be found or is unknown, and
    NotSimulatedError where a simulation is needed first (`engine.launch.other_processes.with_simulations`).
    """
    known = known or known_bounds(spec.recipe)
    length, row_targets = known or SequenceBounds(spec.recipe.data.max_length)
    predictor, asked = find_predictor(spec, facts, row_targets), spec.recipe.train.micro_batch
    most = _largest_that_fits(predictor, length) if asked == "auto" else min(asked, predictor.batch)
    rows = max(1, in_whole_samples(spec.recipe, most))
    considered: list[Choice] = []
    if isinstance(predictor, Predictor) and spec.recipe.train.gradient_checkpointing == "auto":
        considered = choose(predictor, length, rows, fixed_rows=asked != "auto")
        rows, predictor = considered[0].rows, predictor.recomputing(considered[0].layers)
    prediction = predictor.predict(rows, length)
    verdict, remedies = _verdict(predictor, spec, prediction, rows, length, facts)
    arch, machines = predictor.arch, spec.profile.nodes.count
    return Plan(
        verdict=verdict,
        capacity_bytes=predictor.capacity_bytes,
        prediction=prediction,
        micro_batch=rows,
        accumulation=-(-predictor.batch // rows),
        length=length,
        basis="data" if known else "max_length",
        row_targets=row_targets,
        config=predictor.config,
        simulated=spec.profile.device.kind == "metered",
        ranks=predictor.layout.ranks,
        image_tokens=_image_tokens(predictor),
        remedies=remedies,
        host=predictor.host(rows, length),
        host_capacity_bytes=host_capacity_bytes(spec.profile),
        generation_rows=predictor.generation_rows(length) if "generate" in prediction.phases else 0,
        parallel=spec.provenance.parallel,
        learning_rate=spec.recipe.train.learning_rate,
        layers=arch.layers if arch is not None else None,
        recomputed_layers=recomputed_layers(arch, predictor.config) if arch is not None else None,
        considered=tuple(considered),
        time=_time(predictor, spec, rows, length),
        network=network_traffic(arch, predictor.config, predictor.layout, machines) if arch is not None else None,
        simulated_seconds=predictor.seconds if isinstance(predictor, SimulatedPredictor) else None,
        why_whole=predictor.why_whole if isinstance(predictor, SimulatedPredictor) else None,
        assumed=predictor.assumed if isinstance(predictor, SimulatedPredictor) else None,
    )


def _time(predictor: Predictor | SimulatedPredictor, spec: RunSpec, rows: int, length: int) -> PlanTime | None:
    if isinstance(predictor, SimulatedPredictor):
        return None
    return plan_time(predictor, spec, rows, length, recomputed_layers(predictor.arch, predictor.config))


def considered(spec: RunSpec, plan: Plan, facts: ModelFacts | None = None) -> list[Choice]:
    """Micro-batches and numbers of recomputing layers, of which the planned one is one, the fastest first. Empty for a
    family without a memory formula."""
    predictor = find_predictor(spec, facts, plan.row_targets)
    if isinstance(predictor, SimulatedPredictor) or plan.recomputed_layers is None:
        return []
    if spec.recipe.train.micro_batch == "auto":
        largest = max(1, _largest_that_fits(predictor.recomputing(predictor.arch.layers), plan.length))
        found = choose(predictor, plan.length, largest, fixed_rows=False, every=True)
    else:
        found = numbers_of_layers(predictor, plan.length, plan.micro_batch)
    planned = choice_of(predictor, plan.length, plan.micro_batch, plan.recomputed_layers)
    return sorted({*found, planned}, key=lambda choice: choice.seconds)


def _image_tokens(predictor: Predictor | SimulatedPredictor) -> int:
    if isinstance(predictor, SimulatedPredictor):
        return predictor.image_tokens
    encoder = predictor.arch.vision_encoder
    return predictor.config.image_patches // encoder.merge**2 if encoder else 0


def find_predictor(
    spec: RunSpec, facts: ModelFacts | None = None, row_targets: int | None = None
) -> Predictor | SimulatedPredictor:
    """The predictor of a run: the memory formula of its model's family, else a simulation. `row_targets`: as in
    `Predictor`. Raises the errors of `make_plan`."""
    try:
        return Predictor((facts or find_facts(spec.recipe.model)).require_architecture(), spec, row_targets)
    except UnknownArchitectureError as unknown:
        return simulated_predictor(spec, unknown, row_targets)


def _largest_that_fits(predictor: Predictor | SimulatedPredictor, length: int) -> int:
    """The most sequences of `length` tokens, at most the batch, that fit as one micro-batch; 0 if none does. Offloads
    must fit on the host, too, unless it cannot hold those of one sequence."""
    limited = predictor.host_fits(1, length)

    def fits(rows: int) -> bool:
        return predictor.fits(rows, length) and (not limited or predictor.host_fits(rows, length))

    # The whole batch as one micro-batch has no earlier gradients beside it, so it may fit where a smaller one does not.
    if fits(predictor.batch):
        return predictor.batch
    low, high = 0, predictor.batch - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return in_whole_samples(predictor.recipe, low)


def _verdict(
    planner: Predictor | SimulatedPredictor,
    spec: RunSpec,
    planned: Prediction,
    rows: int,
    length: int,
    facts: ModelFacts | None,
) -> tuple[Verdict, dict[str, Any]]:
    """The verdict and, for "fits_smaller", the cheapest remedies (recipe key to value). `planned`: the prediction for
    micro-batches of `rows` sequences of `length` tokens."""
    if planned.device_bytes <= spec.profile.device.capacity_bytes:
        return "fits", {}
    for changes in _remedies(spec, planner.arch):
        if rows == 1 and not changes:
            continue  # planned already
        changed = _with_train(spec, changes)
        remedied = (
            Predictor(planner.arch, changed, planner.row_targets)
            if planner.arch is not None
            else find_predictor(changed, facts, planner.row_targets)
        )
        most = _largest_that_fits(remedied, length)
        if most and remedied.host_fits(most, length):
            # A number in the recipe is a limit: remedies do not raise it.
            most = most if spec.recipe.train.micro_batch == "auto" else min(most, rows)
            return "fits_smaller", {f"train.{key}": value for key, value in {**changes, "micro_batch": most}.items()}
    return "does_not_fit", {}


def remedies(spec: RunSpec) -> Iterator[RunSpec]:
    """The run spec, then copies with one remedy more each, cheapest first. They do not change the training result."""
    return (_with_train(spec, changes) for changes in _remedies(spec, None))


def _remedies(spec: RunSpec, arch: Architecture | None) -> Iterator[dict[str, Any]]:
    """Changes of the recipe's train table: none, then with one remedy more each, cheapest first. `arch` None: not
    known."""
    changes: dict[str, Any] = {}
    yield {}
    if not recomputes_all(spec.recipe.train.gradient_checkpointing):
        changes["gradient_checkpointing"] = True
        yield dict(changes)
    if spec.recipe.train.loss == "plain":
        changes["loss"] = "chunked"
        yield dict(changes)
    if may_tile(spec, arch):
        changes["mlp_tiles"] = PLANNED_TILES
        yield dict(changes)
    if not spec.recipe.train.activation_offload and spec.profile.device.kind != "cpu":
        changes["activation_offload"] = True
        yield dict(changes)
    if not spec.recipe.train.optimizer_offload and spec.profile.device.kind != "cpu":
        changes["optimizer_offload"] = True
        yield dict(changes)


def recomputes_all(checkpointing: bool | int | str) -> bool:
    """Whether a value of `train.gradient_checkpointing` lets all layers recompute if memory asks for it."""
    return checkpointing is True or checkpointing == "auto"


PLANNED_TILES = 8
"""Pieces of a feed-forward block in a remedy: what lives in a block of 3.5 times its input's width is then as large as
the block's input and its gradient."""


def may_tile(spec: RunSpec, arch: Architecture | None) -> bool:
    """Whether a run may compute its feed-forward blocks in PLANNED_TILES pieces, and does not yet."""
    train = spec.recipe.train
    return train.mlp_tiles < PLANNED_TILES and not train.compile and not (arch and why_whole(arch, spec))


def _with_train(spec: RunSpec, changes: dict[str, Any]) -> RunSpec:
    """The copy is not checked."""
    train = spec.recipe.train.model_copy(update=changes)
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"train": train})})
