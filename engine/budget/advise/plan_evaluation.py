"""Plans the evaluation of a run's checkpoints after training, in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.architecture.lookup import find_facts
from engine.budget.advise.plan import make_plan
from engine.budget.predict.inference import GENERATION_ROWS, cache_bytes, evaluation, generation_bytes
from engine.budget.predict.non_torch_memory import non_torch_memory
from engine.budget.predict.parallel_layout import on_one_device
from engine.budget.predict.static import static_bytes
from engine.budget.trace.memory_config import for_rows, memory_config_of
from engine.budget.trace.polynomial import highest_value, shape_of
from engine.config.schema.run import RunSpec

OF_TEXT = ("exact_match", "accuracy", "token_f1", "rouge", "box_iou", "detection_rate")
"""Metrics of `evaluate.metrics` for which answers are generated."""


@dataclass(frozen=True)
class EvaluationPlan:
    """The predicted memory of `tunedeck eval` on one device, in bytes."""

    capacity_bytes: int
    phases: dict[str, dict[str, int]]
    """Bytes by component of each phase: load, evaluate, and generate if answers are generated."""
    device_bytes: int
    """In use at the peak: tensors, workspaces, fragmentation, and the CUDA context beyond the profile's reserve."""
    length: int
    """Tokens of the longest sequence; prompts are assumed to be as long."""
    evaluate_rows: int
    """Sequences per forward pass of the loss at the start of the evaluation."""
    generate_rows: int
    """Answers generated at once at the start of the evaluation; 0 if none are generated."""
    cache_bytes: int
    """Key-value cache of these answers at their last token; part of the activations."""

    @property
    def deciding_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.capacity_bytes

    def as_json(self) -> dict[str, Any]:
        """As `tunedeck plan --eval --json` prints it."""
        return {"verdict": "fits" if self.fits else "does_not_fit", "deciding_phase": self.deciding_phase,
                **asdict(self)}  # fmt: skip


def plan_evaluation(spec: RunSpec) -> EvaluationPlan:
    """Plan the evaluation of a run's checkpoints after training. Raises the errors of `make_plan`, and
    UnknownArchitectureError for a family without a memory formula, which is not simulated here."""
    spec = on_one_device(spec)
    facts = find_facts(spec.recipe.model)
    arch = facts.require_architecture()  # first: a family without a closed form is refused, not simulated
    planned = make_plan(spec, facts=facts)
    config, outside = memory_config_of(arch, spec), non_torch_memory(spec)
    held = static_bytes(arch, config).total
    weights = {"weights": held.weights, "adapters": held.adapters}
    shape = shape_of(planned.micro_batch, planned.length, config.chunk_tokens)
    loss_bytes = highest_value(evaluation(arch, for_rows(arch, config, planned.micro_batch)), shape)
    phases = {"load": weights, "evaluate": {**weights, "activations": loss_bytes}}
    room_bytes = outside.room_bytes(planned.capacity_bytes) - held.weights - held.adapters
    rows, generate = 0, spec.recipe.generate
    if generates_answers(spec):
        rows = min(GENERATION_ROWS, spec.recipe.evaluate.limit or GENERATION_ROWS)
        while rows > 1 and room_bytes < generation_bytes(
            arch, config, rows=rows, prompt=planned.length, generate=generate
        ):
            rows //= 2
        needed = generation_bytes(arch, config, rows=rows, prompt=planned.length, generate=generate)
        phases["generate"] = {**weights, "activations": needed}
    peak_bytes = max(sum(parts.values()) for parts in phases.values())
    return EvaluationPlan(
        capacity_bytes=planned.capacity_bytes,
        phases=phases,
        device_bytes=peak_bytes + outside.total(peak_bytes),
        length=planned.length,
        evaluate_rows=planned.micro_batch,
        generate_rows=rows,
        cache_bytes=rows * cache_bytes(arch, config, planned.length + generate.max_new_tokens),
    )


def generates_answers(spec: RunSpec) -> bool:
    """Whether `tunedeck eval` generates answers: for scores of text, or samples to read."""
    asked = spec.recipe.evaluate
    return bool({*asked.metrics, *spec.recipe.eval.metrics} & set(OF_TEXT)) or asked.log_samples > 0
