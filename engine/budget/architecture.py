"""The facts of a decoder that decide its memory, read from a `config.json` without torch and without its weights.

Looked for, in this order: the built-in models, a local folder, the hub cache on this machine, the shipped
`profiles/models/*.toml`. Parameter names and shapes follow from these facts in `engine.budget.parameters`.

Try: `python -c "from engine.budget.architecture import *; print(from_config(builtin_config('builtin:tiny')))"`
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import tomli

from engine.budget.families import FAMILIES, Family, Layout
from engine.errors import ConfigNotHereError, UnknownArchitectureError, UsageError
from engine.journal.index import resolve_run
from engine.spec.load import load_run_spec
from engine.spec.run import RunSpec

BUILTIN_PREFIX = "builtin:"
RUN_PREFIX = "run:"


@dataclass(frozen=True)
class Experts:
    """The feed-forward half of a mixture-of-experts layer."""

    count: int
    per_token: int
    intermediate: int
    """Width of one expert."""


@dataclass(frozen=True)
class Architecture:
    """A causal decoder. Sizes are numbers of elements; head_dim is per head."""

    model_type: str
    layout: Layout
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    activation: str
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    wide_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    """For each layer, whether it attends within the window only; empty without one."""
    rotary_share: float = 1.0
    """Part of each head that is turned by position."""
    rotary_tables: int = 1
    """How many pairs of rotary tables a forward pass makes: one for all layers, or one for each kind."""
    buffers: int = 2
    """Small tensors that are not parameters: frequencies of the rotary tables, twice each, and Gemma's scale."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    positions: int | None = None
    """Rows of a learned position table (GPT-2)."""
    experts: Experts | None = None
    default_attention: str = "sdpa"
    max_length: int | None = None
    """Longest sequence the model was made for."""

    @property
    def query_width(self) -> int:
        """Output width of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Output width of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


def from_config(config: Mapping[str, Any]) -> Architecture:
    """Read the facts out of a Hugging Face config; raises UnknownArchitectureError for an unknown family."""
    model_type = str(config.get("model_type", ""))
    if model_type == "gpt2":
        return _from_gpt2(config)
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnknownArchitectureError(
            f"no memory model for model_type {model_type!r}",
            expected=f"one of {', '.join(sorted(FAMILIES))}",
            fix="train without a plan: micro-batches start small and what fits is learned during the run",
        )
    stated = {key: value for key, value in config.items() if value is not None}
    return _from_llama_like(model_type, family, {**family.defaults, **stated})


def _from_llama_like(model_type: str, family: Family, facts: Mapping[str, Any]) -> Architecture:
    """Families whose configs share Llama's key names."""
    try:
        heads, hidden = int(facts["num_attention_heads"]), int(facts["hidden_size"])
        tables = max(1, len(set(_sliding_layers(family, facts)))) if family.rotary_by_kind else 1
        biased = bool(facts.get(family.bias_key, False)) if family.bias_key else False
        return Architecture(
            model_type=model_type,
            layout=family.layout,
            vocab=int(facts["vocab_size"]),
            hidden=hidden,
            intermediate=int(facts.get("intermediate_size", 0)),
            layers=int(facts["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(facts.get("num_key_value_heads", heads)),
            head_dim=int(facts.get("head_dim", hidden // heads)),
            tied=bool(facts.get("tie_word_embeddings", False)),
            activation=str(facts.get("hidden_activation") or facts.get("hidden_act", "silu")),
            qkv_bias=family.qkv_bias or biased,
            output_bias=biased,
            mlp_bias=bool(facts.get(family.mlp_bias_key, False)) if family.mlp_bias_key else False,
            qk_norm=family.qk_norm,
            norms_per_layer=family.norms_per_layer,
            wide_norm=family.wide_norm,
            sliding_window=_window(facts),
            sliding_layers=_sliding_layers(family, facts),
            rotary_share=_rotary_share(facts),
            rotary_tables=tables,
            buffers=2 * tables + family.scaled_embedding,
            attention_softcap=facts.get("attn_logit_softcapping"),
            logit_softcap=facts.get("final_logit_softcapping"),
            experts=_experts(facts) if family.layout in ("mixtral", "qwen3_moe", "gpt_oss") else None,
            default_attention=family.default_attention,
            max_length=facts.get("max_position_embeddings"),
        )
    except KeyError as missing:
        raise UsageError(
            f"the {model_type} config has no {missing}",
            expected="a complete config.json",
            fix="check the folder named by model.id",
        ) from None


def _window(facts: Mapping[str, Any]) -> int | None:
    """Sliding window in tokens; Qwen2 configs carry one that `use_sliding_window = false` switches off."""
    switched_off = "max_window_layers" in facts and not facts.get("use_sliding_window", False)
    return None if switched_off or facts.get("use_sliding_window") is False else facts.get("sliding_window")


def _sliding_layers(family: Family, facts: Mapping[str, Any]) -> tuple[bool, ...]:
    """`layer_types` where the config has them; else by the family's pattern. Qwen slides from max_window_layers on."""
    layers = range(int(facts["num_hidden_layers"]))
    if _window(facts) is None:
        return ()
    if "layer_types" in facts:
        return tuple(kind == "sliding_attention" for kind in facts["layer_types"])
    every = facts.get("sliding_window_pattern", family.full_every)
    first = int(facts.get("max_window_layers", 0)) if "use_sliding_window" in facts else 0
    return tuple(layer >= first and not (every and (layer + 1) % int(every) == 0) for layer in layers)


def _rotary_share(facts: Mapping[str, Any]) -> float:
    """Phi-4-mini turns three quarters of each head; the key moved into rope_parameters with transformers 5."""
    rope = facts.get("rope_parameters") or {}
    return float(rope.get("partial_rotary_factor", facts.get("partial_rotary_factor", 1.0)))


def _experts(facts: Mapping[str, Any]) -> Experts:
    """Mixtral and gpt-oss say num_local_experts, Qwen3-MoE num_experts."""
    return Experts(
        count=int(facts["num_experts"] if "num_experts" in facts else facts["num_local_experts"]),
        per_token=int(facts["num_experts_per_tok"]),
        intermediate=int(facts.get("moe_intermediate_size", facts.get("intermediate_size", 0))),
    )


def _from_gpt2(config: Mapping[str, Any]) -> Architecture:
    """GPT-2's own key names: n_embd, n_layer, n_head, n_positions; every linear layer and norm has a bias."""
    hidden, heads = int(config["n_embd"]), int(config["n_head"])
    return Architecture(
        model_type="gpt2",
        layout="gpt2",
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        intermediate=int(config.get("n_inner") or 4 * hidden),
        layers=int(config["n_layer"]),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        tied=bool(config.get("tie_word_embeddings", True)),
        activation=str(config.get("activation_function", "gelu_new")),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        buffers=0,
        positions=int(config.get("n_positions", 1024)),
        max_length=int(config.get("n_positions", 1024)),
    )


def find_architecture(spec: RunSpec) -> Architecture:
    """The facts of the model a run starts from.

    Raises ConfigNotHereError when no config can be found on this machine, UsageError for an unknown family or a folder
    that does not exist.
    """
    return from_config(find_config(spec.recipe.model.id, spec.recipe.model.revision))


def find_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """The config of a built-in model, local folder, cached hub model or shipped entry, as its JSON would have it."""
    if model.startswith(BUILTIN_PREFIX):
        return builtin_config(model)
    if model.startswith(RUN_PREFIX):
        return _config_of_run(model)
    local = Path(model).expanduser()
    if local.is_dir():
        return _read_json(local / "config.json")
    if local.is_absolute() or model.startswith("."):
        raise UsageError(f"the model folder {model} does not exist", fix="check model.id")
    cached = _cached_config(model, revision)
    if cached is not None:
        return _read_json(cached)
    shipped = shipped_configs().get(model.lower())
    if shipped is not None:
        return dict(shipped)
    raise ConfigNotHereError(
        f"no config.json of {model!r} on this machine",
        expected="a folder with a config.json, a model in the hub cache, or one of the shipped profiles/models",
        fix=f"download it once with: hf download {model} config.json",
    )


def _config_of_run(model: str) -> dict[str, Any]:
    """What an earlier run started from has the shape of what it made."""
    text = model.removeprefix(RUN_PREFIX).partition("@")[0]
    start = load_run_spec(resolve_run(text, None).run_toml).recipe.model
    return find_config(start.id, start.revision)


def builtin_config(name: str) -> dict[str, Any]:
    """The config of "builtin:NAME": the one place its numbers are kept is profiles/models/builtin-NAME.toml."""
    config = shipped_configs().get(name)
    if config is None or not name.startswith(BUILTIN_PREFIX):
        known = ", ".join(sorted(key for key in shipped_configs() if key.startswith(BUILTIN_PREFIX)))
        raise UsageError(f"no built-in model {name!r}", expected=known, fix="set model.id to one of them")
    return dict(config)


@lru_cache(maxsize=1)
def shipped_configs() -> dict[str, dict[str, Any]]:
    """Lower-case model id = config, over every `profiles/models/*.toml` (one file may describe several ids)."""
    configs: dict[str, dict[str, Any]] = {}
    for entry in shipped_entries():
        for model in entry["ids"]:
            configs[str(model).lower()] = dict(entry["config"])
    return configs


def shipped_entries() -> Iterator[dict[str, Any]]:
    """The parsed files of profiles/models: `ids`, `source`, `parameters`, and the table `config`."""
    for path in sorted(resources.files("profiles").joinpath("models").iterdir(), key=lambda item: item.name):
        if path.name.endswith(".toml"):
            yield tomli.loads(path.read_text(encoding="utf-8"))


def _cached_config(model: str, revision: str | None) -> Path | None:
    """config.json in the hub cache's layout: models--OWNER--NAME/refs/REVISION names the folder under snapshots/."""
    repository = _hub_cache() / ("models--" + model.replace("/", "--"))
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision or ""
    config = repository / "snapshots" / commit / "config.json"
    return config if commit and config.is_file() else None


def _hub_cache() -> Path:
    """Where huggingface_hub keeps repositories: $HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def _read_json(path: Path) -> dict[str, Any]:
    """A config file as a dict; raises UsageError when it is absent or not JSON."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            expected="the model's config.json",
            fix="check the folder named by model.id",
        ) from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path} does not hold a JSON object", fix="check the folder named by model.id")
    return loaded
