"""What the files of a result hold: the weights of a full model under transformers' names and shapes, which may differ
from the model's own, the tokens that end an answer, and the base of an adapter.

transformers converts some weights when it loads them (it fuses experts, say) and reverts that when it saves. Here each
tensor is converted alone, so that no rank needs the whole model in host memory to write its files.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from engine.architecture.model_folder import ADAPTER_CONFIG
from engine.data.chat_template import special_ids
from engine.data.end_tokens import model_ends, template_ends
from engine.model.tensor_file import FileTensor

WEIGHTS = "model.safetensors"
METADATA = {"format": "pt"}
"""What transformers expects in the header of a weight file."""

LARGEST_FILE_BYTES = 50 * 10**9
"""A larger model is saved in several files, as transformers does: the hub takes no larger ones."""


@dataclass(frozen=True)
class SavedPart:
    """A tensor of the model, and what is saved of it."""

    name: str
    """The tensor's name in the model's state dict."""
    entries: tuple[FileTensor, ...]
    """The tensors in the file, in order; several for fused experts."""
    model: PreTrainedModel
    as_it_is: bool
    """The file holds the tensor itself, perhaps by another name. Interleaved rows have the same shape, too."""

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    def in_file(self, whole: Tensor) -> Iterator[Tensor]:
        """Yield the tensors of `entries`, computed from `whole`, the model's tensor in host memory."""
        if self.as_it_is:
            yield whole
            return
        converted = revert_weight_conversion(self.model, {self.name: whole})
        for entry in self.entries:
            yield converted[entry.name]


def saved_parts(model: PreTrainedModel) -> list[SavedPart] | None:
    """What is saved of each tensor of `model`, whole also if it is sharded: tied weights once, larger dtypes first as
    safetensors wants them. None if transformers can only convert several tensors together."""
    shown = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in _distinct(model)}
    together = revert_weight_conversion(model, dict(shown))
    names = {id(tensor): name for name, tensor in shown.items()}
    parts = [
        SavedPart(names[id(tensor)], (FileTensor.like(name, tensor),), model, True)
        for name, tensor in together.items() if id(tensor) in names
    ]  # fmt: skip
    for name in shown.keys() - {part.name for part in parts}:
        try:
            alone = revert_weight_conversion(model, {name: shown[name]})
        except ValueError:  # it lacks the others
            return None
        parts.append(SavedPart(name, tuple(FileTensor.like(*item) for item in alone.items()), model, False))
    found = {entry.name: entry for part in parts for entry in part.entries}
    if found != {name: FileTensor.like(name, tensor) for name, tensor in together.items()}:
        return None
    return sorted(parts, key=lambda part: (-part.entries[0].dtype.itemsize, -part.size_bytes, part.name))


def deal(parts: Sequence[SavedPart], ranks: int = 1) -> dict[str, list[SavedPart]]:
    """Divide `parts` among files of about the same size: {file name: what it holds}. A rank writes those number `rank`,
    `rank + ranks`, …"""
    total_bytes = sum(part.size_bytes for part in parts)
    count = min(len(parts), ranks * math.ceil(total_bytes / (ranks * LARGEST_FILE_BYTES)))
    if count == 1:
        return {WEIGHTS: list(parts)}
    stem, _, suffix = WEIGHTS.partition(".")
    return {f"{stem}-{first + 1:05d}-of-{count:05d}.{suffix}": list(parts[first::count]) for first in range(count)}


def entries_of(parts: Sequence[SavedPart]) -> list[FileTensor]:
    return [entry for part in parts for entry in part.entries]


def write_index(folder: Path, files: Mapping[str, Sequence[SavedPart]]) -> None:
    """Write the index that tells transformers in which of several files (as from `deal`) each tensor is."""
    if len(files) == 1:
        return
    entries = [(entry, file) for file, parts in files.items() for entry in entries_of(parts)]
    index = {
        "metadata": {"total_size": sum(entry.size_bytes for entry, _ in entries)},
        "weight_map": {entry.name: file for entry, file in entries},
    }
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def _distinct(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the state dict that are saved, by name. Of names that share a tensor, the one is kept that
    transformers reads the others from."""
    tied, ignored = model.all_tied_weights_keys or {}, model._keys_to_ignore_on_save or ()
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in ignored}
    kept: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name in tied):
        kept.setdefault(id(state[name]), name)
    for name in state:
        if kept[id(state[name])] == name:
            yield name, state[name]


GENERATION_CONFIG = "generation_config.json"


def end_token_ids(defaults: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all tokens that end an answer: those of the model's generation config `defaults` that this tokenizer,
    which may not be the model's own, has as end tokens of its model or as special tokens; the tokenizer's end of
    sequence; and those with which the chat template ends answers. The model's come first, in their order."""
    named = getattr(defaults, "eos_token_id", None)
    of_model = named if isinstance(named, list) else [named]
    known = special_ids(tokenizer).union(model_ends(tokenizer))
    found = [*(token for token in of_model if token in known), tokenizer.eos_token_id, *template_ends(tokenizer)]
    return list(dict.fromkeys(int(token) for token in found if token is not None))


def save_generation_config(folder: Path, defaults: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the model's generation config with every token that ends an answer: a base that was trained on a chat
    template ends its turns with a token that its own config does not list, and servers would generate past it."""
    config = copy.deepcopy(defaults) if defaults is not None else GenerationConfig()
    ends = end_token_ids(defaults, tokenizer)
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    if config.pad_token_id is None and tokenizer.pad_token_id is not None:
        config.pad_token_id = int(tokenizer.pad_token_id)
    # Not save_pretrained, which refuses sampling settings that published models have.
    config.to_json_file(folder / GENERATION_CONFIG)


def name_base(adapter: Path, base: str | None) -> None:
    """Name the base of a saved adapter, a hub id or a folder of this machine, as peft opens it (None: one that has no
    place yet). Remove the model card that peft writes, which names it too."""
    (adapter / "README.md").unlink(missing_ok=True)
    path = adapter / ADAPTER_CONFIG
    config = json.loads(path.read_text("utf-8"))
    known = base if base and (is_hub_id(base) or Path(base).is_dir()) else None
    config["base_model_name_or_path"] = str(Path(known).resolve()) if known and Path(known).is_dir() else known
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def is_hub_id(name: str) -> bool:
    """Whether `name` can be a hub id: no path, and no folder on this machine."""
    return not name.startswith(("/", ".", "~")) and name.count("/") <= 1 and not Path(name).exists()
