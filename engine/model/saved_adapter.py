"""Opens saved adapters with peft: training, chat, evaluation, merging and hand-over all do it here. Every tensor of the
adapter's files is loaded, or named with the reason; every weight of the adapter comes from the files.

Try it: `python -m pytest tests/model/test_saved_adapter.py`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub import snapshot_download
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from peft.utils import load_peft_weights, set_peft_model_state_dict
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.architecture.model_folder import ADAPTER_CONFIG
from engine.device.oom import classify
from engine.errors import AdapterError
from engine.model.adapter_patterns import require_bounded_patterns
from engine.model.config import auto_class
from engine.model.weight_account import WeightAccount

ADAPTER = "default"
"""peft's name of the one adapter."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SHOWN = 3
"""Names in a sentence."""
PEFT_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError)
"""What peft raises for a config that does not suit the model."""


@dataclass(frozen=True)
class OpenedAdapter:
    """A model with a saved adapter."""

    model: PeftModel
    account: WeightAccount
    changed_base: tuple[str, ...] = ()
    """Layers of the base whose weights peft replaced when it created the adapter, as for PiSSA and OLoRA: with the
    adapter switched off, the model is not the base."""


@dataclass(frozen=True)
class _Reading:
    """What messages name."""

    adapter: str
    base: str
    config: PeftConfig


def _name_of(model: PreTrainedModel | PeftModel) -> str:
    return str(getattr(model, "name_or_path", "") or type(model).__name__)


def adapter_folder(adapter: str) -> Path:
    """The folder of an adapter; one of the hub is fetched. Raises HUB_ERRORS of `engine.model.config`."""
    folder = Path(adapter)
    return folder if folder.is_dir() else Path(snapshot_download(adapter, allow_patterns=["adapter_*"]))


def open_adapter(
    model: PreTrainedModel | PeftModel,
    adapter: str,
    *,
    name: str = ADAPTER,
    trainable: bool = False,
    widened: bool = True,
    in_full: Sequence[str] = (),
) -> OpenedAdapter:
    """Put the saved adapter `adapter` (hub id or folder) on `model`, a base or one that has adapters already.

    `widened`: weights in half precision become fp32. `in_full`: modules that are trained in full from now on, besides
    those of the adapter; they start from the base's weights.

    Raises:
        AdapterError: a tensor of the files belongs to no weight of the model, or a weight of the adapter is in no file;
            peft cannot open the adapter.
        HUB_ERRORS of `engine.model.config`: the adapter cannot be fetched or read.
    """
    folder = adapter_folder(adapter)
    config = _read_config(folder, adapter)
    require_bounded_patterns(model, config, adapter)
    config.inference_mode = not trainable
    if trainable and not isinstance(model, PeftModel):
        config.task_type = task_type_of(model)
    if trainable and config.is_prompt_learning:
        raise _not_opened(adapter, config, "it trains a prompt, not weights")
    place = "cpu" if model.device.type == "meta" else str(model.device)
    weights = load_peft_weights(
        str(folder), device=place, key_mapping=getattr(model, "_checkpoint_conversion_mapping", None) or None
    )
    saved = _add_modules(model, config, in_full, weights)
    before = _identities(model)
    with _blaming(adapter, config), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PEFT config's `base_model_name_or_path` was renamed")
        if isinstance(model, PeftModel):
            model.add_adapter(name, config, autocast_adapter_dtype=widened)
            wrapped = model
        else:
            wrapped = cast(PeftModel, get_peft_model(model, config, name, autocast_adapter_dtype=widened))
    changed = tuple(sorted(layer for layer, seen in _identities(wrapped).items() if before.get(layer, seen) != seen))
    count = len(weights)
    unread = _fill(wrapped, name, weights, saved, _Reading(adapter, _name_of(model), config))
    account = WeightAccount("adapter", str(folder), (ADAPTER_WEIGHTS,), count, count - len(unread), unread)
    if not trainable:
        wrapped.eval()
    return OpenedAdapter(wrapped, account, changed)


