"""Which model families cannot be trained, or not with these adapters, judged by a model's config alone.

So a run is refused before its weights are downloaded. What a config does not contain, the engine finds when it loads
the model (`engine.model.config`, `engine.model.adaptable`). The tables are facts of transformers 5.23 and peft 0.21;
tests/model/test_families.py compares them with the installed packages.

Try: `tunedeck recipes check FILE`, with model.id = a folder of an encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.budget.architecture.positions import text_of
from engine.errors import UsageError
from engine.spec.schema.recipe import Method, Recipe

ENCODERS = frozenset(
    {
        "albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
        "electra", "ernie", "esm", "esmc", "eurobert", "flaubert", "fnet", "funnel", "gte", "ibert",
        "jina_embeddings_v3", "layoutlm", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert",
        "modernvbert", "mpnet", "mra", "neomme", "nomic_bert", "nystromformer", "perceiver", "reformer", "rembert",
        "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert", "tapas", "ultrabert", "ultravbert",
        "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
    }
)
"""Model types whose tokens see those behind them, unless their config says `is_decoder`."""

ENCODER_DECODERS = frozenset(
    {
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5",
        "m2m_100", "marian", "mbart", "mt5", "musicgen", "musicgen_melody", "mvp", "nllb-moe", "pegasus", "pegasus_x",
        "plbart", "prophetnet", "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma", "t5gemma2",
        "umt5", "whisper",
    }
)
"""Model types with an encoder for the prompt and a decoder for the answer."""

PERMUTED = frozenset({"xlnet"})
"""Model types that predict tokens in a permuted order."""

SCAN_FAMILIES = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba2",
    }
)
"""Model types with Mamba layers."""

SEQUENTIAL_FAMILIES = frozenset({"falcon_mamba", "jamba", "mamba", "recurrent_gemma", "rwkv", "xlstm", "zamba"})
"""Model types that compute one token after the other where their own kernels are not installed."""

SCAN_WEIGHTS = ("x_proj", "dt_proj", "out_proj")
"""Linear layers of a Mamba layer whose weights its kernels read themselves, past an adapter."""

WITHOUT_ATTENTION = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"})
"""Model types without attention layers."""

PEFT_EXPERT_NAMES = {
    "mixtral": ("w1", "w2", "w3", "gate"),
    "qwen2_moe": ("gate_proj", "up_proj", "down_proj", "gate"),
}
"""Names that peft takes for those of experts, by the way in which checkpoints of a family name their experts."""

PEFT_EXPERT_FAMILIES = {
    "mixtral": frozenset({"minimax", "minimax_m2", "mixtral"}),
    "qwen2_moe": frozenset(
        {
            "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe",
            "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe",
            "longcat_flash", "mellum", "olmoe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_text",
            "qwen3_omni_moe_thinker", "solar_open",
        }
    ),
}
"""Model types of which peft does so (`utils/transformers_weight_conversion.py`): it turns such a target into one on the
fused experts, so layers of the same name outside the experts cannot have an adapter."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Config keys with the number of experts of a layer."""


def names_of_experts(model_type: str) -> tuple[str, ...]:
    """The last parts of the module names that peft treats as fused experts in this family; empty in most families."""
    return next((PEFT_EXPERT_NAMES[way] for way, types in PEFT_EXPERT_FAMILIES.items() if model_type in types), ())


