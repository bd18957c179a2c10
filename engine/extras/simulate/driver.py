"""Drives the engine's own model, adapters, loss, checkpointing, clipping and optimizer on tensors without data.

A recorder (`engine.extras.simulate.recorders`) sees each phase. As on the metered device, workspace that an operation
allocates internally is not counted, except attention's backward pass on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Generic, TypeVar

import torch
from transformers import AutoConfig, Cache, DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from engine.architecture.continued import find_adapter
from engine.architecture.lookup import added_tokens, find_config, with_added_tokens
from engine.budget.trace.memory_config import resolved_dtype, resolved_loss
from engine.config.schema.run import RunSpec
from engine.device.allocation_tracker import bytes_of
from engine.evaluate.generation import generate_tokens, generation_config, sampling
from engine.extras.simulate.batch import RowImages, StepShape, batch_of
from engine.extras.simulate.device import SimulatedDevice, simulated_dropout
from engine.extras.simulate.fake_tensors import Assumed, experts_of
from engine.extras.simulate.recorders import EMBEDDING, GENERATE, PhaseRecorder
from engine.model.attention import attention_by_part
from engine.model.config import auto_class
from engine.model.dropout import keyed, keyed_dropouts
from engine.model.expert_balance import expert_balance
from engine.model.head import find_head
from engine.model.liger import OutlineKernels, using
from engine.model.load import LoadedModel, assemble, choose_settings, fuse_modules
from engine.model.loaded import tile_mlps
from engine.model.loss import LossFunction, choose_implementation
from engine.model.reference import StartingWeights
from engine.model.token_rows import grow_embedding
from engine.model.trained import embedding_rows
from engine.train.step.optimizer import guarded_optimizer
from engine.train.step.optimizer_state import state_tensors

PAD_ID, END_ID = 0, 1
"""Ids of the padding token and the end token. They are arbitrary, because simulated tokens have no values."""
SIMULATED_TOKENS = 4
"""How many tokens of an answer are simulated: the first two and the last two. The tokens in between are skipped."""

Recorder = TypeVar("Recorder", bound=PhaseRecorder)
MakeRecorder = Callable[[SimulatedDevice, PreTrainedModel, Callable[[], int]], Recorder]
"""Creates a recorder from the device, the base model, and a function that counts the bytes of gradients."""


@contextmanager
def simulated_run(
    spec: RunSpec,
    record: MakeRecorder[Recorder],
    facts: dict[str, Any] | None = None,
    row_images: RowImages | None = None,
    assumed: Assumed | None = None,
) -> Iterator[SimulatedRun[Recorder]]:
    """Create the model of a run, from the config `facts` if given, with its loss and optimizer; yields what drives
    them. Each row begins with `row_images`. Inside the block, all tensors are simulated; `assumed`: of sizes that
    depend on values."""
    device = SimulatedDevice.of(spec.profile.device)
    if assumed is not None:
        device.settle(assumed, experts_of(facts or find_config(spec.recipe.model.id, spec.recipe.model.revision)))
    loaded = on_meta(spec, device, facts)
    fuse_modules(loaded, spec)  # not below: it computes with values
    tile_mlps(loaded, spec.recipe)
    kind, packed = spec.profile.device.kind, spec.recipe.data.packing
    try:
        with device.simulating(packed=packed), simulated_dropout(kind), using(OutlineKernels()):
            leave_meta(loaded.model)
            if row_images is not None:
                device.read_images()
            yield SimulatedRun(spec, device, loaded, record, row_images)
    finally:
        if loaded.fused is not None:
            loaded.fused.remove()


class SimulatedRun(Generic[Recorder]):
    """A run's model, loss and optimizer on a simulated device."""

    def __init__(
        self,
        spec: RunSpec,
        device: SimulatedDevice,
        loaded: LoadedModel,
        record: MakeRecorder[Recorder],
        row_images: RowImages | None,
    ) -> None:
        self.spec, self.device, self.loaded, train = spec, device, loaded, spec.recipe.train
        self.row_images = row_images
        self.head = find_head(loaded.base)
        if resolved_loss(spec) == "liger" and self.head.linear is not None:
            implementation = "liger"
        else:
            implementation = choose_implementation(train.loss, self.head, train.label_smoothing, device)
        self.loss = LossFunction(loaded, self.head, implementation, train.label_smoothing, 1)
        self.loss.offload.on = train.activation_offload
        self.loss.balance = expert_balance(spec.recipe, loaded)
        self.guard = guarded_optimizer(train, loaded, device)
        self.static_bytes = device.memory().allocated_bytes
        self.recorder = record(device, loaded.base, self.gradient_bytes)
        self._dropouts = keyed_dropouts(loaded.model)

    def static_components(self) -> dict[str, int]:
        """Return the device bytes that remain allocated throughout a step, by component."""
        trainable = self.loaded.trainable()
        adapters = [parameter for name, parameter in trainable if "lora_" in name or "trainable_tokens" in name]
        return {
            "weights": bytes_of(self.loaded.model.parameters()) - bytes_of(adapters),
            "adapters": bytes_of(adapters),
            "optimizer": 0 if self.guard.host_state.on else self._state_bytes(),
        }

    def host_components(self) -> dict[str, int]:
        """Return the bytes of offloaded optimizer state; empty if it is on the device."""
        return {"optimizer": self._state_bytes()} if self.guard.host_state.on else {}

    def _state_bytes(self) -> int:
        return bytes_of(tensor for _, tensor in state_tensors(self.guard.optimizer, self.loaded.trainable()))

    def make_gradients(self, *, without: Collection[torch.Tensor] = ()) -> int:
        """Give every trained parameter a new gradient, except those in `without`; returns the device bytes that all of
        them take."""
        self.loaded.model.zero_grad(set_to_none=True)
        before_bytes, left_out = self.device.memory().allocated_bytes, set(map(id, without))
        for _, parameter in self.loaded.trainable():
            if id(parameter) not in left_out:
                parameter.grad = torch.empty_like(parameter)
        return self.device.memory().allocated_bytes - before_bytes

    def gradient_bytes(self) -> int:
        return bytes_of(self._gradients())

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for _, parameter in self.loaded.trainable() if parameter.grad is not None]

    def micro_batch(self, shape: StepShape) -> None:
        """Run a micro-batch forward and backward; gradients are added to those that exist."""
        balanced = self.loss.balance is not None
        batch = batch_of(self.spec, self.device, shape, self.row_images, with_row_tokens=balanced)
        self.loss.chunk_tokens = shape.chunk
        self.recorder.enter(EMBEDDING)
        with keyed(self._dropouts, seed=0, step=1, sample_ids=batch.sample_ids):
            total = self.loss.minimised(self.loss.terms(batch).share_of(shape.targets, shape.rows * shape.length))
            with self.device.backward():
                total.backward()
                self.loss.offload.settle()
        self.recorder.leave()

    def optimizer_step(self) -> None:
        """Clip the gradients and update the weights."""
        self.recorder.enter("optimizer_step")
        most = self.spec.recipe.train.max_grad_norm
        if most:
            norm = torch.nn.utils.get_total_norm(self._gradients())
            torch.nn.utils.clip_grads_with_norm_([p for _, p in self.loaded.trainable()], most, norm)
            del norm
        self.guard.host_state.make_room()
        self.guard.update.make_room()
        if not self.guard.never_allocates:  # a fused step allocates nothing, and its kernel rejects fake tensors
            self.guard.host_state.step(lambda: self.guard.update.step(1))
        self.guard.accept()
        self.recorder.leave()

    def end_training(self) -> None:
        """Free the gradients and switch the model to evaluation."""
        self.loaded.model.zero_grad(set_to_none=True)
        self.loaded.model.eval()

    def evaluate(self, shape: StepShape) -> None:
        """Compute the loss of a micro-batch without gradients."""
        batch = batch_of(self.spec, self.device, shape, self.row_images)
        self.loss.chunk_tokens = shape.chunk
        self.recorder.enter(EMBEDDING)
        with torch.no_grad():
            self.loss(batch)
        self.recorder.leave()

    def generate(self, *, rows: int, prompt: int) -> None:
        """Generate `rows` answers of full length to prompts of `prompt` tokens, with a key-value cache.

        An answer takes a pass through the model per token, and memory grows with the cache: only the first and the last
        tokens are simulated; in between, the cache is extended without running the model.
        """
        tokens = self.spec.recipe.generate.max_new_tokens
        cache = DynamicCache(config=self.loaded.base.config.get_text_config(decoder=True))
        skips = tokens > SIMULATED_TOKENS
        with torch.no_grad():
            for length, count in ((prompt, 2), (prompt + tokens - 2, 2)) if skips else ((prompt, tokens),):
                if length > prompt:
                    _lengthen(cache, length - 1)
                self._generate_tokens(cache, rows, length, count)

    def _generate_tokens(self, cache: Cache, rows: int, length: int, count: int) -> None:
        device, settings, images = self.device, self.spec.recipe.generate, dict[str, torch.Tensor]()
        with device.host_region():
            ids_BS, mask_BS = (torch.empty((rows, length), dtype=torch.int64) for _ in range(2))
            if self.row_images is not None:
                mask_BS = torch.ones((rows, length), dtype=torch.int64)  # with values: a model counts what it keeps
                mask_BS[0, 0] = 0  # rows of different lengths
            if self.row_images is not None and not cache.get_seq_length():
                ids_BS, images = self.row_images.batch(rows, length, rows, first=1)
        ids_BS, mask_BS = device.upload(ids_BS), device.upload(mask_BS)
        seen = {name: device.upload(tensor) for name, tensor in images.items()}
        self.recorder.enter(GENERATE)
        with _generate_exactly(self.loaded.base, count), device.unequal_rows():
            config = generation_config(settings, END_ID, PAD_ID)
            processors = LogitsProcessorList(sampling(settings, range(rows), length, device))
            given: dict[str, Any] = {"past_key_values": cache, "logits_processor": processors, **seen}
            generate_tokens(self.loaded, ids_BS, mask_BS, config, **given)
        self.recorder.leave()