def _read_config(folder: Path, adapter: str) -> PeftConfig:
    if not (folder / ADAPTER_CONFIG).is_file():
        raise AdapterError(
            f"{adapter} has no {ADAPTER_CONFIG}", expected="an adapter as saved by peft", fix="check model.adapter"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        others = sorted(path.name for path in folder.glob("adapter_model*"))
        raise AdapterError(
            f"{adapter} has no {ADAPTER_WEIGHTS}" + (f", only {', '.join(others[:SHOWN])}" if others else ""),
            expected="weights in one safetensors file",
            fix="load it with peft on the machine where it was made, and save it again with save_pretrained",
        )
    try:
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterError(
            f"{adapter}: the installed peft cannot read {ADAPTER_CONFIG}: {error}",
            expected="an adapter type that the installed peft supports",
            fix="install the version of peft that wrote it (key peft_version in that file)",
        ) from error
    return config


@contextmanager
def _blaming(adapter: str, config: PeftConfig) -> Iterator[None]:
    """Turn what peft raises into an AdapterError that names the adapter; an out-of-memory error passes unchanged."""
    try:
        yield
    except PEFT_ERRORS as error:
        if classify(error) is not None:
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise _not_opened(adapter, config, first) from error


def task_type_of(model: PreTrainedModel) -> str | None:
    """The task type with which peft's Auto classes open an adapter of `model`. None: they take the model's class from
    the config's auto_mapping, which peft writes, because they have no type for models with a vision encoder."""
    return "CAUSAL_LM" if auto_class(model.config) is AutoModelForCausalLM else None


def type_name(config: PeftConfig) -> str:
    """The name of an adapter's type, as peft spells it: "LORA"."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def _not_opened(adapter: str, config: PeftConfig, reason: str) -> AdapterError:
    return AdapterError(
        f"{adapter} ({type_name(config)}) cannot be continued on this model: {reason}",
        expected="an adapter that peft can train on this model",
        fix="merge it into its base with peft and set model.id to the result, or start a new adapter",
    )


def _identities(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(address, version) of the data of each parameter of the base, by its name without peft's wrapping. peft puts
    other values into a weight by replacing its data, or in place."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): (parameter.data_ptr(), parameter._version)
        for name, parameter in model.named_parameters()
        if parameter.device.type != "meta"
    }


def _add_modules(model: nn.Module, config: Any, in_full: Sequence[str], weights: Mapping[str, Tensor]) -> list[str]:
    """Add modules to those that the adapter's config trains in full; returns the config's own. Raises AdapterError for
    a module on which the adapter has matrices."""
    saved = list(getattr(config, "modules_to_save", None) or [])
    added = [name for name in in_full if not _is_one_of(name, saved)]
    adapted = {_module_of(key) for key in weights if ".lora_" in key}
    for name in added:
        if name in adapted:
            raise AdapterError(
                f"method.also_train includes {name}, which already has matrices of the continued adapter",
                expected="a module without adapter matrices",
                fix="remove it from method.also_train",
            )
    if added:
        config.modules_to_save = [*saved, *added]
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        if any(f"{name}.weight" in {*tied, *tied.values()} for name in added):
            config.ensure_weight_tying = True
    return saved


def _is_one_of(module: str, names: Iterable[str]) -> bool:
    """Whether one of `names` is a module's dotted name or its end, which is how peft reads modules_to_save."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def adapter_tensors(model: PeftModel, name: str = ADAPTER) -> dict[str, Tensor]:
    """The adapter's tensors, not copies, by their names in a saved file."""
    state = model.state_dict(keep_vars=True)
    found: dict[str, Tensor] = get_peft_model_state_dict(model, state, name, save_embedding_layers=False)
    return found


def _fill(model: PeftModel, name: str, weights: dict[str, Tensor], saved: list[str], read: _Reading) -> dict[str, str]:
    """Load `weights` into the adapter `name`; returns {name of a tensor that is not needed: reason}. `saved`: modules
    of which the files must hold the weights; others begin with the base's."""
    live, ours = model.state_dict(keep_vars=True), adapter_tensors(model, name)
    _expect_shapes(ours, weights, read)
    copies = [key for key in weights if key in live and key not in ours]
    for key in copies:
        _expect_equal(live[key], weights.pop(key), key, read.adapter)
    for key, tensor in _wrapped_weights(model, name):
        if ".token_adapter." not in key and not _is_one_of(_module_of(key), saved):
            weights.setdefault(key, tensor)
    lacking = [key for key, _ in _wrapped_weights(model, name) if key not in weights]
    if lacking:
        raise _mismatch(read, lacking, [], len(ours), len(weights))
    with _blaming(read.adapter, read.config), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")  # a model of shapes alone
        result: Any = set_peft_model_state_dict(model, dict(weights), adapter_name=name)
    there = {id(live[key]) for key in live.keys() - set(result.missing_keys)}
    known = set(map(id, live.values()))
    lacking = [
        key for key, tensor in ours.items() if id(tensor) not in there and (id(tensor) in known or key not in weights)
    ]
    if lacking or result.unexpected_keys:
        raise _mismatch(read, lacking, list(result.unexpected_keys), len(ours), len(weights))
    return dict.fromkeys(copies, "a copy of the base's weight, which is in the base")


def _module_of(key: str) -> str:
    """Return the dotted name of the base's module that a tensor of an adapter's file belongs to."""
    bare = key.removeprefix("base_model.model.")
    return re.split(r"\.(?:lora_|base_layer\.)", bare)[0] if ".lora_" in bare else bare.rpartition(".")[0]


def _wrapped_weights(model: PeftModel, name: str) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, tensor) of all modules and rows that the adapter `name` trains in full."""
    for place, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            own = module.state_dict(keep_vars=True)
            for key, stored in cast(Any, module).adapter_state_dict_load_map(name).items():
                yield f"{place}.{key}", own[stored].detach()


def _expect_equal(base: Tensor, saved: Tensor, key: str, adapter: str) -> None:
    """Raise AdapterError if a weight of the base that is saved with an adapter has other values there."""
    same = base.shape == saved.shape
    if same and base.device.type != "meta":
        same = torch.equal(base.detach().to(saved.dtype), saved.to(base.device))
    if not same:
        raise AdapterError(
            f"{adapter} includes {_module_of(key)} of shape {list(saved.shape)}, but the base's is "
            + (f"{list(base.shape)}" if base.shape != saved.shape else "different"),
            expected="the base that the adapter was trained on",
            fix="set model.id to that base; if the adapter was trained with added tokens, resize the base to them and "
            "save it, or train the tokens with model.add_tokens",
        )


def _expect_shapes(ours: Mapping[str, Tensor], weights: Mapping[str, Tensor], read: _Reading) -> None:
    """Raise AdapterError if tensors of the files have other shapes than the model's."""
    wrong = [key for key in ours if key in weights and weights[key].shape != ours[key].shape]
    if not wrong:
        return
    key = wrong[0]
    theirs, mine = list(weights[key].shape), list(ours[key].shape)
    rows = key.endswith((".weight", ".trainable_tokens_delta")) and theirs[1:] == mine[1:] and ".lora_" not in key
    cause = (
        "the adapter was trained after tokens were added to the vocabulary" if rows else "it belongs to another base"
    )
    raise AdapterError(
        f"{read.adapter}: {len(wrong)} of {len(weights)} tensors do not have the shapes of {read.base}: "
        f"{_module_of(key)} is {theirs} in the adapter and {mine} in the model; {cause}",
        expected="the base that the adapter was trained on",
        fix="list the added tokens in model.add_tokens, or set model.id to the base with the larger vocabulary"
        if rows
        else "set model.id to the adapter's base",
    )


