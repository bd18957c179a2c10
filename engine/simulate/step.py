"""Simulates one optimizer step with the engine's own model, adapters, loss, checkpointing, clipping and optimizer, and
the evaluation and generation that follow it in the recipe.

All layers are simulated (about 0.1 s each), so nothing is assumed about which layer has the peak. As on the metered
device, workspace that an operation allocates internally is not counted, except attention's backward pass on CUDA.

Try: `tunedeck plan -p 80gb -r lora --set model.id=Qwen/Qwen2.5-7B --exact`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig

from engine.budget.architecture.facts import from_config
from engine.budget.architecture.lookup import find_architecture, find_config
from engine.budget.architecture.vision_encoder import VISION_ENCODERS
from engine.budget.predict.inference import evaluates, generates, most_answers
from engine.budget.predict.prediction import Predictor
from engine.budget.trace.layer_kinds import layer_stack
from engine.budget.trace.memory_config import chunk_tokens, image_patches, memory_config_of, resolved_dtype
from engine.data.batch import Batch
from engine.device.allocation_tracker import bytes_of
from engine.errors import UnknownArchitectureError, UsageError
from engine.model.config import auto_class
from engine.model.dropout import keyed, keyed_dropouts
from engine.model.expert_balance import expert_balance
from engine.model.head import find_head
from engine.model.load import LoadedModel, assemble, choose_settings
from engine.model.loss import LossFunction, choose_implementation
from engine.model.reference import StartingWeights
from engine.simulate.device import SimulatedDevice
from engine.simulate.dropout import simulated_dropout
from engine.simulate.generate import simulate_generation
from engine.simulate.images import images_of
from engine.simulate.phase_peaks import PhasePeaks
from engine.spec.check.images import image_key
from engine.spec.schema.run import RunSpec
from engine.train.step.optimizer import guarded_optimizer
from engine.train.step.optimizer_state import state_tensors


@dataclass(frozen=True)
class Simulation:
    """The result of a simulated step: peak bytes by phase, and the bytes that remain allocated throughout."""

    phases: dict[str, dict[str, int]]
    """Bytes by phase and component, named as in a plan. Gradients are those at the beginning of the phase; activations
    are the rest of the phase's peak."""
    static_bytes: int

    @property
    def sums(self) -> dict[str, int]:
        """Peak bytes of each phase, the sum over its components."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the whole step."""
        return max(self.sums.values())

    @property
    def deciding_phase(self) -> str:
        """Name of the phase with the highest peak."""
        sums = self.sums
        return max(sums, key=sums.__getitem__)

    @property
    def components(self) -> dict[str, int]:
        """Bytes by component in the deciding phase; their sum is the peak."""
        return self.phases[self.deciding_phase]


def simulate_step(spec: RunSpec, *, rows: int, length: int) -> Simulation:
    """Simulate a step of two micro-batches (or one, for a smaller batch) of `rows` sequences of `length` tokens.

    If the recipe evaluates, an evaluation of `rows` sequences is simulated, too; if the recipe generates answers, so is
    the generation of answers to prompts of `length` tokens. All tokens but one are targets of the loss.

    Raises:
        UsageError: a 4-bit base, which needs CUDA kernels; sequence parallelism; an invalid config of the model.
    """
    if spec.recipe.model.quantize != "none":
        raise UsageError("a 4-bit base cannot be simulated", fix="leave --exact out: the closed form knows it")
    if spec.profile.parallel.sequence > 1:
        raise UsageError(
            "sequence parallelism cannot be simulated on one device",
            fix="leave --exact out: the closed form knows what each rank holds",
        )
    device = SimulatedDevice.of(spec.profile.device)
    loaded = on_meta(spec, device)
    with device.simulating(packed=spec.recipe.data.packing), simulated_dropout(spec.profile.device.kind):
        return _run(spec, device, loaded, rows, length)


def on_meta(spec: RunSpec, device: SimulatedDevice, facts: dict[str, Any] | None = None) -> LoadedModel:
    """Create the model with its adapters on the meta device, from the config `facts`, by default that of the recipe's
    model. `leave_meta` later replaces its tensors by fake tensors.

    peft cannot create adapters as fake tensors directly.
    """
    model = spec.recipe.model.model_copy(update={"dtype": resolved_dtype(spec)})
    spec = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"model": model})})
    facts = facts or find_config(model.id, model.revision)
    config = AutoConfig.for_model(str(facts["model_type"]), **{k: v for k, v in facts.items() if k != "model_type"})
    settings = choose_settings(spec, StartingWeights(model.id, model.revision, None), config, device)
    options = {"dtype": settings.precision.weights, "attn_implementation": settings.attention.name}
    with torch.device("meta"):
        return assemble(spec, settings, auto_class(config).from_config(settings.config, **options), device)


