"""Model families of transformers: facts that a `config.json` does not contain, and which families cannot be trained, or
not with these adapters.

Facts of transformers 5.23 (`src/transformers/models/<model_type>/`) and peft 0.21, compared with the installed packages
by tests/budget/test_parameters.py and tests/model/test_families.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from engine.architecture.positions import text_of
from engine.config.schema.recipe import Method, Recipe
from engine.errors import UsageError

Layout = Literal["llama", "phi3", "gpt2", "mixtral", "qwen3_moe", "gpt_oss"]


@dataclass(frozen=True)
class Family:
    """Structure shared by all models of one `model_type`; `defaults` fill keys that a published config leaves out."""

    layout: Layout = "llama"
    qkv_bias: bool = False
    """Query, key and value projections have biases, whatever the config says."""
    bias_key: str | None = None
    """Config key that switches the biases of all four attention projections."""
    mlp_bias_key: str | None = None
    """Config key that switches the biases of the feed-forward layers."""
    qk_norm: bool = False
    norms_per_layer: int = 2
    wide_norm: bool = False
    """RMSNorm multiplies by its weight in fp32, before the cast."""
    full_every: int | None = None
    """With a sliding window, every `full_every`-th layer attends to all positions; None: no layer does."""
    rotary_by_kind: bool = False
    """Full and sliding layers have rotary tables of their own."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by a number that is stored as a buffer."""
    rotary_by_row: bool = False
    """Each row of a batch has rotary tables of its own, because positions in images have three axes."""
    default_attention: Literal["sdpa", "eager"] = "sdpa"
    """The kernel that transformers chooses by default: gpt-oss has no sdpa path."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "qwen2": Family(qkv_bias=True, defaults={"tie_word_embeddings": False}),
    "qwen2_vl_text": Family(qkv_bias=True, rotary_by_row=True, defaults={"tie_word_embeddings": False}),
    "qwen2_5_vl_text": Family(qkv_bias=True, rotary_by_row=True, defaults={"tie_word_embeddings": False}),
    "qwen3": Family(qk_norm=True, bias_key="attention_bias", defaults={"tie_word_embeddings": False, "head_dim": 128}),
    "llama": Family(bias_key="attention_bias", mlp_bias_key="mlp_bias", defaults={"tie_word_embeddings": False}),
    "mistral": Family(defaults={"tie_word_embeddings": False, "num_key_value_heads": 8}),
    "phi3": Family(layout="phi3", defaults={"tie_word_embeddings": False}),
    "gemma2": Family(
        bias_key="attention_bias",
        norms_per_layer=4,
        wide_norm=True,
        full_every=2,
        scaled_embedding=True,
        defaults={
            "tie_word_embeddings": True,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "sliding_window": 4096,
        },
    ),
    "gemma3_text": Family(
        bias_key="attention_bias",
        qk_norm=True,
        norms_per_layer=4,
        wide_norm=True,
        full_every=6,
        rotary_by_kind=True,
        scaled_embedding=True,
        defaults={
            "tie_word_embeddings": True,
            "vocab_size": 262208,
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
        },
    ),
    "gpt2": Family(layout="gpt2", qkv_bias=True, defaults={"tie_word_embeddings": True}),
    "mixtral": Family(
        layout="mixtral",
        defaults={
            "tie_word_embeddings": False,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": Family(
        layout="qwen3_moe", qk_norm=True, bias_key="attention_bias", defaults={"tie_word_embeddings": False}
    ),
    "gpt_oss": Family(
        layout="gpt_oss",
        bias_key="attention_bias",
        default_attention="eager",
        wide_norm=True,
        full_every=2,
        defaults={"tie_word_embeddings": False, "attention_bias": True, "head_dim": 64, "sliding_window": 128},
    ),
}


ENCODERS = frozenset(
    {
        "albert",
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "convbert",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "esm",
        "esmc",
        "eurobert",
        "flaubert",
        "fnet",
        "funnel",
        "gte",
        "ibert",
        "jina_embeddings_v3",
        "layoutlm",
        "longformer",
        "luke",
        "megatron-bert",
        "mobilebert",
        "modernbert",
        "modernvbert",
        "mpnet",
        "mra",
        "neomme",
        "nomic_bert",
        "nystromformer",
        "perceiver",
        "reformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "squeezebert",
        "tapas",
        "ultrabert",
        "ultravbert",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
        "yoso",
    }
)
"""Model types whose tokens see those behind them, unless their config says `is_decoder`."""

PERMUTED = frozenset({"xlnet"})
"""Model types that predict tokens in a permuted order."""

SCAN_FAMILIES = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "mamba",
        "mamba2",
        "nemotron_h",
        "zamba2",
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
            "afmoe",
            "beam",
            "cohere2_moe",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "ernie4_5_moe",
            "exaone_moe",
            "flex_olmo",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe",
            "glm_moe_dsa",
            "hunyuan_v1_moe",
            "longcat_flash",
            "mellum",
            "olmoe",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_omni_moe",
            "qwen3_omni_moe_text",
            "qwen3_omni_moe_thinker",
            "solar_open",
        }
    ),
}
"""Model types of which peft does so (`utils/transformers_weight_conversion.py`): it turns such a target into one on the
fused experts, so layers of the same name outside the experts cannot have an adapter."""

RENAMED_BY_PEFT = frozenset({"deepseek_ocr2", "unlimited_ocr"})
"""Model types of which peft renames every layer of text when it opens an adapter, as transformers renames the weights
of an older checkpoint (`conversion_mapping.py`), and so loses all of it."""

PADDING_RESET = frozenset({"youtu"})
"""Model types that transformers opens with zeros for the padding token, whatever their files have
(`_init_weights` in `modeling_youtu.py`)."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Config keys with the number of experts of a layer."""


