"""Tensors of a base's files that transformers' class does not read: which they are, whether they show that the files
belong to another model, and how they and the base's config.json come into a result."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from engine.config.files.caches import find_snapshot
from engine.errors import UsageError
from engine.model.tensor_file import DTYPES, FileTensor, write_tensors

INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}
LAYERS_OF_PREDICTION = re.compile("nextn|mtp")
"""In keys of a config that count layers of multi-token prediction behind the decoder's last one."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

CHANGED_BY_A_RUN = ("vocab_size", "rope_parameters", "max_position_embeddings", "tie_word_embeddings")
"""Keys of a config that a recipe can change: added tokens, scaled positions, trained ends of a tied model."""


@dataclass(frozen=True)
class Unread:
    """A tensor that is in a base's files and in no parameter of the model."""

    entry: FileTensor
    file: Path
    reason: str
    foreign: bool
    """Whether it shows that the files belong to another model than the config."""


def base_folder(base: str, revision: str | None = None) -> Path | None:
    """Return the folder with a base's files on this machine: a folder, or the cached ones of a hub id."""
    return Path(base) if Path(base).is_dir() else find_snapshot(base, revision)


PART_OF_A_WEIGHT = re.compile("_scale_inv$|_scales$|_blocks$|_scale$")
"""Ends of names of tensors from which a weight is computed that is stored in FP8 or MXFP4."""


def unread_tensors(model: PreTrainedModel, folder: Path, *, dequantised: bool = False) -> list[Unread]:
    """Return the tensors of the safetensors files in `folder` that no parameter or buffer of `model`, a base without
    adapters, is made of. Only headers are read. Names are mapped as transformers maps them when it loads.
    `dequantised`: the weights were computed from quantised ones."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = model.state_dict(keep_vars=True)
    prefix = model.base_model_prefix
    found = []
    entries = list(_entries(folder))
    weights = [PART_OF_A_WEIGHT.sub("", entry.name) if dequantised else entry.name for entry, _ in entries]
    names = [rename_source_key(weight, renamings, converters, prefix, state)[0] for weight in weights]
    other_layers = _layers_of_another_kind(model, names)
    for (entry, file), weight, name in zip(entries, weights, names, strict=True):
        plain, _ = rename_source_key(weight, [], [], prefix, state)
        if name not in state and plain not in state:
            reason, foreign = _reason(model, entry, name, other_layers)
            found.append(Unread(entry, file, reason, foreign))
    return found


def tensors_of(folder: Path) -> dict[str, list[str]]:
    """The names of the tensors in each file that transformers reads."""
    found: dict[str, list[str]] = {}
    for entry, file in _entries(folder):
        found.setdefault(file.name, []).append(entry.name)
    return dict(sorted(found.items()))


def _entries(folder: Path) -> Iterator[tuple[FileTensor, Path]]:
    """Yield each tensor of the files that transformers reads, in natural order of names."""
    index = folder / INDEX
    listed = json.loads(index.read_text("utf-8"))["weight_map"] if index.is_file() else None
    names = sorted(set(listed.values())) if listed is not None else ["model.safetensors"]
    found = []
    for file in (folder / name for name in names):
        if not file.is_file():
            continue
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if listed is None or listed.get(name) == file.name:
                    part = opened.get_slice(name)
                    found.append((FileTensor(name, TORCH_DTYPES[part.get_dtype()], tuple(part.get_shape())), file))
    yield from sorted(found, key=lambda item: [int(part) if part.isdigit() else part for part in _parts(item[0].name)])


def _parts(name: str) -> list[Any]:
    return re.split(r"(\d+)", name)


def _layers_of_another_kind(model: PreTrainedModel, names: list[str]) -> set[tuple[nn.Module, int]]:
    """The layers behind the last one, as (list of layers, number), with a tensor that no layer of the model has: they
    do something else, as `eh_proj` of multi-token prediction does. Those of a longer model have the same names."""
    found: set[tuple[nn.Module, int]] = set()
    for name in names:
        holder, rest, _ = _deepest(model, name)
        if isinstance(holder, nn.ModuleList) and rest[0].isdigit() and len(holder):
            own = {each for layer in holder for each in layer.state_dict(keep_vars=True)}
            if ".".join(rest[1:]) not in own:
                found.add((holder, int(rest[0])))
    return found


def _reason(
    model: PreTrainedModel, entry: FileTensor, name: str, other_layers: set[tuple[nn.Module, int]]
) -> tuple[str, bool]:
    """Why the class does not read the tensor, which would have the name `name` in the model, and whether it is of
    another model: the model has the module or the list of layers, but no such weight in it."""
    ignored = [
        pattern
        for module in model.modules() if isinstance(module, PreTrainedModel)
        for pattern in module._keys_to_ignore_on_load_unexpected or ()
    ]  # fmt: skip
    if any(re.search(pattern, each) for pattern in ignored for each in (entry.name, name)):
        return "the transformers class leaves it out", False
    if name in dict(model.named_buffers()) or name.endswith("inv_freq"):
        return "the model computes it", False
    if prod(entry.shape) <= 1:
        return "a single number, such as a quantiser's scale", False
    holder, rest, in_layer = _deepest(model, name)
    if isinstance(holder, nn.ModuleList) and rest[0].isdigit():
        counted = int(rest[0]) < len(holder) + _predicting_layers(model)
        if counted or (holder, int(rest[0])) in other_layers:
            return "a layer for multi-token prediction", False
        return f"a layer after the last of {len(holder)}", True
    if not in_layer and len(rest) > 1:
        return "a part that the transformers class does not have", False
    return f"{type(holder).__name__} has no {'.'.join(rest)}", True


def _deepest(model: nn.Module, name: str) -> tuple[nn.Module, list[str], bool]:
    """Return the deepest module on the way to `name`, the rest of the name, and whether that module is in a layer."""
    module, rest, in_layer = model, name.split("."), False
    while len(rest) > 1 and rest[0] in module._modules and module._modules[rest[0]] is not None:
        in_layer = in_layer or isinstance(module, nn.ModuleList)
        inner = module._modules[rest[0]]
        assert inner is not None
        module, rest = inner, rest[1:]
    return module, rest, in_layer or not module._modules


def _predicting_layers(model: PreTrainedModel) -> int:
    """The layers behind the decoder's last one that the config counts."""
    text = model.config.get_text_config().to_dict()
    return sum(
        value for key, value in text.items()
        if LAYERS_OF_PREDICTION.search(key) and isinstance(value, int) and not isinstance(value, bool)
    )  # fmt: skip