def _run(spec: RunSpec, device: SimulatedDevice, loaded: LoadedModel, rows: int, length: int) -> Simulation:
    train = spec.recipe.train
    leave_meta(loaded.model)
    head = find_head(loaded.base)
    implementation = choose_implementation(train.loss, head, train.label_smoothing, device).name
    chunk = chunk_tokens(head.vocabulary, spec.profile.device.capacity_bytes)
    loss = LossFunction(loaded, head, implementation, train.label_smoothing, chunk)
    loss.offload.on = train.activation_offload
    loss.balance = expert_balance(spec.recipe, loaded)
    guard = guarded_optimizer(train, loaded, device)
    static_bytes = device.memory().allocated_bytes
    held = static_components(loaded, None if guard.host_state.on else guard.optimizer)
    peaks = PhasePeaks(device, loaded.base, lambda: bytes_of(gradients_of(loaded)), _ends(spec))
    dropouts = keyed_dropouts(loaded.model)
    for _ in range(min(2, -(-train.batch_size // rows))):
        batch = _batch(spec, device, rows, length, with_row_tokens=loss.balance is not None)
        peaks.enter("forward")
        with keyed(dropouts, seed=0, step=1, sample_ids=batch.sample_ids):
            total = loss.minimised(loss.terms(batch).share_of(rows * length, rows * length))
            with device.backward():
                total.backward()
                loss.offload.settle()
        peaks.leave()
        del total, batch
    peaks.enter("optimizer_step")
    clip_gradients(train.max_grad_norm, loaded)
    guard.host_state.make_room()
    guard.update.make_room()
    if not guard.never_allocates:  # a fused step allocates nothing, and its kernel rejects fake tensors
        guard.host_state.step(lambda: guard.update.step(1))
    guard.accept()
    peaks.leave()
    if evaluates(spec.recipe):
        loaded.model.zero_grad(set_to_none=True)
        loaded.model.eval()
        batch = _batch(spec, device, rows, length)
        peaks.enter("evaluate")
        with torch.no_grad():
            loss(batch)
        peaks.leave()
        del batch
    if generates(spec.recipe):
        with torch.no_grad():
            answers = _answers_at_once(spec, length)
            simulate_generation(device, loaded, spec.recipe.generate, peaks, rows=answers, prompt=length)
    return Simulation({phase: _row(held, *found) for phase, found in peaks.by_phase.items()}, static_bytes)


def leave_meta(model: torch.nn.Module) -> None:
    """Replace the tensors of a model on the meta device by fake CPU tensors; tied weights remain tied."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device="cpu")
    for (module, name), *others in places.values():
        for other, its_name in others:
            setattr(other, its_name, getattr(module, name))


def _answers_at_once(spec: RunSpec, length: int) -> int:
    """Return how many answers the plan of the recipe generates at once for prompts of `length` tokens; the largest
    number allowed if the architecture is unknown."""
    try:
        return Predictor(find_architecture(spec), spec).generation_rows(length)
    except UnknownArchitectureError:
        return most_answers(spec.recipe)


def _ends(spec: RunSpec) -> dict[int, str]:
    """Map layer numbers to the phase that a plan names after the layer's backward pass ("layer_first", "layer_last");
    the other layers need no more memory and have no phase. Empty for an unknown architecture."""
    try:
        arch = find_architecture(spec)
    except UnknownArchitectureError:
        return {}
    setting = memory_config_of(arch, spec)
    return layer_stack(arch, setting).ends(checkpointed=setting.checkpointing)


def gradients_of(loaded: LoadedModel) -> list[torch.Tensor]:
    return [parameter.grad for _, parameter in loaded.trainable() if parameter.grad is not None]


def clip_gradients(max_grad_norm: float, loaded: LoadedModel) -> None:
    """Clip the gradients of `loaded` to the norm `max_grad_norm`, as the engine does before an optimizer step."""
    if max_grad_norm:
        norm = torch.nn.utils.get_total_norm(gradients_of(loaded))
        torch.nn.utils.clip_grads_with_norm_([p for _, p in loaded.trainable()], max_grad_norm, norm)


def static_components(loaded: LoadedModel, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the bytes that remain allocated throughout a step, by component; if `optimizer` is None, optimizer state
    counts as 0."""
    trainable = loaded.trainable()
    adapters = [parameter for name, parameter in trainable if "lora_" in name]
    return {
        "weights": bytes_of(loaded.model.parameters()) - bytes_of(adapters),
        "adapters": bytes_of(adapters),
        "optimizer": bytes_of(tensor for _, tensor in state_tensors(optimizer, trainable)) if optimizer else 0,
    }


def _row(held: dict[str, int], peak_bytes: int, gradient_bytes: int) -> dict[str, int]:
    """Return one phase's peak by component, in bytes. `held` has the static components; what is left of `peak_bytes`
    after these and `gradient_bytes` counts as activations."""
    rest = peak_bytes - sum(held.values()) - gradient_bytes
    return {**held, "gradients": gradient_bytes, "activations": max(0, rest)}


def _batch(
    spec: RunSpec, device: SimulatedDevice, rows: int, length: int, *, with_row_tokens: bool = False
) -> Batch:
    facts = find_config(spec.recipe.model.id, spec.recipe.model.revision)
    with device.host_region():
        ids = torch.zeros((rows, length), dtype=torch.int64)
        positions = torch.zeros((rows, length), dtype=torch.int64) if spec.recipe.data.packing else None
        images = _images(spec, facts, rows, length)
        tokens = torch.full((rows,), length) if with_row_tokens else None
    targets = rows * (length - 1) - 1
    batch = Batch(ids, ids.clone(), None, positions, tuple(range(rows)), targets, images, row_tokens_B=tokens)
    return replace(batch.moved(device.upload), labels_BS=device.upload(ids))


def _images(spec: RunSpec, facts: dict[str, Any], rows: int, length: int) -> dict[str, torch.Tensor]:
    """Create the image inputs of a batch of `rows` rows of `length` tokens for the model with the config `facts`; empty
    if the recipe has no images or the budget does not know the vision encoder."""
    if image_key(spec.recipe) is None or facts.get("model_type") not in VISION_ENCODERS:
        return {}
    arch = from_config(facts)
    patches = image_patches(arch, spec.recipe)
    return images_of(arch.vision_encoder, patches, rows, length) if arch.vision_encoder else {}
