"""The config of a mixture of experts that is assembled from dense models, and why they cannot be assembled. Pure
functions of configs. Each dense family has one mixture family with the same attention, norms and embeddings. Source of
table and defaults: transformers 5.23 (`src/transformers/models/`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]

ASSEMBLED_PREFIX = "assembled:"
"""A mixture that does not exist yet: "assembled:EXPERTS:PER_TOKEN:MODEL". Only plans use it."""

SHARED_EXPERT_WIDTH = 64
"""Width of the shared expert that Qwen2-MoE always has; its output projection is zero, so it adds nothing."""


SHARD_BYTES = 2**30
"""Size at which a file of the assembled model is closed. Its tensors are in host memory until then."""


@dataclass(frozen=True)
class MixtureFamily:
    """The mixture family that dense models of one family become, and the names of its tensors in a checkpoint."""

    model_type: str
    architecture: str
    router: str
    """Name of a layer's router weight, below "model.layers.L."."""
    experts: str
    """An expert's module below "model.layers.L.", with {expert} for its number; `projections` names its weights."""
    projections: Mapping[str, str]
    """Maps the name of a feed-forward projection in the dense model to its name in an expert."""
    defaults: Mapping[str, Any]
    """Keys that a dense config may leave out, with the dense family's defaults: the mixture family has others."""
    own_keys: Callable[[Config, int, int], Config]
    """Maps (dense config, experts, experts per token) to the config keys that only the mixture family has."""


def _mixtral_keys(dense: Config, experts: int, per_token: int) -> Config:
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": per_token,
        "sliding_window": dense.get("sliding_window"),
    }


def _qwen_keys(dense: Config, experts: int, per_token: int) -> Config:
    return {
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": dense["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_keys(dense: Config, experts: int, per_token: int) -> Config:
    shared = {"shared_expert_intermediate_size": SHARED_EXPERT_WIDTH, "qkv_bias": True}
    return {**_qwen_keys(dense, experts, per_token), **shared}


SWIGLU = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _mixtral(defaults: Mapping[str, Any]) -> MixtureFamily:
    return MixtureFamily(
        "mixtral", "MixtralForCausalLM", "block_sparse_moe.gate.weight", "block_sparse_moe.experts.{expert}",
        MIXTRAL_NAMES, {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, **defaults}, _mixtral_keys,
    )  # fmt: skip


MIXTURES: dict[str, MixtureFamily] = {
    "llama": _mixtral({"max_position_embeddings": 2048}),
    "mistral": _mixtral({"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": MixtureFamily(
        "qwen2_moe", "Qwen2MoeForCausalLM", "mlp.gate.weight", "mlp.experts.{expert}", SWIGLU,
        {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}, _qwen2_keys,
    ),
    "qwen3": MixtureFamily(
        "qwen3_moe", "Qwen3MoeForCausalLM", "mlp.gate.weight", "mlp.experts.{expert}", SWIGLU,
        {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
        _qwen_keys,
    ),
}  # fmt: skip
"""The mixture family of each dense model_type."""

DENSE_ONLY = frozenset({
    "model_type", "architectures", "auto_map", "_name_or_path", "transformers_version", "pretraining_tp", "mlp_bias",
    "use_sliding_window", "max_window_layers", "layer_types",
})  # fmt: skip
"""Keys of a dense config that its mixture family does not have, or has with another value."""

SAME_IN_ALL = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "sliding_window",
)  # fmt: skip
"""Keys in which all experts must agree."""


def assembled_config(dense: Config, experts: int, per_token: int) -> Config:
    """Each token goes to `per_token` of `experts`. Raises KeyError for a family that `problems_of_experts` refuses."""
    family = MIXTURES[dense["model_type"]]
    kept = {key: value for key, value in dense.items() if key not in DENSE_ONLY}
    defaults = dict(family.defaults)
    if "rope_parameters" in kept:
        defaults.pop("rope_theta", None)
    filled = {"num_key_value_heads": dense.get("num_attention_heads"), **defaults, **kept}
    own = family.own_keys({**defaults, **dense}, experts, per_token)
    return {**filled, **own, "model_type": family.model_type, "architectures": [family.architecture]}


def problems_of_experts(names: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """Every reason why models with these configs cannot be assembled, each as a line for the user."""
    problems = []
    for name, config in zip(names, configs, strict=True):
        problems += [f"{name}: {reason}" for reason in _problems_of_one(config)]
    first = configs[0]
    for name, config in zip(names[1:], configs[1:], strict=True):
        for key in SAME_IN_ALL:
            if config.get(key) != first.get(key):
                problems.append(f"{name}: {key} = {config.get(key)!r}, {names[0]} has {first.get(key)!r}")
    return list(dict.fromkeys(problems))


def _problems_of_one(config: Config) -> list[str]:
    kind = config.get("model_type")
    found = []
    if kind not in MIXTURES:
        mixture = any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        known = ", ".join(MIXTURES)
        found.append(
            f"model_type {kind!r} "
            f"{'is already a mixture of experts' if mixture else 'has no mixture-of-experts version'}; one of: "
            f"{known}"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            found.append(f"{key} = true, which {'Qwen3-MoE' if kind == 'qwen3' else 'Mixtral'} does not support")
    if config.get("quantization_config"):
        found.append("its weights are quantised")
    if config.get("use_sliding_window"):
        found.append("use_sliding_window = true: sliding-window layers are not supported")
    return found


def parse_assembled(model: str) -> tuple[int, int, str]:
    """(experts, experts per token, model). Raises ValueError for a text of another form."""
    _, experts, per_token, dense = model.split(":", 3)
    return int(experts), int(per_token), dense