def refuse_foreign(unread: list[Unread], base: str) -> None:
    """Raise UsageError if the files of `base` hold tensors of another model than its config describes."""
    foreign = [each for each in unread if each.foreign]
    if foreign:
        first = foreign[0]
        raise UsageError(
            f"{len(foreign)} tensors of {base}, such as {first.entry.name}, do not belong to the model "
            f"described by its config.json ({first.reason}): the files belong to another model",
            expected="a config.json that matches the weights in the files",
            fix="use the config.json that belongs to the files; if these tensors are not needed, load the model "
            "with from_pretrained of transformers and save it to another folder without them",
        )


def sentence_on(unread: list[Unread]) -> str | None:
    """Return what copied tensors mean for a result; None without any."""
    copied = to_copy(unread)
    if not copied:
        return None
    return (
        f"{len(copied)} tensors of the base, such as {copied[0].entry.name}, are not loaded by the "
        f"transformers class ({copied[0].reason}): they are not trained, and are copied unchanged into a "
        "merged or full result. If they are used for multi-token prediction, speculative decoding accepts "
        "fewer tokens"
    )


def to_copy(unread: list[Unread]) -> list[Unread]:
    return [each for each in unread if each.reason != "the model computes it" and not each.foreign]


def add_tensors(folder: Path, unread: list[Unread]) -> None:
    """Add tensors of the base to the model in `folder`, as one more safetensors file with an index for all. One tensor
    is in memory at a time. OSError: the disk is full."""
    copied = to_copy(unread)
    if not copied:
        return
    present: dict[str, list[FileTensor]] = {}
    for entry, file in _entries(folder):
        present.setdefault(file.name, []).append(entry)
    count = len(present) + 1
    weight_map: dict[str, str] = {}
    for number, (old, entries) in enumerate(sorted(present.items()), 1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        (folder / old).rename(folder / name)
        weight_map |= dict.fromkeys((entry.name for entry in entries), name)
    name = f"model-{count:05d}-of-{count:05d}.safetensors"
    write_tensors(folder / name, [each.entry for each in copied], (_read(each) for each in copied), METADATA)
    weight_map |= dict.fromkeys((each.entry.name for each in copied), name)
    sizes = [entry.size_bytes for entries in present.values() for entry in entries]
    total = sum(sizes) + sum(each.entry.size_bytes for each in copied)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def _read(unread: Unread) -> Tensor:
    with safe_open(unread.file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(unread.entry.name)
    return tensor


def keep_config(folder: Path, base: Path, model: PreTrainedModel) -> None:
    """Replace the config.json in `folder` by that of `base`, changed where the result differs from the base: dtype,
    rows of the vocabulary, positions, and whether head and embedding are tied. Code of the base comes with it."""
    path = base / "config.json"
    if not path.is_file():
        return
    own = json.loads(path.read_text("utf-8"))
    if own.get("model_type") != model.config.model_type:
        return  # the result is a part of the base, with a config of its own
    before = type(model.config).from_pretrained(str(base)).to_dict()  # reads numbers that JSON does not have, too
    after = {**model.config.to_dict(), "tie_word_embeddings": _is_tied(model)}
    _set_changed(own, before, after)
    text = own.get("text_config")
    if not after["tie_word_embeddings"] and isinstance(text, dict) and text.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = False  # readers of other projects look there
    _set_dtype(own, str(model.dtype).removeprefix("torch."))
    own.setdefault("architectures", [type(model).__name__])
    (folder / "config.json").write_text(json.dumps(own, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if "auto_map" in own:
        for code in base.glob("*.py"):
            shutil.copyfile(code, folder / code.name)


def _is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    said = bool(model.config.to_dict().get("tie_word_embeddings", False))
    return said and (head is None or head.weight is model.get_input_embeddings().weight)


def _set_changed(own: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for key in CHANGED_BY_A_RUN:
        if key not in after or before.get(key) == after[key]:
            continue
        if key == "rope_parameters" and key not in own and _is_flat(after[key]):
            # as readers written for earlier versions of transformers expect it
            scaling = dict(after[key])
            if "rope_theta" in scaling:
                own["rope_theta"] = scaling.pop("rope_theta")
            own["rope_scaling"] = scaling
        else:
            own[key] = after[key]
    for key, value in own.items():
        parts = value, before.get(key), after.get(key)
        if key.endswith("_config") and all(isinstance(part, dict) for part in parts):
            _set_changed(value, before[key], after[key])


def _is_flat(rope: object) -> bool:
    """Whether all layers share these rotary parameters: earlier versions have no place for those of kinds of layers."""
    return isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())


def _set_dtype(own: dict[str, Any], dtype: str) -> None:
    """Write the dtype where the config names one. Without it, it follows from the files."""
    for table in (own, *(value for name, value in own.items() if name.endswith("_config"))):
        if isinstance(table, dict):
            table.update({key: dtype for key in ("dtype", "torch_dtype") if table.get(key) is not None})


def complete_result(folder: Path, base: str, revision: str | None, model: PreTrainedModel) -> list[Unread]:
    """Give the full or merged model in `folder` what the base `base` has beside the weights of `model`: tensors that
    the class does not read, and the keys of its config.json. Returns the unread tensors. OSError: the disk is full."""
    files = base_folder(base, revision)
    if files is None:
        return []
    unread = unread_tensors(model, files)
    add_tensors(folder, unread)
    keep_config(folder, files, model)
    return unread
