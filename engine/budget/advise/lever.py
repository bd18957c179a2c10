"""Names the recipe change that lowers the peak of a plan, shown beside the deciding phase.

Sets of changes that make a run fit, and their costs, are searched in `engine.budget.advise.fit`.

Try: `tunedeck plan -p 24gb -r full`
"""

from __future__ import annotations

from engine.budget.advise.plan import Plan
from engine.spec.schema.run import RunSpec


def lever_of(plan: Plan, spec: RunSpec) -> str:
    """The change, as text, that lowers the largest component of the peak.

    It lowers weights only if they alone exceed capacity, or if adapters or buffers are the largest other component.
    """
    row = plan.prediction.phases[plan.prediction.deciding_phase]
    if plan.prediction.deciding_phase == "generate":
        return "eval.samples = 0 without exact_match, or a lower generate.max_new_tokens"
    movable = {name: size for name, size in row.items() if name != "weights"}
    largest = max(movable, key=movable.__getitem__)
    if row["weights"] > plan.capacity_bytes or largest in ("adapters", "buffers"):
        return _of_weights(spec)
    if largest == "optimizer":
        return _of_optimizer(spec)
    if largest == "gradients":
        return 'method.kind = "lora"' if spec.recipe.method.kind == "full" else "a lower method.rank"
    return _of_activations(plan, spec, largest)


def _of_weights(spec: RunSpec) -> str:
    quantizable = spec.recipe.method.kind == "lora" and spec.recipe.model.quantize == "none"
    if quantizable and spec.profile.device.kind == "cuda":
        return 'model.quantize = "nf4", or a smaller model.id'
    return "a smaller model.id, or several devices that share it"


def _of_optimizer(spec: RunSpec) -> str:
    train, cuda = spec.recipe.train, spec.profile.device.kind == "cuda"
    if train.optimizer == "adamw" and cuda and train.state_dtype == "float32":
        return 'train.optimizer = "adamw_8bit", or train.optimizer_offload = true'
    if not train.optimizer_offload and spec.profile.device.kind != "cpu":
        return "train.optimizer_offload = true"
    return 'method.kind = "lora"' if spec.recipe.method.kind == "full" else "a lower method.rank"


def _of_activations(plan: Plan, spec: RunSpec, component: str) -> str:
    train = spec.recipe.train
    if component == "loss" and train.loss == "plain":
        return 'train.loss = "auto"'
    if component != "loss" and not train.gradient_checkpointing:
        return "train.gradient_checkpointing = true"
    if plan.micro_batch > 1:
        return f"train.micro_batch below {plan.micro_batch}"
    return f"data.max_length below {plan.length}"
