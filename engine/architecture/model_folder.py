"""What the files of a model's folder show before anything is loaded: whether transformers can open config, weights and
tokenizer, or what to take instead."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.config.files.caches import find_snapshot, has_tokenizer
from engine.config.files.machine import install_packages, path_of
from engine.config.schema.recipe import Model
from engine.config.schema.run import RunSpec
from engine.errors import UsageError
from engine.journal.files import read_table

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

OTHER_FORMATS = {".gguf": "GGUF", ".onnx": "ONNX", ".bin": "pickle", ".pt": "pickle", ".pth": "pickle"}
"""Suffixes of weights that are not opened. A pickle can run code when it is read; the others cannot be trained."""

READ_AS_BF16 = {"fp8": "FP8", "mxfp4": "MXFP4"}
"""Quantisations (`quant_method`) whose values transformers computes from the files when it loads them, without packages
of their own."""

HEADER_BYTES = 100_000_000
"""Of a safetensors file, at most (`MAX_HEADER_SIZE` of its library)."""

AGAIN = "download or export the model again; an unfinished download lacks files"


def refuse_without_config(folder: Path) -> None:
    """Raise UsageError for a folder that has no config.json, with what it holds instead."""
    if (folder / "config.json").is_file():
        return
    names = sorted(os.listdir(folder))
    kinds = {OTHER_FORMATS[suffix] for name in names if (suffix := Path(name).suffix) in OTHER_FORMATS}
    if ADAPTER_CONFIG in names:
        base = _json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "its base model"
        base = folder / "base" if (folder / "base" / "config.json").is_file() else base
        raise UsageError(
            f"{folder} holds an adapter, not a model", fix=f'set model.id = "{base}" and model.adapter = "{folder}"'
        )
    if not names:
        raise UsageError(f"the model folder {folder} is empty", fix="download or export the model into it")
    found = f"only {' and '.join(sorted(kinds))} files" if kinds - {"pickle"} else "no config.json"
    raise UsageError(
        f"{found} in the model folder {folder}",
        expected="config.json and weights as *.safetensors",
        fix="set model.id to the repository in transformers format that it was made from"
        if kinds - {"pickle"}
        else AGAIN,
    )


def refuse_files(spec: RunSpec, config: Mapping[str, Any] | None) -> None:
    """Raise UsageError if the installed transformers could not open the weights or the tokenizer of the model that a
    run without stages starts from.

    A folder is looked at whole; of a model of the hub the config alone, because missing files are downloaded.
    """
    model = spec.recipe.model
    folder = _folder(model.id)
    if config is None or (folder is None and ":" in model.id):  # built in, of a run or a stage, or still to assemble
        return
    if model.init == "pretrained":
        refuse_quantised(spec, config, folder or find_snapshot(model.id, model.revision))
    if folder is None:
        return
    if model.init == "pretrained":
        _refuse_weights(folder)
    if model.tokenizer is None or _folder(model.tokenizer) == folder:
        _refuse_tokenizer(folder)


def weight_folder(model: Model) -> Path | None:
    """The folder with the weights of a model that is a folder, or cached; None where it has none or needs none."""
    if model.init != "pretrained" or ":" in model.id:
        return None
    return _folder(model.id) or find_snapshot(model.id, model.revision)


def _folder(model: str) -> Path | None:
    folder = path_of(model)
    return folder if folder.is_dir() else None


def stored_quantisation(config: Mapping[str, Any]) -> str | None:
    """The quantisation that a config names, at its top (by its `quant_method`) or for a part of the model; None if it
    names none."""
    method = _method_of(config)
    if method is not None:
        return method
    for key, part in config.items():
        inner = stored_quantisation(part) if key.endswith("_config") and isinstance(part, Mapping) else None
        if inner is not None:
            return f"{inner} in {key}"
    return None


def _method_of(config: Mapping[str, Any]) -> str | None:
    table = config.get("quantization_config") or config.get("compression_config")
    if isinstance(table, Mapping):
        method = str(table.get("quant_method") or "unknown")
        if method == "bitsandbytes":
            return "bnb-8bit" if table.get("load_in_8bit") or table.get("_load_in_8bit") else "bnb-4bit"
        return method
    table = config.get("quantization")
    if isinstance(table, Mapping) and "bits" in table:
        return f"MLX, {table['bits']} bits"
    return None


OWN_FILES = {
    "hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq",
    "quantization_map.json": "quanto", "quanto_qmap.json": "quanto",
}  # fmt: skip
"""Files with which quantisers describe their weights beside config.json."""

PLAIN_TYPES = ("F64", "F32", "F16", "BF16", "I64", "BOOL", "C64")
"""Types in a safetensors header that weights and tables of places have in a model that is not quantised."""


def quantisation_of_files(folder: Path) -> str | None:
    """The quantisation that the files of `folder` show: a quantiser's own file, matrices in a type that no weight has,
    or scales beside weights. None if they show none. Only headers are read."""
    for name, method in OWN_FILES.items():
        if (folder / name).is_file():
            table = _json(folder / name)
            inner = table.get("quantization")
            kind = inner.get("quant_algo") if isinstance(inner, Mapping) else table.get("quant_method")
            return f"{method}, {kind}" if kind and kind != method else method
    index = folder / INDEX
    listed = _shards(index, index.stat().st_mtime_ns) if index.is_file() else (WHOLE,)
    for path in (folder / name for name in listed):
        found = _quantised_tensor(path, path.stat().st_mtime_ns) if path.is_file() else None
        if found is not None:
            return found
    return None


@lru_cache(maxsize=1024)
def _quantised_tensor(path: Path, _changed: int) -> str | None:
    """A tensor of a safetensors file that shows a quantisation, in words; None: none does, or the file is damaged."""
    header = _header(path)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        sizes = [size for size in entry.get("shape", ()) if size != 1]
        mask = len(entry.get("shape", ())) == 4 and len(sizes) == 2 and sizes[0] == sizes[1]  # of causal attention
        if entry.get("dtype") not in PLAIN_TYPES and len(sizes) > 1 and not mask:
            return f"{name} has type {entry.get('dtype')}"
        stem, scale, _ = name.partition("_scale")
        if scale and stem.endswith(".weight") and stem in header:
            return f"{stem} has a {name.removeprefix(stem.removesuffix('weight'))}"
    return None


def tensors_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a safetensors file by name; empty for one that is missing or damaged."""
    if not path.is_file():
        return {}
    return {name: tuple(entry["shape"]) for name, entry in _header(path).items() if name != "__metadata__"}