def names_of_experts(model_type: str) -> tuple[str, ...]:
    """The last parts of the module names that peft treats as fused experts in this family."""
    return next((PEFT_EXPERT_NAMES[way] for way, types in PEFT_EXPERT_FAMILIES.items() if model_type in types), ())


def refuse_family(facts: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise UsageError if a model's tokens see those behind them, or [method] puts adapters where none can be. Which
    class a model has is checked by `engine.architecture.classes.refuse_class`."""
    reason = why_not_causal(facts)
    if reason is not None:
        raise UsageError(
            f"{recipe.model.id} {reason}",
            expected="a causal language model, which predicts each token from those before it",
            fix="choose another model.id",
        )
    if recipe.method.kind == "full":
        _refuse_reset(facts, recipe)
    if recipe.method.kind == "lora":
        _refuse_renamed(str(facts.get("model_type", "")), recipe)
        _refuse_targets(str(text_of(facts).get("model_type", "")), recipe.method)


def why_not_causal(facts: Mapping[str, Any]) -> str | None:
    """Why it cannot learn the next token, as the end of a sentence; None if it can, as far as its config tells."""
    model_type = str(facts.get("model_type", "unknown"))
    if model_type in ENCODERS and not facts.get("is_decoder"):
        return f"is an encoder ({model_type}), whose tokens attend to later ones"
    if text_of(facts).get("use_bidirectional_attention") is True:
        return f"is an encoder ({model_type}) because of use_bidirectional_attention: its tokens attend to later ones"
    if model_type in PERMUTED:
        return f"predicts tokens in a permuted order ({model_type})"
    return None


def _refuse_reset(facts: Mapping[str, Any], recipe: Recipe) -> None:
    model_type, padding = str(facts.get("model_type", "")), facts.get("pad_token_id")
    if model_type in PADDING_RESET and padding is not None:
        raise UsageError(
            f"{recipe.model.id} is a {model_type!r} model, for which transformers always loads zeros for the "
            f"padding token ({padding}), whatever was trained",
            fix='set method.kind = "lora", or remove pad_token_id from its config.json',
        )


def _refuse_renamed(model_type: str, recipe: Recipe) -> None:
    if model_type in RENAMED_BY_PEFT:
        raise UsageError(
            f"{recipe.model.id} is a {model_type!r} model, whose layers peft renames when it loads an adapter, "
            "so they cannot have one",
            fix='set method.kind = "full", or choose another model.id',
        )


def _refuse_targets(model_type: str, method: Method) -> None:
    """Raise UsageError if method.targets names layers that cannot have an adapter, or attention that does not exist."""
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
    """`target` is a name in method.targets; `reason` completes the message."""
    return UsageError(
        f"method.targets: no adapter on {target!r}: {reason}",
        expected='other targets, or "all-linear", which leaves such layers out',
        fix='set method.targets = "all-linear"',
    )


def scan_reason(model_type: str) -> str:
    """Why some linear layers of a Mamba layer cannot have an adapter."""
    return f"the kernels of {model_type} layers read that weight directly and bypass an adapter"


def expert_reason(model_type: str) -> str:
    """Why a linear layer whose name peft treats as a fused expert's cannot have an adapter."""
    return f"in {model_type}, peft applies that name to the fused experts"


def experts_note(facts: Mapping[str, Any], recipe: Recipe) -> str | None:
    """A sentence if adapters on linear layers leave out the experts of a mixture."""
    text = text_of(facts)
    counts = [text.get(key) for key in EXPERT_COUNTS] + [(text.get("ffn_config") or {}).get("moe_num_experts")]
    if not any(isinstance(count, int) and count > 1 for count in counts):
        return None
    return untrained_experts(str(text.get("model_type", "unknown")), recipe.method)


def untrained_experts(model_type: str, method: Method) -> str | None:
    """`experts_note` of a model with experts; None if method.targets is not "all-linear", or in full fine-tuning."""
    if method.kind != "lora" or method.targets != "all-linear":
        return None
    return (
        f'method.targets = "all-linear" puts no adapter on the experts of {model_type}: their weights are '
        "one tensor per layer, not linear layers; to adapt them, add their names, such as method.targets = "
        '["q_proj", "v_proj", "experts.gate_up_proj", "experts.down_proj"]'
    )


def needs_own_code(facts: Mapping[str, Any]) -> bool:
    """The config names Python code, and the installed transformers does not know the model type."""
    found = find_spec("transformers") if facts.get("auto_map") else None
    if found is None or found.origin is None:
        return False
    return not _is_known(str(facts.get("model_type", "")), Path(found.origin).with_name("models"))


def _is_known(model_type: str, models: Path) -> bool:
    names: Iterable[str] = (model_type, model_type.replace("-", "_"), model_type.removesuffix("_text"))
    return any(name and (models / name).is_dir() for name in names)


def refuse_own_code(facts: Mapping[str, Any], model: str, *, trusted: bool) -> None:
    """Raise UsageError unless such code is allowed on the command line (`trusted`)."""
    if not trusted and needs_own_code(facts):
        raise own_code(model)


def own_code(model: str) -> UsageError:
    return UsageError(
        f"{model} needs its own Python code, which does not run by default",
        fix="if you trust its author, add --trust-remote-code",
    )
