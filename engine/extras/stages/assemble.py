"""Assembles dense models of the same shape into a mixture of experts: tensors copied between safetensors files, and
router rows from hidden states."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.architecture.assembled import (
    MIXTURES,
    SHARD_BYTES,
    SHARED_EXPERT_WIDTH,
    MixtureFamily,
    assembled_config,
    problems_of_experts,
)
from engine.architecture.model_folder import ADAPTER_CONFIG
from engine.config.name_patterns import compile_patterns
from engine.config.schema.run import RunSpec
from engine.data.prepare import prepare_data
from engine.data.tokens import TokenData
from engine.device.oom import classify
from engine.device.open import open_device
from engine.errors import EnvironmentProblem, MemoryExhaustedError, UsageError
from engine.journal.files import flush
from engine.model.load import LoadedModel, load_and_tell
from engine.model.reopened import NotTriedError, PlainRequest, account_of_result, open_plainly
from engine.model.tokenizer import load_tokenizer
from engine.model.weight_account import WeightAccount

SAMPLES = 64
"""Most samples of each expert's data; more would change the mean of thousands of tokens very little."""


def hidden_router_rows(
    base: RunSpec, experts: Sequence[RunSpec], notify: Callable[[str], None]
) -> Callable[[int], Tensor]:
    """Run `base` over samples of each expert's data. Returns a function from a layer's number to its router weights,
    fp32 [experts, hidden]: the mean input of its feed-forward block per expert, minus the mean over experts, scaled to
    length 1.

    If all experts have equal data all rows are zero: the router then has to learn everything. Raises
    MemoryExhaustedError when one sample does not fit.
    """
    device = open_device(base)
    with device.activate():
        tokenizer = load_tokenizer(base.recipe.model, trust_remote_code=base.limits.trust_remote_code)
        with device.host_region():
            data = [prepare_data(expert, tokenizer, notify=notify).train for expert in experts]
        loaded = load_and_tell(base, device, tokenizer, notify)
        means = []
        for number, samples in enumerate(data, 1):
            notify(f"hidden states of expert {number} of {len(data)}")
            means.append(_layer_means(loaded, samples))
    means_ELH = torch.stack(means)
    centred_ELH = means_ELH - means_ELH.mean(dim=0, keepdim=True)
    rows_ELH = centred_ELH / centred_ELH.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return lambda layer: rows_ELH[:, layer]


def _layer_means(loaded: LoadedModel, data: TokenData) -> Tensor:
    """Mean input of each layer's feed-forward block over up to SAMPLES samples: fp32 [layers, hidden], on the host."""
    decoder = loaded.base.get_decoder()
    layers = decoder.layers
    sums_LH = torch.zeros(len(layers), loaded.base.config.get_text_config().hidden_size)
    tokens = 0

    def add(layer: int, hidden_BSH: Tensor) -> None:
        sums_LH[layer] += hidden_BSH.detach().float().sum(dim=(0, 1)).cpu()

    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _module, inputs, index=index: add(index, inputs[0]))
        for index, layer in enumerate(layers)
    ]
    was_training = loaded.model.training
    loaded.model.eval()
    try:
        with torch.no_grad():
            for row in range(min(SAMPLES, len(data))):
                ids_BS = torch.as_tensor(data[row].input_ids, dtype=torch.long).unsqueeze(0)
                decoder(input_ids=ids_BS.to(loaded.device.torch_device))
                tokens += ids_BS.shape[1]
    except (RuntimeError, MemoryError) as error:
        if classify(error) is None:
            raise
        raise MemoryExhaustedError(
            "a sample of an expert does not fit in memory with the model while hidden states are collected",
            fix='lower data.max_length, or set router = "random" in the stage that assembles',
        ) from error
    finally:
        loaded.model.train(was_training)
        for hook in hooks:
            hook.remove()
    return sums_LH / max(tokens, 1)


FEED_FORWARD = re.compile(r"^(model\.layers\.(\d+)\.)mlp\.(gate_proj|up_proj|down_proj)\.weight$")
"""A tensor of the dense model that becomes a tensor of each expert."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
COPIED_FILES = (
    *TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
"""Copied from the first expert's folder, where they exist."""


@dataclass(frozen=True)
class Expert:
    """One dense model: its name in messages, and its folder."""

    name: str
    folder: Path