def _header(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name; empty for a damaged file, which `_damage` describes."""
    if _damage(path, path.stat().st_size, path.stat().st_mtime_ns):
        return {}
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header


def quantisation_of(config: Mapping[str, Any], files: Path | None) -> str | None:
    """The quantisation of a model's stored weights, by its config or its files (None: not on this machine)."""
    return stored_quantisation(config) or (None if files is None else quantisation_of_files(files))


def refuse_quantised(spec: RunSpec, config: Mapping[str, Any], files: Path | None) -> None:
    """Raise UsageError if the weights are stored quantised and the run cannot use them so. `files`: the model's folder
    or snapshot, whose card may name the model that it was made from."""
    method, recipe = quantisation_of(config, files), spec.recipe
    if method is None:
        return
    made_from = _base_model(files) if files is not None else None
    instead = f"set model.id to the unquantised repository that it was made from{f', {made_from}' if made_from else ''}"
    if method not in READ_AS_BF16:
        raise UsageError(
            f"the weights of {recipe.model.id} are stored quantised ({method}), which cannot be trained",
            fix=f'{instead}; model.quantize = "nf4" loads it in 4 bits for LoRA',
        )
    obstacles = {
        'method.kind = "full"': recipe.method.kind == "full",
        "finish.merge": recipe.finish.merge,
        'model.quantize = "nf4"': recipe.model.quantize != "none",
        'parallel.strategy = "sharded"': spec.profile.parallel.strategy == "sharded",
    }
    found = next((text for text, holds in obstacles.items() if holds), None)
    if found is not None:
        raise UsageError(
            f"{found}, but the weights of {recipe.model.id} are stored in {READ_AS_BF16[method]}: they can "
            "only be read, as 16-bit or 32-bit numbers for LoRA, and not written",
            fix=instead,
        )


def refuse_merge_into_quantised(config: Mapping[str, Any], model: str, files: Path | None = None) -> None:
    """Raise UsageError: transformers would write such weights under the names of quantised ones. `files`: the model's
    folder or snapshot."""
    method = quantisation_of(config, files)
    if method is not None:
        raise UsageError(
            f"the weights of {model} are stored quantised ({method}), but a merged model would not be",
            expected="a base with unquantised weights",
            fix="serve the adapter with its base, or train it on the unquantised repository",
        )


def note_on_quantised(config: Mapping[str, Any]) -> str | None:
    """That a model whose files are quantised takes the memory of an unquantised one; None for all others."""
    name = READ_AS_BF16.get(stored_quantisation(config) or "")
    return name and f"the weights are stored in {name} and loaded dequantised in model.dtype, as in the plan"


def _base_model(folder: Path) -> str | None:
    """The repository that the model card names as `base_model`."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace")[:10_000] if card.is_file() else ""
    found = re.search(r"^base_model:\s*(?:\n\s*-\s*)?[\"']?([\w.-]+/[\w.-]+)", text, re.MULTILINE)
    return found[1] if found else None


def _refuse_weights(folder: Path) -> None:
    names = set(os.listdir(folder))
    if INDEX in names:
        shards = _shards(folder / INDEX, (folder / INDEX).stat().st_mtime_ns)
        missing = [name for name in shards if name not in names]
        if missing:
            raise UsageError(
                f"{len(missing)} of {len(shards)} weight files are missing in {folder}, such as {missing[0]}",
                expected=f"every file that {INDEX} names",
                fix=AGAIN,
            )
    elif WHOLE in names:
        shards = (WHOLE,)
    else:
        _refuse_other_weights(folder, names)
        return
    for name in shards:
        file = (folder / name).stat()
        problem = _damage(folder / name, file.st_size, file.st_mtime_ns)
        if problem:
            raise UsageError(f"{folder / name} {problem}", expected="a complete safetensors file", fix=AGAIN)


def _refuse_other_weights(folder: Path, names: set[str]) -> None:
    safetensors = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_"))
    if safetensors:
        raise UsageError(
            f"{safetensors[0]} in {folder}, but neither {WHOLE} nor {INDEX}",
            expected="weights in the format of transformers",
            fix=AGAIN,
        )
    others = sorted(name for name in names if Path(name).suffix in OTHER_FORMATS)
    if others:
        raise UsageError(
            f"only {', '.join(others[:3])} in {folder}, which are not supported",
            expected="weights as *.safetensors",
            fix="convert them with transformers' save_pretrained, or download the safetensors version of the model",
        )


def refuse_no_weights(model: Model) -> None:
    """Raise UsageError for a folder with a config.json and no weights, which can be planned and not trained."""
    folder = _folder(model.id)
    if folder is None or model.init == "random" or any(name.endswith(".safetensors") for name in os.listdir(folder)):
        return
    if (folder / "config.json").is_file():
        raise UsageError(
            f"no weights in {folder}",
            expected="weights as *.safetensors",
            fix='download or export the model again; for a rehearsal with only the config, set model.init = "random"',
        )


@lru_cache(maxsize=64)
def _shards(index: Path, _changed: int) -> tuple[str, ...]:
    listed = _json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UsageError(f"{index} lists no weights", expected='a table "weight_map"', fix=AGAIN)
    return tuple(sorted({str(name) for name in listed.values()}))


@lru_cache(maxsize=1024)
def _damage(path: Path, size_bytes: int, _changed: int) -> str:
    """What is wrong with a safetensors file, as the end of a sentence; empty if its header fits its length."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 or header_bytes > size_bytes - 8:
            return f"is truncated or not a safetensors file: {size_bytes:,} bytes are less than its header"
        if header_bytes > HEADER_BYTES:
            return f"is damaged: its header would have {header_bytes:,} bytes"
        try:
            header = json.loads(file.read(header_bytes))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
            return "is damaged: its header cannot be read"
    needed = 8 + header_bytes + max(ends, default=0)
    return f"is truncated: it has {size_bytes:,} of {needed:,} bytes" if size_bytes < needed else ""


def _refuse_tokenizer(folder: Path) -> None:
    names = set(os.listdir(folder))
    if not has_tokenizer(folder) or names.isdisjoint(_vocabularies(names)):
        raise UsageError(
            f"no tokenizer in {folder}",
            expected="tokenizer.json or another vocabulary next to the model",
            fix="set model.tokenizer to a folder or hub id that has one",
        )
    if _vocabularies(names) == {"tokenizer.model"} and find_spec("sentencepiece") is None:
        raise UsageError(
            f"{folder} has only tokenizer.model, and sentencepiece, which reads it, is not installed",
            fix=f"{install_packages('sentencepiece', 'protobuf')}, or set model.tokenizer to a folder with "
            "a tokenizer.json",
        )


def _vocabularies(names: set[str]) -> set[str]:
    """The files that hold a vocabulary; tokenizer_config.json alone holds none."""
    return {
        name
        for name in names
        if name == "tokenizer.json" or name.startswith(("vocab", "tekken")) or name.endswith((".model", ".tiktoken"))
    }


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_table(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}", expected="a JSON file", fix=AGAIN) from error