def refuse_family(facts: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise UsageError if a model is no causal language model, or if [method] puts adapters on layers that cannot have
    one.

    `facts` are the model's config.
    """
    reason = why_not_causal(facts)
    if reason is not None:
        raise UsageError(
            f"{recipe.model.id} {reason}",
            expected="a causal language model, which predicts each token from those before it",
            fix="choose another model.id",
        )
    if recipe.method.kind == "lora":
        _refuse_targets(str(text_of(facts).get("model_type", "")), recipe.method)


def why_not_causal(facts: Mapping[str, Any]) -> str | None:
    """Why a model with this config cannot be trained to predict the next token, as the end of a sentence about the
    model; None if it can, as far as its config tells."""
    model_type = str(facts.get("model_type", "unknown"))
    if model_type in ENCODER_DECODERS or facts.get("is_encoder_decoder"):
        return f"is an encoder-decoder ({model_type}), which reads the prompt with a part of its own"
    if model_type in ENCODERS and not facts.get("is_decoder"):
        return f"is an encoder ({model_type}), whose tokens see those behind them"
    if model_type in PERMUTED:
        return f"predicts tokens in a permuted order ({model_type})"
    return None


def _refuse_targets(model_type: str, method: Method) -> None:
    """Raise UsageError if method.targets names layers that cannot have an adapter in this family, or attention layers
    that it does not have."""
    if method.targets == "attention" and model_type in WITHOUT_ATTENTION:
        raise UsageError(
            f'method.targets = "attention", but {model_type} has no attention layers',
            expected="layers that the model has",
            fix='set method.targets = "all-linear"',
        )
    for pattern in method.targets if isinstance(method.targets, list) else []:
        last = pattern.rpartition(".")[2]
        if model_type in SCAN_FAMILIES and last in SCAN_WEIGHTS:
            raise no_adapter_on(pattern, scan_reason(model_type))
        if last in ("gate_proj", "up_proj") and last in names_of_experts(model_type):
            raise no_adapter_on(pattern, expert_reason(model_type))


def no_adapter_on(target: str, reason: str) -> UsageError:
    """Create the error for `target`, a name in method.targets that cannot have an adapter; `reason` completes its
    message."""
    return UsageError(
        f"method.targets: no adapter on {target!r}: {reason}",
        expected='other targets, or "all-linear", which leaves such layers out',
        fix='set method.targets = "all-linear"',
    )


def scan_reason(model_type: str) -> str:
    """Text for a message: why some linear layers of a Mamba layer cannot have an adapter."""
    return f"the kernels of {model_type} layers read that weight themselves, past an adapter"


def expert_reason(model_type: str) -> str:
    """Text for a message: why a linear layer whose name peft treats as a fused expert's cannot have an adapter."""
    return f"in {model_type}, peft takes that name for the fused experts'"


def experts_note(facts: Mapping[str, Any], recipe: Recipe) -> str | None:
    """A sentence if adapters on linear layers leave out the experts of a mixture, else None; `facts` are the model's
    config."""
    text = text_of(facts)
    counts = [text.get(key) for key in EXPERT_COUNTS] + [(text.get("ffn_config") or {}).get("moe_num_experts")]
    if not any(isinstance(count, int) and count > 1 for count in counts):
        return None
    return untrained_experts(str(text.get("model_type", "unknown")), recipe.method)


def untrained_experts(model_type: str, method: Method) -> str | None:
    """The sentence of `experts_note` for a model that is known to have experts; None if method.targets is not
    "all-linear", or in full fine-tuning."""
    if method.kind != "lora" or method.targets != "all-linear":
        return None
    return (
        f'method.targets = "all-linear" puts no adapter on the experts of {model_type}: their weights are one tensor a '
        'layer, not linear layers; to adapt them, too, name them, such as method.targets = ["q_proj", "v_proj", '
        '"experts.gate_up_proj", "experts.down_proj"]'
    )


def needs_own_code(facts: Mapping[str, Any]) -> bool:
    """Whether a model needs Python code that comes with it: its config names some, and the installed transformers does
    not know its model type. False where transformers is not installed."""
    found = find_spec("transformers") if facts.get("auto_map") else None
    if found is None or found.origin is None:
        return False
    return not _is_known(str(facts.get("model_type", "")), Path(found.origin).with_name("models"))


def _is_known(model_type: str, models: Path) -> bool:
    names: Iterable[str] = (model_type, model_type.replace("-", "_"), model_type.removesuffix("_text"))
    return any(name and (models / name).is_dir() for name in names)


def refuse_own_code(facts: Mapping[str, Any], model: str, *, trusted: bool) -> None:
    """Raise UsageError if a model needs code that comes with it, unless it is `trusted`: the command line allows such
    code."""
    if not trusted and needs_own_code(facts):
        raise own_code(model)


def own_code(model: str) -> UsageError:
    """Create the error for a model, by its id, that needs its own code and is not allowed to use it."""
    return UsageError(
        f"{model} needs Python code that comes with it, which is not run unasked",
        fix="if you trust its author, add --trust-remote-code to the command",
    )