def _mismatch(read: _Reading, lacking: list[str], surplus: list[str], needed: int, present: int) -> AdapterError:
    """The error for an adapter whose files and model do not fit."""
    found = []
    if surplus:
        found.append(f"{len(surplus)} of {present} tensors do not match a layer of {read.base} ({_some(surplus)})")
    if lacking:
        found.append(f"{len(lacking)} of the adapter's {needed} weights are missing from the files ({_some(lacking)})")
    return AdapterError(
        f"{read.adapter}: {'; '.join(found)}{_likely_cause(surplus, lacking)}",
        expected="an adapter of this model, with all of its weights",
        fix="set model.id to the base that the adapter was trained on, or save the adapter again with peft",
    )


def _likely_cause(surplus: Sequence[str], lacking: Sequence[str]) -> str:
    """How the names in the files differ from the model's, as the end of a sentence; empty where none resembles one."""
    for key in surplus[:1]:
        parts = key.split(".")
        shared, meant = max(((_common_end(parts, each.split(".")), each) for each in lacking), default=(0, ""))
        theirs, mine = ".".join(parts[:-shared]), ".".join(meant.split(".")[:-shared])
        if shared > 2 and theirs != mine:
            return f'; names begin with "{theirs}" in the files, and with "{mine}" in the model'
    return ""


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    """How many parts two names have in common at their end."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


TRIED_WIDTH = 64
"""Inputs and outputs of the layer on which `try_matrices` opens an adapter: PiSSA decomposes its weight."""


class Matrices(NamedTuple):
    """What an adapter does to a layer with weights W."""

    keeps_base: bool
    """W stays as it is; False for PiSSA, OLoRA and others that subtract from it."""
    adds_product: bool
    """The layer computes W·x + s·B·A·x, as servers do."""


def try_matrices(folder: Path) -> Matrices:
    """Open the first pair of matrices of the adapter in `folder` with peft on a layer with random weights, and compare
    with W·x + s·B·A·x. Both are False for an adapter that cannot be opened so, such as one of another type."""
    config: Any = _read_config(folder, str(folder))
    weights = load_peft_weights(str(folder), device="cpu")
    first = next((key for key in sorted(weights) if key.endswith(".lora_A.weight")), None)
    if first is None or (other := first.replace(".lora_A.", ".lora_B.")) not in weights or not hasattr(config, "r"):
        return Matrices(keeps_base=False, adds_product=False)
    a_RI, b_OR = weights[first][:, :TRIED_WIDTH].float(), weights[other][:TRIED_WIDTH].float()
    if a_RI.dim() != 2 or b_OR.dim() != 2:
        return Matrices(keeps_base=False, adds_product=False)
    rank = len(a_RI)
    alpha = config.lora_alpha * rank / config.r
    tried = {"target_modules": ["layer"], "modules_to_save": None, "r": rank, "lora_alpha": alpha}
    tried |= {"rank_pattern": {}, "alpha_pattern": {}, "trainable_token_indices": None, "exclude_modules": None}
    tried |= {"layers_to_transform": None, "layers_pattern": None, "target_parameters": None, "fan_in_fan_out": False}
    for key, value in tried.items():
        setattr(config, key, value)
    generator = torch.Generator().manual_seed(0)
    layer, weight_OI = (
        nn.Linear(a_RI.shape[1], len(b_OR), bias=False),
        torch.randn((len(b_OR), a_RI.shape[1]), generator=generator),
    )
    layer.weight.data.copy_(weight_OI)
    model = nn.ModuleDict({"layer": layer})
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, model, ADAPTER)
            adapted: Any = model["layer"]
            adapted.lora_A[ADAPTER].weight.copy_(a_RI)
            adapted.lora_B[ADAPTER].weight.copy_(b_OR)
            model.eval()
            x_NI = torch.randn((4, a_RI.shape[1]), generator=generator)
            scale = alpha / (rank**0.5 if config.use_rslora else rank)
            expected_NO = x_NI @ weight_OI.t() + scale * (x_NI @ a_RI.t() @ b_OR.t())
            difference = float((adapted(x_NI) - expected_NO).abs().max() / expected_NO.abs().max())
            keeps = torch.equal(adapted.get_base_layer().weight, weight_OI)
    except PEFT_ERRORS:  # it needs more than its own files to be opened
        return Matrices(keeps_base=False, adds_product=False)
    return Matrices(keeps, difference < 1e-3)


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