@dataclass
class Difference:
    """The largest difference between experts in a shared parameter: largest absolute difference divided by the first
    expert's largest absolute value."""

    parameter: str = ""
    relative: float = 0.0
    averaged: list[str] = field(default_factory=list)
    account: WeightAccount | None = None
    """What is in the mixture, once it is complete."""

    def note(self, parameter: str, relative: float) -> None:
        if relative > self.relative:
            self.parameter, self.relative = parameter, relative


@dataclass(frozen=True)
class Mixture:
    experts: Sequence[Expert]
    per_token: int
    shared: Sequence[str]
    """Glob patterns of parameters to take from the first expert where the experts differ; others are averaged."""
    seed: int
    router_rows: Callable[[int], Tensor] | None = None
    """Maps a layer's number to its router weights, fp32 [experts, hidden]; None: random weights."""


def assemble_experts(mixture: Mixture, target: Path, notify: Callable[[str], None]) -> Difference:
    """Write the mixture to `target`, which appears complete or not at all; returns how much the experts' shared weights
    differ.

    Raises UsageError with every reason why the experts cannot be assembled; EnvironmentProblem: `target` not writable,
    or transformers alone does not open the mixture.
    """
    config = _checked_config(mixture)
    draft = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    difference = Difference()
    try:
        draft.mkdir(parents=True)
        _write_shards(draft, _tensors(mixture, config, difference, notify))
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in COPIED_FILES:
            if (mixture.experts[0].folder / name).is_file():
                shutil.copyfile(mixture.experts[0].folder / name, draft / name)
        difference.account = _opened(draft, notify)
        for file in draft.iterdir():
            flush(file)
        flush(draft)
        draft.rename(target)
    except OSError as error:
        raise EnvironmentProblem(
            f"the mixture of experts cannot be written to {target}: {error.strerror or error}",
            fix="free space on that disk",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return difference


TRIED = tuple(range(1, 9))
"""Token ids, which every vocabulary has."""


def _opened(draft: Path, notify: Callable[[str], None]) -> WeightAccount:
    """Open the mixture without our code. There is no other computation to compare its logits with."""
    notify("opening the mixture without Tunedeck")
    size = sum(file.stat().st_size for file in draft.glob("*.safetensors"))
    request = PlainRequest(
        name="the mixture", model=str(draft), config=str(draft), auto_class="AutoModelForCausalLM",
        token_rows=(TRIED,), attention="eager", size_bytes=size,
    )  # fmt: skip
    try:
        answer = open_plainly(request)
    except NotTriedError as reason:
        return account_of_result(draft, {}, f"not opened: {reason}", source="assembled", path="model")
    told = (
        f"with transformers alone: every weight is in a file, largest logit {float(answer.logits[0].abs().max()):.2g}"
    )
    return account_of_result(draft, {}, told, source="assembled", path="model")


def _checked_config(mixture: Mixture) -> dict[str, Any]:
    """The mixture's config.json. Raises UsageError with every reason why the experts cannot be assembled."""
    experts = mixture.experts
    adapters = [expert for expert in experts if (expert.folder / ADAPTER_CONFIG).is_file()]
    if adapters:
        names = ", ".join(expert.name for expert in adapters)
        raise UsageError(
            f"cannot assemble adapters: {names}", expected="full models", fix="set finish.merge = true in those stages"
        )
    configs = [json.loads((expert.folder / "config.json").read_text("utf-8")) for expert in experts]
    problems = problems_of_experts([expert.name for expert in experts], configs)
    problems += _differing_tokenizers(experts)
    if not problems:
        problems += _differing_tensors(experts)
    if mixture.per_token > len(experts):
        problems.append(f"{mixture.per_token} experts per token of {len(experts)}")
    if problems:
        found = "these models cannot be assembled:\n  " + "\n  ".join(problems)
        raise UsageError(found, fix="change `from` of the stage")
    return assembled_config(configs[0], len(experts), mixture.per_token)


def _differing_tokenizers(experts: Sequence[Expert]) -> list[str]:
    problems = []
    for name in TOKENIZER_FILES:
        first = experts[0].folder / name
        for expert in experts[1:]:
            own = expert.folder / name
            if first.is_file() and own.is_file() and first.read_bytes() != own.read_bytes():
                problems.append(f"{expert.name}: {name} differs from that of {experts[0].name}")
    return problems


def _differing_tensors(experts: Sequence[Expert]) -> list[str]:
    """One sentence for each expert with a tensor of another name, shape or dtype than the first expert's."""
    first, *others = [_layout(expert.folder) for expert in experts]
    problems = []
    for expert, layout in zip(experts[1:], others, strict=True):
        for name in sorted(first.keys() | layout.keys()):
            if first.get(name) != layout.get(name):
                found, wanted = layout.get(name, "missing"), first.get(name, "missing")
                problems.append(f"{expert.name}: {name} is {found}, in {experts[0].name} {wanted}")
                break  # one is enough to see that the models differ
    return problems


def _layout(folder: Path) -> dict[str, str]:
    """Map each tensor name to "dtype shape"; only headers are read."""
    layout = {}
    for name, file in _files(folder).items():
        with safe_open(file, framework="pt") as opened:
            part = opened.get_slice(name)
            layout[name] = f"{part.get_dtype()} {list(part.get_shape())}"
    return layout


def _files(folder: Path) -> dict[str, Path]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found


def _read(files: dict[str, Path], name: str) -> Tensor:
    with safe_open(files[name], framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _tensors(
    mixture: Mixture, config: dict[str, Any], difference: Difference, notify: Callable[[str], None]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the mixture, with the names of its family."""
    files = [_files(expert.folder) for expert in mixture.experts]
    dense = json.loads((mixture.experts[0].folder / "config.json").read_text("utf-8"))
    family = MIXTURES[dense["model_type"]]
    done: set[int] = set()
    for name in sorted(files[0], key=_order):
        matched = FEED_FORWARD.match(name)
        if matched is None:
            yield name, _shared_tensor(name, files, mixture, difference)
            continue
        prefix, layer, projection = matched[1], int(matched[2]), matched[3]
        if layer not in done:
            done.add(layer)
            notify(f"assembling layer {layer + 1} of {dense['num_hidden_layers']}")
            yield from _layer_tensors(family, prefix, layer, mixture, config, _read(files[0], name).dtype)
        for number, own in enumerate(files):
            expert = family.experts.format(expert=number)
            yield f"{prefix}{expert}.{family.projections[projection]}.weight", _read(own, name)


def _order(name: str) -> tuple[int, str]:
    matched = re.match(r"^model\.layers\.(\d+)\.", name)
    return (int(matched[1]) if matched else -1, name)


def _shared_tensor(name: str, files: Sequence[dict[str, Path]], mixture: Mixture, difference: Difference) -> Tensor:
    """The experts' own value where all agree, else the first expert's (if `mixture.shared` matches) or the fp32 mean.
    Two versions are in memory at a time."""
    first = _read(files[0], name)
    differing = [own for own in files[1:] if not torch.equal(first, _read(own, name))]
    if not differing or compile_patterns(tuple(mixture.shared)).matches(name):
        return first
    largest = max(float((_read(own, name).float() - first).abs().max()) for own in differing)
    difference.note(name, largest / max(float(first.abs().max()), torch.finfo(torch.float32).tiny))
    difference.averaged.append(name)
    total = first.float().clone()
    for own in files[1:]:
        total += _read(own, name)
    return (total / len(files)).to(first.dtype)


def _layer_tensors(
    family: MixtureFamily, prefix: str, layer: int, mixture: Mixture, config: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `layer` that no dense model has: its router, and Qwen2-MoE's shared expert."""
    hidden, scale = int(config["hidden_size"]), float(config.get("initializer_range", 0.02))
    generator = torch.Generator().manual_seed((mixture.seed << 20) + layer)
    rows = torch.randn(len(mixture.experts), hidden, generator=generator) * scale
    if mixture.router_rows is not None:
        rows = mixture.router_rows(layer)
    yield prefix + family.router, rows.to(dtype)
    if family.model_type != "qwen2_moe":
        return
    for projection in ("gate_proj", "up_proj"):
        weight = torch.randn(SHARED_EXPERT_WIDTH, hidden, generator=generator) * scale
        yield f"{prefix}mlp.shared_expert.{projection}.weight", weight.to(dtype)
    yield f"{prefix}mlp.shared_expert.down_proj.weight", torch.zeros(hidden, SHARED_EXPERT_WIDTH, dtype=dtype)
    yield f"{prefix}mlp.shared_expert_gate.weight", torch.zeros(1, hidden, dtype=dtype)


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Files of at most SHARD_BYTES; a larger tensor has a file of its own."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor.contiguous()
    yield shard


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write model-00001-of-0000N.safetensors with an index, a file at a time."""
    files: list[list[str]] = []
    total_bytes = 0
    for shard in _shards(tensors):
        save_file(shard, folder / f"shard-{len(files)}", metadata={"format": "pt"})
        files.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    weight_map = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
