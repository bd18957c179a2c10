"""The models of a chat: which weights each target names, and how they are loaded. Adapters, and the base that they were
trained on, share one base model in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from engine.architecture.facts import Architecture, from_config
from engine.architecture.parameters import parameter_count
from engine.budget.predict.inference import generation_bytes
from engine.budget.predict.parallel_layout import on_one_device
from engine.budget.trace.memory_config import MemoryConfig, memory_config_of
from engine.config.files.find import BUILTIN_PREFIX
from engine.config.schema.run import RunSpec
from engine.data.prompts import was_trained_plain
from engine.device.base import Device, holders_of
from engine.errors import DeviceBusyError, DoesNotFitError, UnknownArchitectureError, UsageError
from engine.journal.checkpoints_on_disk import damage, find_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.event_text import format_bytes
from engine.journal.files import read_table
from engine.journal.index import list_runs, runs_folder
from engine.journal.liveness import running_engine
from engine.journal.own_files import result_files
from engine.journal.stages import typed_name
from engine.model.adapted_linear import compute_in_input_dtype
from engine.model.adapters import set_adapter_dtype
from engine.model.config import model_config_dict
from engine.model.decoder import eval_mode
from engine.model.load import load_and_tell
from engine.model.loaded import LoadedModel
from engine.model.reference import find_run_weights, find_starting_weights
from engine.model.saved_adapter import ADAPTER, open_adapter, try_matrices
from engine.model.tokenizer import load_tokenizer

Notify = Callable[[str], None]


@dataclass(frozen=True)
class ChatSource:
    """Weights to talk to: those of `spec`'s model with `weights` (a saved adapter or full model) loaded into it."""

    label: str
    spec: RunSpec
    weights: Path | None
    """None: the model that the run starts from."""
    base: bool = False
    """The base of that model, without the adapter that the run may have continued."""


def weights_of_run(place: RunDirectory, which: str | None, notify: Notify) -> Path:
    """The folder of the run's result or, of `which`, a step or "best". A run without a result: its newest checkpoint,
    and `notify` says which. Raises UsageError if there is none."""
    if which is not None:
        return find_run_weights(f"run:{place.path}@{which}")
    if place.adapter.is_dir() or place.model.is_dir():
        return find_run_weights(f"run:{place.path}")
    whole = next((found for found in find_checkpoints(place.checkpoints) if not damage(found)), None)
    if whole is None:
        raise UsageError(
            f"{place.name} has no result or checkpoint yet",
            fix=f"write one while it trains: tunedeck checkpoint {typed_name(place)}"
            if running_engine(place)
            else f"continue training: tunedeck resume {typed_name(place).partition('/')[0]}",
        )
    result_files(whole.weights, place.path)
    notify(f"{place.name} has no result yet; using its newest checkpoint, step {whole.step}")
    return whole.weights


@dataclass
class ChatModel:
    """A model that answers. Several may share `loaded`; each has an adapter of its own there, or none (the base)."""

    label: str
    spec: RunSpec
    loaded: LoadedModel
    adapter: str | None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block the loaded model computes as this one, in evaluation mode and without gradients."""
        model = self.loaded.model
        with eval_mode(model):
            if not isinstance(model, PeftModel):
                yield
            elif self.adapter is None:
                with model.disable_adapter():
                    yield
            else:
                model.set_adapter(self.adapter)
                yield


def load_sources(sources: Sequence[ChatSource], device: Device, notify: Notify) -> list[ChatModel]:
    """Load all sources, in the order given. Call this inside `device.activate()`.

    Raises DoesNotFitError, before anything is loaded, if the weights do not fit into free memory.
    """
    require_room(sources, device)
    shared: dict[tuple[Any, ...], LoadedModel] = {}
    found: dict[int, ChatModel] = {}
    # Bases last: an adapter's base needs no memory of its own.
    for number, source in sorted(enumerate(sources), key=lambda item: item[1].weights is None):
        found[number] = _load(source, number, shared, device, notify)
    return [found[number] for number in range(len(sources))]


def _load(
    source: ChatSource, number: int, shared: dict[tuple[Any, ...], LoadedModel], device: Device, notify: Notify
) -> ChatModel:
    spec, key = source.spec, _base_key(source.spec)
    starting = find_starting_weights(spec.recipe.model).adapter
    adapter = source.weights or (Path(starting) if starting is not None and not source.base else None)
    loaded = shared.get(key) if spec.recipe.method.kind == "lora" else None
    if loaded is not None and adapter is None:
        return ChatModel(source.label, spec, loaded, None)
    if loaded is not None and adapter is not None:
        obstacle = _why_alone(loaded, adapter)
        if not obstacle:
            name = _add_adapter(loaded, str(adapter), spec, f"chat{number}", device)
            return ChatModel(source.label, spec, loaded, name)
        notify(f"{source.label} {obstacle}, so it is loaded with its own copy of the base")
    if source.base and starting is not None:
        spec = _without_adapter(spec)
    tokenizer = load_tokenizer(spec.recipe.model, trust_remote_code=spec.limits.trust_remote_code)
    loaded = load_and_tell(spec, device, tokenizer, notify, source.label)
    if source.weights is not None:
        loaded.load_weights(source.weights)
    if isinstance(loaded.model, PeftModel) and not loaded.changed_base:
        shared.setdefault(key, loaded)
    is_adapter = isinstance(loaded.model, PeftModel) and adapter is not None
    return ChatModel(source.label, spec, loaded, ADAPTER if is_adapter else None)


def _without_adapter(spec: RunSpec) -> RunSpec:
    """The spec of the base alone, which the run's adapter was trained on, with the run's tokenizer."""
    model = spec.recipe.model
    start = find_starting_weights(model)
    changes = {"id": start.base, "revision": start.revision, "adapter": None, "tokenizer": model.tokenizer or model.id}
    recipe = spec.recipe.model_copy(update={"model": model.model_copy(update=changes)})
    return spec.model_copy(update={"recipe": recipe})


def _why_alone(loaded: LoadedModel, adapter: Path) -> str:
    """Why a further adapter cannot be put on the base of `loaded`; empty if it can."""
    if _has_whole_modules(loaded, ADAPTER) or _saves_whole_modules(adapter):
        return "has modules that were trained in full"
    return "" if try_matrices(adapter).keeps_base else "changes the weights of its base"


def _add_adapter(loaded: LoadedModel, adapter: str, spec: RunSpec, name: str, device: Device) -> str:
    """Load a further adapter onto the base; returns its name there."""
    model = loaded.model
    assert isinstance(model, PeftModel)
    loaded.accounts.append(open_adapter(model, adapter, name=name).account)
    set_adapter_dtype(model, spec.recipe.method)
    compute_in_input_dtype(model)
    device.adopt([tensor for key, tensor in model.named_parameters() if f".{name}." in key])
    return name


def _base_key(spec: RunSpec) -> tuple[Any, ...]:
    """What two runs must have in common to be trained on the same base weights, computed in the same way."""
    recipe, start = spec.recipe, find_starting_weights(spec.recipe.model)
    settings = recipe.model.model_dump_json(exclude={"id", "adapter", "revision", "tokenizer", "chat_template"})
    is_new = recipe.model.init == "random" or start.base.startswith(BUILTIN_PREFIX)
    seed = recipe.train.seed if is_new else None
    return start.base, start.revision, settings, seed, recipe.model.tokenizer, recipe.model.chat_template


def without_repeated_bases(sources: Sequence[ChatSource]) -> list[ChatSource]:
    """Without bases whose answers an earlier source gives: two checkpoints of a run were trained from one."""
    found: list[ChatSource] = []
    seen: set[tuple[Any, ...]] = set()
    for source in sources:
        recipe = source.spec.recipe
        if source.weights is None and (source.base or find_starting_weights(recipe.model).adapter is None):
            asked = recipe.generate.model_dump_json(), str(recipe.data.template_args), was_trained_plain(source.spec)
            key = (*_base_key(source.spec), *asked)
            if key in seen:
                continue
            seen.add(key)
        found.append(source)
    return found


def _has_whole_modules(loaded: LoadedModel, name: str) -> bool:
    assert isinstance(loaded.model, PeftModel)
    config = loaded.model.peft_config[name]
    return bool(getattr(config, "modules_to_save", None) or getattr(config, "trainable_token_indices", None))


def _saves_whole_modules(folder: Path) -> bool:
    """Whether a saved adapter has modules or token rows that replace the base's."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    return bool(getattr(config, "modules_to_save", None) or getattr(config, "trainable_token_indices", None))