def on_meta(spec: RunSpec, device: SimulatedDevice, facts: dict[str, Any] | None = None) -> LoadedModel:
    """Create the model with its adapters on the meta device, from the config `facts`, by default that of the recipe's
    model. peft cannot create adapters as fake tensors, so `leave_meta` later replaces the tensors by fake ones."""
    model = spec.recipe.model.model_copy(update={"dtype": resolved_dtype(spec)})
    spec = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"model": model})})
    facts = deepcopy(facts or find_config(model.id, model.revision))  # transformers fills in nested configs in place
    config = AutoConfig.for_model(str(facts["model_type"]), **{k: v for k, v in facts.items() if k != "model_type"})
    adapter = find_adapter(model)
    start = StartingWeights(model.id, model.revision, None if adapter is None else str(adapter.folder))
    settings = choose_settings(spec, start, config, device)
    attention = attention_by_part(settings.config, settings.attention.name)
    options = {"dtype": settings.precision.weights, "attn_implementation": attention}
    with torch.device("meta"):
        base = auto_class(config).from_config(settings.config, **options)
        ids = _grow(base, spec)
        return assemble(spec, settings, base, device, ids)


def _grow(base: PreTrainedModel, spec: RunSpec) -> list[int]:
    """Give a model on the meta device the rows of added tokens; returns ids that stand for theirs."""
    tokens = added_tokens(spec.recipe.model)
    if not tokens:
        return []
    facts = with_added_tokens({"vocab_size": embedding_rows(base)}, spec.recipe.model)
    grow_embedding(base, int(facts["vocab_size"]))
    return list(range(embedding_rows(base) - len(tokens), embedding_rows(base)))


