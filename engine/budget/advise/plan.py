"""Plans a run: the micro-batch to start with, the verdict, and the memory prediction they are based on.

Verdicts: fits, fits_smaller (only a smaller micro-batch or a remedy that leaves learning unchanged fits),
does_not_fit (one sequence with every such remedy exceeds capacity).

Try: `tunedeck plan -p 24gb -r lora`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.budget.architecture.lookup import find_architecture
from engine.budget.predict.host_memory import host_capacity_bytes
from engine.budget.predict.network import NetworkTraffic, network_traffic
from engine.budget.predict.prediction import Prediction, Predictor
from engine.budget.predict.simulated import SimulatedPredictor, simulated_predictor
from engine.budget.trace.memory_config import MemoryConfig
from engine.errors import UnknownArchitectureError
from engine.spec.files.known_lengths import known_longest
from engine.spec.schema.run import RunSpec

Verdict = Literal["fits", "fits_smaller", "does_not_fit"]


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
    """Whether `length` is that of the longest sequence of the data, or data.max_length because the data are unknown."""
    config: MemoryConfig
    simulated: bool
    ranks: int
    """Number of devices of the run; all bytes are those of one device."""
    image_tokens: int
    """Tokens of the image that each sequence is planned with; 0 for text alone."""
    remedies: dict[str, Any]
    """Maps recipe keys to the values with which a run of verdict fits_smaller fits, without changing what is learned;
    empty for other verdicts."""
    host: dict[str, int] = field(default_factory=dict)
    """Bytes that offloads take on the host of one machine, by what is offloaded (activations, optimizer)."""
    host_capacity_bytes: int = 0
    """Bytes of host memory of one machine: the profile's value, else that of the machine that plans."""
    generation_rows: int = 0
    """Answers that an evaluation during training generates at once; 0 if none are generated."""
    parallel: str = ""
    """The text `provenance.parallel` of the run spec: how strategy and sequence were decided, and which keys of the
    profile were replaced."""
    network: NetworkTraffic | None = None
    """Bytes that cross the network between machines; None for a run on one machine."""
    simulated_seconds: float | None = None
    """Duration of the simulation that the prediction is based on; None for a closed form."""

    @property
    def predictor(self) -> Literal["closed_form", "simulated"]:
        """How the prediction was computed: by the closed form of the model's family, or from a simulation."""
        return "closed_form" if self.simulated_seconds is None else "simulated"

    @property
    def peak_bytes(self) -> int:
        """Bytes that torch allocates at the peak."""
        return self.prediction.peak_bytes

    @property
    def margin_bytes(self) -> int:
        """Bytes of capacity left at the peak; negative if the run does not fit."""
        return self.capacity_bytes - self.prediction.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that all offloads take on the host of one machine."""
        return sum(self.host.values())

    @property
    def host_fits(self) -> bool:
        """Whether the host's memory holds what is offloaded; True if nothing is."""
        return not self.host or self.host_bytes <= self.host_capacity_bytes

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of one micro-batch at the longest length, padding included."""
        return self.micro_batch * self.length

    @property
    def generate_adds_bytes(self) -> int:
        """Bytes by which generation during training raises the peak; 0 if nothing is generated, or if generation needs
        less memory than the optimizer steps."""
        sums = {name: sum(row.values()) for name, row in self.prediction.phases.items()}
        return max(0, sums.pop("generate", 0) - max(sums.values()))

    def as_json(self) -> dict[str, Any]:
        """The plan as a JSON object: the content of plan.json, and what `tunedeck plan --json` prints."""
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
            "generate_adds_bytes": self.generate_adds_bytes,
            "generation_rows": self.generation_rows,
            "remedies": self.remedies,
            "ranks": self.ranks,
            "parallel": self.parallel,
            "network": self.network.as_json(self.accumulation) if self.network else None,
            "image_tokens": self.image_tokens,
            "predicted_only": self.ranks > 1,
            "predictor": self.predictor,
            "simulated_seconds": self.simulated_seconds,
        }


def make_plan(spec: RunSpec, *, longest: int | None = None) -> Plan:
    """Plan a run for sequences of up to `longest` tokens: by default those of the data if they were read before, else
    data.max_length.

    Raises EnvironmentProblem or UsageError when the model's architecture cannot be found or is not known, and
    NotSimulatedError where a simulation is needed first (`engine.launch.simulation.with_simulations`).
    """
    known = longest or known_longest(spec.recipe)
    length = known or spec.recipe.data.max_length
    predictor, asked = find_predictor(spec), spec.recipe.train.micro_batch
    rows = max(1, _largest_that_fits(predictor, length)) if asked == "auto" else min(asked, predictor.batch)
    prediction = predictor.predict(rows, length)
    verdict, remedies = _verdict(predictor, spec, prediction, rows, length)
    arch, machines = predictor.arch, spec.profile.nodes.count
    encoder = arch.vision_encoder if arch is not None else None
    return Plan(
        verdict=verdict,
        capacity_bytes=predictor.capacity_bytes,
        prediction=prediction,
        micro_batch=rows,
        accumulation=-(-predictor.batch // rows),
        length=length,
        basis="data" if known else "max_length",
        config=predictor.config,
        simulated=spec.profile.device.kind == "metered",
        ranks=predictor.layout.ranks,
        image_tokens=predictor.config.image_patches // encoder.merge**2 if encoder else 0,
        remedies=remedies,
        host=predictor.host(rows, length),
        host_capacity_bytes=host_capacity_bytes(spec.profile),
        generation_rows=predictor.generation_rows(length) if "generate" in prediction.phases else 0,
        parallel=spec.provenance.parallel,
        network=network_traffic(arch, predictor.config, predictor.layout, machines) if arch is not None else None,
        simulated_seconds=predictor.seconds if isinstance(predictor, SimulatedPredictor) else None,
    )


def find_predictor(spec: RunSpec) -> Predictor | SimulatedPredictor:
    """The predictor of a run: the closed form of its model's family, else a simulation. Raises the errors of
    `make_plan`."""
    try:
        return Predictor(find_architecture(spec), spec)
    except UnknownArchitectureError as unknown:
        return simulated_predictor(spec, unknown)


def _largest_that_fits(predictor: Predictor | SimulatedPredictor, length: int) -> int:
    """The largest number of sequences of `length` tokens, at most the batch, that fit on the device as one micro-batch;
    0 if not even one does.

    Tensors that are offloaded must fit on the host, too. This condition is dropped if the host cannot hold those of one
    sequence.
    """
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
    return low


def _verdict(
    planner: Predictor | SimulatedPredictor, spec: RunSpec, planned: Prediction, rows: int, length: int
) -> tuple[Verdict, dict[str, Any]]:
    """Return the verdict and, for "fits_smaller", the cheapest remedies with which the run fits: recipe keys with their
    values, empty for other verdicts. `planned` is the prediction for micro-batches of `rows` sequences of `length`
    tokens."""
    if planned.device_bytes <= spec.profile.device.capacity_bytes:
        return "fits", {}
    for changes in _remedies(spec):
        if rows == 1 and not changes:
            continue  # planned already
        changed = _with_train(spec, changes)
        remedied = Predictor(planner.arch, changed) if planner.arch is not None else find_predictor(changed)
        most = _largest_that_fits(remedied, length)
        if most and remedied.host_fits(most, length):
            # A number in the recipe is a limit: remedies do not raise it.
            most = most if spec.recipe.train.micro_batch == "auto" else min(most, rows)
            return "fits_smaller", {f"train.{key}": value for key, value in {**changes, "micro_batch": most}.items()}
    return "does_not_fit", {}


def remedies(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield the run spec itself, then copies of it, each with one remedy more than the one before, cheapest first. The
    remedies do not change what is learned."""
    return (_with_train(spec, changes) for changes in _remedies(spec))


def _remedies(spec: RunSpec) -> Iterator[dict[str, Any]]:
    """Yield changes of the recipe's train table (key to value): first none, then each with one remedy more than the one
    before, cheapest first."""
    changes: dict[str, Any] = {}
    yield {}
    if not spec.recipe.train.gradient_checkpointing:
        changes["gradient_checkpointing"] = True
        yield dict(changes)
    if spec.recipe.train.loss == "plain":
        changes["loss"] = "chunked"
        yield dict(changes)
    if not spec.recipe.train.activation_offload and spec.profile.device.kind != "cpu":
        changes["activation_offload"] = True
        yield dict(changes)
    if not spec.recipe.train.optimizer_offload and spec.profile.device.kind != "cpu":
        changes["optimizer_offload"] = True
        yield dict(changes)


def _with_train(spec: RunSpec, changes: dict[str, Any]) -> RunSpec:
    """A copy of the run spec in which keys of the recipe's train table have the values in `changes`; the copy is not
    checked."""
    train = spec.recipe.train.model_copy(update=changes)
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"train": train})})