def facts_for_memory(spec: RunSpec) -> tuple[Architecture, MemoryConfig] | None:
    """None without a memory formula of the architecture."""
    try:
        arch = from_config(model_config_dict(spec))
    except UnknownArchitectureError:
        return None
    return arch, memory_config_of(arch, on_one_device(spec))


def require_room(sources: Sequence[ChatSource], device: Device) -> None:
    """Raise DoesNotFitError if the weights of all bases, and the cache of a short answer, exceed the free memory. 4-bit
    weights and architectures without a memory formula are tried instead."""
    needed_bytes, bases = 0, set()
    for source in sources:
        facts = facts_for_memory(source.spec)
        key = (_base_key(source.spec), source.spec.recipe.method.kind == "lora" or source.weights)
        if facts is None or facts[1].quantized or key in bases:
            continue
        bases.add(key)
        arch, config = facts
        needed_bytes += parameter_count(arch) * config.base_bytes
        one = generation_bytes(arch, config, rows=1, prompt=1, generate=source.spec.recipe.generate)
        needed_bytes += one if len(bases) == 1 else 0
    free_bytes = device.available_bytes - device.memory().allocated_bytes - _kept_for_runs(device)
    if needed_bytes > free_bytes:
        found = f"the chat needs {format_bytes(needed_bytes)}, and {format_bytes(max(0, free_bytes))} are free on "
        holders = "; ".join(_holders(device))
        if holders:
            raise DeviceBusyError(
                f"{found}{device.name}, which is held by {holders}",
                fix="wait until they end, or chat on the CPU: -p with a profile of kind cpu",
            )
        raise DoesNotFitError(
            f"{found}{device.name}",
            fix="chat with fewer models, lower generate.max_new_tokens with --set, or use a profile with more "
            "memory: -p",
        )


def _holders(device: Device) -> list[str]:
    return [holders for reading in device.readings() if (holders := holders_of(reading))]


def _kept_for_runs(device: Device) -> int:
    """Bytes of the device that training runs are predicted to take beyond what they hold now."""
    used = {process.pid: process.used_bytes or 0 for reading in device.readings() for process in reading.processes}
    if not used:
        return 0
    missing = 0
    for run in list_runs(runs_folder(None)):
        identity = running_engine(run)
        if identity is not None and identity.pid in used:
            missing += max(0, _planned_peak_bytes(run) - used[identity.pid])
    return missing


def _planned_peak_bytes(run: RunDirectory) -> int:
    """0 if nothing was predicted."""
    try:
        peak = read_table(run.plan_json).get("peak_bytes")
    except (OSError, ValueError):
        return 0
    return int(peak) if isinstance(peak, int | float) else 0


def free_for_answers(device: Device) -> int:
    """Bytes that prompt, cache and logits of an answer may take."""
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
    return device.available_bytes - device.memory().allocated_bytes