def leave_meta(model: torch.nn.Module) -> None:
    """Replace the tensors of a model on the meta device by fake CPU tensors; tied weights remain tied."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    shared = _modules_met_again(model)
    for parent, name, _ in shared:  # torch would replace their tensors twice, and refuses
        parent._modules[name] = None
    model.to_empty(device="cpu")
    for parent, name, module in shared:
        parent._modules[name] = module
    for (module, name), *others in places.values():
        for other, its_name in others:
            setattr(other, its_name, getattr(module, name))


def _modules_met_again(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """(parent, name, module) of every further place of a module that has several: peft's rows of a tied embedding."""
    seen: set[int] = set()
    found = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if id(child) in seen:
                found.append((parent, name, child))
            seen.add(id(child))
    return found


@contextmanager
def _generate_exactly(base: torch.nn.Module, count: int) -> Iterator[None]:
    """Inside the block, transformers generates exactly `count` tokens; fake tokens have no values that could end a
    row."""
    left = iter(range(count))
    base.__dict__["_has_unfinished_sequences"] = lambda *_, **__: next(left, None) is not None
    try:
        yield
    finally:
        del base.__dict__["_has_unfinished_sequences"]


def _lengthen(cache: Cache, length: int) -> None:
    """Lengthen the KV cache to `length` tokens; in layers with a sliding window, only to the size of the window. Layers
    with a state of one size, and layers without images to attend to (Mllama), stay as they are."""
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or not layer.is_initialized or layer.keys is None:
            continue
        extra = length - layer.get_seq_length()
        keys, values = (old.new_empty((*old.shape[:-2], extra, old.shape[-1])) for old in _keys_and_values(layer))
        layer.update(keys, values)
        if layer.is_sliding:  # copy the window: it is a view of a storage longer than in any real run
            layer.keys, layer.values = (made.clone() for made in _keys_and_values(layer))


def _keys_and_values(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values
