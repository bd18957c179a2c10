"""A loaded model: its trained parameters, and how its weights are saved and restored.

An adapter is saved as PeftModel.from_pretrained expects, a full model as transformers' from_pretrained does, both with
the tokenizer. A base model that exists nowhere else (built-in, or random) is saved in `base/` beside its adapter.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine.config.schema.recipe import Recipe
from engine.data.images import ImageProcessor
from engine.device.base import Device
from engine.distributed.sharded_files import own_rows
from engine.errors import UsageError
from engine.model.adapted_experts import AdaptersInGroups
from engine.model.adapters import Coverage
from engine.model.attention import attention_by_part
from engine.model.config import auto_class, processor_files
from engine.model.dropout import follow_checkpoints
from engine.model.fused import FusedModules
from engine.model.precision import Precision
from engine.model.reference import BASE_FOLDER
from engine.model.result_files import (
    METADATA,
    WEIGHTS,
    deal,
    entries_of,
    name_base,
    save_generation_config,
    saved_parts,
    write_index,
)
from engine.model.saved_adapter import ADAPTER, adapter_tensors
from engine.model.tensor_file import FileTensor, Hashes, expect_shape, read_tensors, saved_shapes, write_tensors
from engine.model.tiled_mlp import MlpTiles, tiles_of
from engine.model.trained import checkpointing_layers, decoder_of, names_of
from engine.model.weight_account import WeightAccount


@dataclass
class LoadedModel:
    """A model with adapters or frozen parameters, ready to train on its device, able to save and load its weights."""

    model: PreTrainedModel | PeftModel
    kind: Literal["adapter", "model"]
    config: PreTrainedConfig
    coverage: Coverage
    device: Device
    precision: Precision
    attention: str
    """transformers' name of the attention kernel in use."""
    base_exists_elsewhere: bool = True
    """False for a base model that was created in this run and is therefore saved beside its adapter."""
    notices: list[str] = field(default_factory=list)
    """Messages to show the user before the run starts."""
    loading: str = ""
    """If weights are sharded, how they came to the ranks, in words; else empty."""
    checkpointing: int = 0
    """How many decoder layers recompute their activations in backward (gradient checkpointing)."""
    recompute_order: tuple[int, ...] = ()
    """The decoder layers in the order in which they become recomputed ones; empty: from the first to the last."""
    shards: dict[str, Parameter] | None = None
    """If weights are sharded, this rank's shards of the trained parameters, by name (see `plain_name`); else None."""
    first_elements: dict[str, int] = field(default_factory=dict)
    """If weights are sharded, by name: flat index in the whole parameter of this rank's first element."""
    copy_to_host: Callable[[Tensor], Tensor] | None = None
    """Copies a tensor to the host for saving; None: `device.staged`."""
    attends_to_padding: bool = True
    """Whether padding on the right may influence the tokens before it (`attention.attends_to_later_tokens`)."""
    images: ImageProcessor | None = None
    """The image processor, saved beside every result; None for a run without images."""
    positions_scaled: bool = False
    """Whether the recipe scales rotary positions: an adapter is then saved with the config that its base needs."""
    expert_adapters: AdaptersInGroups | None = None
    """The adapters on experts that are computed in groups; None: none."""
    fused: FusedModules | None = None
    """What of the decoder layers is computed by fused kernels; None: nothing."""
    tiles: MlpTiles | None = None
    """The feed-forward blocks that can be computed in pieces; None: no block."""
    accounts: list[WeightAccount] = field(default_factory=list)
    """What was read of the files of base and adapter."""
    changed_base: tuple[str, ...] = ()
    """Layers whose weights the adapter replaced (PiSSA, OLoRA): `adapter_off` does not give the base."""
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    """Set by `load_model`. A simulated model has none."""

    @property
    def base(self) -> PreTrainedModel:
        if isinstance(self.model, PeftModel):
            return cast(PreTrainedModel, self.model.get_base_model())
        return self.model

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """None if forward passes run in the dtype of the weights."""
        return self.precision.autocast

    @property
    def needs_loss_scaling(self) -> bool:
        return self.precision.needs_loss_scaling

    def trainable(self) -> list[tuple[str, Parameter]]:
        """(name, parameter) of each trained parameter, or this rank's shard, in the model's order; a tied weight once.
        Names are without peft's wrapping: "model.layers.0.self_attn.q_proj.lora_A.weight"."""
        if self.shards is not None:
            return list(self.shards.items())
        return [(plain_name(name), p) for name, p in self.model.named_parameters() if p.requires_grad]

    def names_of(self, trained: Iterable[str]) -> dict[str, list[str]]:
        """The other names of each trained parameter, of a tied weight, by its name."""
        return names_of(self.model, trained, plain_name)

    def local_parameters(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of every parameter, or of this rank's shard."""
        return [(name, local_part(parameter)) for name, parameter in self.model.named_parameters()]

    @property
    def adapter_is_all(self) -> bool:
        """Whether everything that is trained belongs to the adapter, so that `adapter_off` gives the base model."""
        if not isinstance(self.model, PeftModel) or self.changed_base:
            return False
        of_adapter = set(map(id, adapter_tensors(self.model).values()))
        return all(id(parameter) in of_adapter for parameter in self.model.parameters() if parameter.requires_grad)

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """The model without its adapter. Afterwards peft wants gradients of all adapters; here each weight learns again
        as before."""
        wanted = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        with cast(PeftModel, self.model).disable_adapter():
            yield
        for parameter, requires_grad in wanted:
            parameter.requires_grad_(requires_grad)

    @property
    def layers(self) -> int:
        """Decoder layers, each of which may recompute its activations: the largest value of `checkpointing`."""
        return max(1, len(self._layers))

    @property
    def recomputable_layers(self) -> int:
        """`layers`; 0 for a model that does not support gradient checkpointing."""
        return self.layers if self.base.supports_gradient_checkpointing else 0

    @cached_property
    def _layers(self) -> list[nn.Module]:
        return list(checkpointing_layers(decoder_of(self.base)))

    def set_checkpointing(self, layers: bool | int) -> None:
        """Recompute the activations of so many decoder layers, the first of `recompute_order`; True: of all, False: of
        none. A vision encoder recomputes its own if any does. A model that decides for all layers at once recomputes
        all or none. Checkpointing is non-reentrant, so the embeddings need no hook that makes their output require
        gradients."""
        base = self.base
        on = layers is not False and layers > 0
        if on and not base.supports_gradient_checkpointing:
            self.notices.append(f"{base.config.model_type} does not support gradient checkpointing, which stays off")
            return
        # transformers calls it activation checkpointing since 5.23, before that gradient checkpointing.
        kind = "activation" if hasattr(base, "activation_checkpointing_enable") else "gradient"
        if on:
            getattr(base, f"{kind}_checkpointing_enable")(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
            base.disable_input_require_grads()
            follow_checkpoints(self.model)
        elif self.checkpointing:
            getattr(base, f"{kind}_checkpointing_disable")()
        self.checkpointing = 0 if not on else self.layers if layers is True else min(layers, self.layers)
        for layer in self._in_order()[self.checkpointing :] if on else ():
            for module in layer.modules():
                if "gradient_checkpointing" in vars(module):
                    vars(module)["gradient_checkpointing"] = False

    @property
    def mlp_tiles(self) -> int:
        return 1 if self.tiles is None else self.tiles.count

    def set_mlp_tiles(self, count: int) -> None:
        """Compute feed-forward blocks in so many pieces of each sequence, as far as the model allows it."""
        if self.tiles is not None:
            self.tiles.count = count

    def _in_order(self) -> list[nn.Module]:
        """The layers in the order in which they become recomputed ones."""
        if len(self.recompute_order) != len(self._layers):
            return self._layers
        return [self._layers[layer] for layer in self.recompute_order]

    def use_attention(self, kernel: str) -> None:
        self.base.set_attn_implementation(attention_by_part(self.base.config, kernel))
        self.attention = kernel

    def save(self, folder: Path) -> Hashes:
        """Write the weights as safetensors in the training dtype, and the tokenizer; returns hashes of files hashed
        while written. Allocates host memory only: for a full model, one tensor at a time."""
        folder.mkdir(parents=True, exist_ok=True)
        with self.device.host_region():
            if isinstance(self.model, PeftModel):
                hashes = self._save_adapter(self.model, folder)
            else:
                hashes = self._save_model(self.model, folder)
            self._save_tokenizer(folder)
        return hashes

    def save_beside_weights(self, folder: Path) -> None:
        """Write all files of a full model except its weights: config, tokenizer, image processor."""
        assert isinstance(self.model, PreTrainedModel)
        folder.mkdir(parents=True, exist_ok=True)
        with self.device.host_region():
            self._save_config(self.model, folder)
            self._save_tokenizer(folder)

    def load_weights(self, folder: Path) -> None:
        """Copy weights that `save` wrote into the parameters in place, so that optimizers keep their references; of a
        sharded parameter, this rank's rows. UsageError: the folder has other parameters than this model trains."""
        with self.device.host_region(), torch.no_grad():
            saved, targets = set(saved_shapes(folder)), self._targets()
            # A full result has tensors of the base that the class does not read.
            copied = set() if isinstance(self.model, PeftModel) else saved - set(targets)
            if saved - copied == set(targets):
                read_tensors(folder, targets)
            elif isinstance(self.model, PeftModel):
                raise _other_parameters(folder, saved, set(targets))
            else:
                copied = set(self._load_converted(folder))
        files = tuple(sorted(path.name for path in folder.glob("*.safetensors")))
        unread = dict.fromkeys(sorted(copied), f"{type(self.base).__name__} does not read it")
        count = len(saved)
        self.accounts.append(WeightAccount("checkpoint", str(folder), files, count, count - len(unread), unread))

    def _save_model(self, model: PreTrainedModel, folder: Path) -> Hashes:
        parts = None if self.copy_to_host else saved_parts(model)
        if parts is None:
            model.save_pretrained(str(folder), state_dict=self._on_host(model.state_dict()))
            return {}
        self._save_config(model, folder)
        state, files, hashes = model.state_dict(), deal(parts), Hashes()
        for name, held in files.items():
            tensors = (tensor for part in held for tensor in part.in_file(self.device.staged(state[part.name])))
            hashes[folder / name] = write_tensors(folder / name, entries_of(held), tensors, METADATA)
        write_index(folder, files)
        return hashes

    def _save_config(self, model: PreTrainedModel, folder: Path) -> None:
        model.save_pretrained(str(folder), state_dict={})
        (folder / WEIGHTS).unlink(missing_ok=True)  # of no tensors

    def _save_tokenizer(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        save_generation_config(folder, self.base.generation_config, self.tokenizer)
        if self.images is not None:
            self.images.save(folder)
        elif self.kind == "model":
            for path in processor_files(self.base.name_or_path or "", getattr(self.config, "_commit_hash", None)):
                shutil.copyfile(path, folder / path.name)

    def _save_adapter(self, model: PeftModel, folder: Path) -> Hashes:
        hashes = Hashes()
        if not self.base_exists_elsewhere:
            hashes = self._save_base(model, folder / BASE_FOLDER)
        elif self.positions_scaled:
            self.base.config.save_pretrained(folder)
        staged = _with_adapter_prefix(model, self._on_host(_adapter_state(model)))
        model.save_pretrained(str(folder), state_dict=staged, save_embedding_layers=False)
        name_base(folder, None if not self.base_exists_elsewhere else self.base.name_or_path)
        return hashes

    def _save_base(self, model: PeftModel, folder: Path) -> Hashes:
        clean = {}
        for name, tensor in model.get_base_model().state_dict().items():
            if ".lora_" in name or ".modules_to_save." in name or ".trainable_tokens_" in name:
                continue
            clean[_unwrapped(name.replace(".token_adapter.", ".")).replace(".original_module.", ".")] = tensor
        self.base.config.save_pretrained(folder)
        return _write_weights(self._on_host(clean), folder)

    def _on_host(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the host, one by one; those that share storage share a copy, so tied weights remain tied."""
        copies: dict[tuple[int, torch.Size], Tensor] = {}
        staged = {}
        for name, tensor in state.items():
            key = (local_part(tensor).data_ptr(), tensor.shape)
            if key not in copies:
                copies[key] = (self.copy_to_host or self.device.staged)(tensor)
            staged[name] = copies[key]
        return staged

    def _targets(self) -> dict[str, Tensor]:
        """The tensors that `save` writes, not copies, by their names in the file."""
        if isinstance(self.model, PeftModel):
            return _adapter_state(self.model)
        tied = self.model.all_tied_weights_keys or {}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}

    def _load_converted(self, folder: Path) -> list[str]:
        """Let transformers convert names or shapes other than the model's (fused experts) on the host. Returns the
        names of tensors that it does not read."""
        options = {"dtype": self.precision.weights, "use_safetensors": True, "attn_implementation": "eager"}
        # The folder's config may name a kernel.
        saved, report = auto_class(self.config).from_pretrained(folder, output_loading_info=True, **options)
        source, target = saved.state_dict(), self.model.state_dict()
        if source.keys() != target.keys():
            raise _other_parameters(folder, set(source), set(target))
        for name, tensor in source.items():
            expect_shape(target[name], tensor.shape, name)
            whole = target[name]
            local_part(whole).copy_(tensor[own_rows(whole)] if isinstance(whole, DTensor) else tensor)
        return sorted(report["unexpected_keys"])


def tile_mlps(loaded: LoadedModel, recipe: Recipe) -> None:
    """Compute feed-forward blocks in as many pieces as the recipe asks for, and prepare them for more: the ladder may
    ask. Call this after `load.fuse_modules`, whose kernels compute the pieces."""
    train = recipe.train
    if train.compile or (train.mlp_tiles == 1 and "tile_mlp" not in recipe.backoff.ladder):
        return
    # Autocast would cast the weights for each piece anew.
    loaded.tiles = None if loaded.autocast_dtype else tiles_of(loaded.model, loaded.base)
    loaded.set_mlp_tiles(train.mlp_tiles)
    if loaded.tiles is None and train.mlp_tiles > 1:
        loaded.notices.append("train.mlp_tiles has no effect here: feed-forward blocks are computed whole")


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def plain_name(name: str) -> str:
    """A parameter's dotted name without the parts that peft's wrappers add."""
    bare = name.removeprefix("base_model.model.").replace(f".modules_to_save.{ADAPTER}.", ".")
    return _unwrapped(bare.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}"))


def _unwrapped(name: str) -> str:
    # For fused experts, peft nests a wrapper per weight: only `.base_layer` before `.lora_` tells their adapters apart.
    return re.sub(r"(?:\.base_layer)++\.(?!lora_)", ".", name)


def _adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """The adapter's own tensors, not copies, by their names in a saved adapter file."""
    return {name: tensor.detach() for name, tensor in adapter_tensors(model).items()}


def _with_adapter_prefix(model: PeftModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename from names in an adapter file to those in the model's state dict, from which save_pretrained picks the
    adapter's entries. A tied weight appears under both of its names."""
    staged = {id(tensor): state[name] for name, tensor in adapter_tensors(model).items()}
    live = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    return {name: staged[tensor] for name, tensor in live.items() if tensor in staged}


def _write_weights(state: dict[str, Tensor], folder: Path) -> Hashes:
    unique: dict[int, str] = {}
    for name, tensor in state.items():
        unique.setdefault(tensor.data_ptr(), name)
    names = sorted(unique.values(), key=lambda name: (-state[name].dtype.itemsize, name))
    entries = [FileTensor.like(name, state[name]) for name in names]
    return {folder / WEIGHTS: write_tensors(folder / WEIGHTS, entries, (state[name] for name in names), METADATA)}


def _other_parameters(folder: Path, saved: set[str], present: set[str]) -> UsageError:
    odd = sorted(saved ^ present)
    return UsageError(
        f"{folder} has different parameters than this model trains ({len(odd)} differ, such as {odd[0]})",
        expected="the model and method the checkpoint was written with",
        fix="resume without changing model and method",
    )
