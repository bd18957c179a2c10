"""Configs of tiny models of all model types that the installed transformers opens as a causal language model, or as one
of images and text, made from the type's own config class.

The class is asked: its defaults tell which keys it has, which lists go by layer, and which sizes are multiples of
others. What a size is of is read from the words of its key (SIZES), so a type that appears with a newer transformers
needs no code. What cannot be found so stands in CHANGES.

Try: `python -m benchmarks.model_types --only gpt2`
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

Config = dict[str, Any]

VOCABULARY = 50_000
WIDTH, INNER, HEADS, KEY_HEADS = 64, 96, 4, 2
IDS: Config = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
"""Those of the byte tokenizer, whose ids end at 264."""
FIRST_FREE_ID = 300
"""Images and their like get ids from here on."""
MOST_KINDS = 4
"""Layers of a tiny model, at most: one of each kind."""

SIZES: tuple[tuple[str, int | str], ...] = (
    (r"(^|_)vocab_size(_per_layer_input)?$", "vocabulary"),
    (r"(token_id|token_index|_token|image_patch_id)$", "id"),
    (r"mtp|nextn|pretraining_tp|chunk_size_feed_forward|^(no_rope|moe|cross)_layer_interval$", "kept"),
    (r"position_embeddings$|^(n_positions|max_seq_len|seq_length|n_ctx|context_length|model_max_length)$", 512),
    (r"^sliding_window(_size)?$|^attention_window_size$|^(window_size|local_attention)$", 16),
    (r"(chunk_size|chunk_length)$|^block_size$", 32),
    (r"kv_shared_layers$", 0),
    (r"^index_head_dim$|vocab_size_base$", "kept"),
    (r"experts?_per_tok(en)?$|^(moe_)?top_?k(_experts)?$|^moe_k$", 2),
    (r"^n_group$|^topk_group$|^num_expert_group$|^(mamba_)?n_?groups$", 1),
    (r"shared_experts?$", 1),
    (r"^first_k_dense_replace$|^num_dense_layers$|^moe_layer_start_index$", 1),
    (r"experts$", 4),
    (r"(key_value_heads|kv_heads|kv_n_heads|query_groups|num_key_heads)$", "key heads"),
    (r"^rotary_dim$", 8),
    (r"heads$|^n_head$", HEADS),
    (r"(rank|lowrank)$", 8),
    (r"(state_size|d_state)$", 8),
    (r"^linear_.*head_dim$", 16),
    (r"^(qk|v)_.*head_dim$|^qk_head_dim$", "kept"),
    (r"(head_?dim|d_head|d_kv|kv_channels|head_size|dim_head)$", "head width"),
    (r"^(image|patch|temporal_patch|spatial_merge|merge|conv_kernel|kernel)_size$|kernel|channels$", "kept"),
    (r"layers?$|^depth$|^num_blocks$", "layers"),
    (r"intermediate|ffn|mlp_dim|_ff$|^dff$|dim_ff|n_inner|expert_dim|moe_hidden", "inner"),
    (r"(hidden|dim|embd|width|d_model|d_inner|embed)(_size(_global)?)?$|(hidden|embedding|input)_size$", "width"),
)  # fmt: skip
"""The size of a key by its words, or how it is found (`_Shrinking`); the first that fits. Other keys are kept."""

UNSET: Config = {
    "head_dim": WIDTH // HEADS, "num_key_value_heads": HEADS, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": INNER, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
"""For keys that a class leaves at None, although its model cannot be made so."""


_PLAIN_ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0}


def _axes(*sections: int) -> Config:
    """Rotary positions of three axes."""
    return {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]}}
    }


_ROPES: Config = {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}
_CONVOLUTIONS: Config = {"layer_types": ["conv", "full_attention"]}
_INDEXER: Config = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_WORDS: Config = {
    "vocabulary_map": {"<image>": 300, "<|extra_200|>": 301, "<|visual token 000000|>": 302, "IMGIMGAZ": 303}
}

_VISION_START: Config = {"vision_start_token_id": 310}
_BYTES: Config = {"vocab_size": 512}

CHANGES: dict[str, Config] = {
    "chameleon": _WORDS, "emu3": _WORDS,
    "cohere_compass": {"text_config": {"rope_parameters": _ROPES}},
    "cohere_compass_text": {"rope_parameters": _ROPES},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        **_BYTES, **dict.fromkeys(("patcher_config", "encoder_config", "decoder_config"), _BYTES),
        "global_config": {"hidden_size": 128, "head_dim": 32},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "ernie4_5_vl_moe": {"text_config": {**_axes(3, 3, 2)["text_config"], "moe_intermediate_size": [96, 64]}},
    "fast_vlm": {
        "vision_config": {
            "architecture": "fastvit_mci3", "do_pooling": True, "global_pool": "avg", "hidden_size": WIDTH,
            "model_args": {"inference_mode": True, "layers": [1] * 5, "embed_dims": [32] * 5},
        },
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 32},
    "gemma3": {"mm_tokens_per_image": 49},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "glm46v": _axes(2, 3, 3), "glm4v": _axes(2, 3, 3), "glm_ocr": _axes(2, 3, 3), "glmga": _axes(2, 3, 3),
    "glm4v_moe": _axes(1, 1, 2),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        "downsample_rate": "4/8", "deepstack_layer_map": [[0, 0], [1, 1]], "spatial_target_layers": [0, 1],
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_vl": _axes(2, 3, 3),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"full_attn_idxs": [1], **_CONVOLUTIONS}, "lfm2_moe": _CONVOLUTIONS,
    "lfm2_vl": {"text_config": {"full_attn_idxs": [1], **_CONVOLUTIONS}},
    "longcat_flash": {"zero_expert_num": 2},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl": _axes(4, 6, 6),
    "paligemma": {"text_config": {"num_key_value_heads": KEY_HEADS}},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {
                "embed_dim": WIDTH, "depth": 2, "num_heads": HEADS, "img_size": [56, 56], "ref_feat_shape": [4, 4],
                "global_pool": "", "init_values": 0.1, "use_post_transformer_norm": False,
            },
        },
    },
    "qwen2_5_omni_thinker": _axes(2, 3, 3) | _VISION_START, "qwen2_5_vl": _axes(2, 3, 3), "qwen2_vl": _axes(2, 3, 3),
    "qwen3_omni_moe_thinker": _VISION_START,
    "qwen4_exp": {"text_config": _INDEXER}, "qwen4_exp_text": _INDEXER,
    "shieldgemma2": {"architectures": ["ShieldGemma2ForImageClassification"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "step3p7": {
        "text_config": {
            "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": _ROPES,
        },
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}  # fmt: skip
"""Keys of a type's config in place of those found, by type; those of a nested config in a dict of their own."""


def every_type() -> dict[str, tuple[str, ...]]:
    """Model types with "text" where transformers has a causal language model, "images" where it has a model of images
    and text."""
    ways = {
        "text": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "images": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    return {
        name: tuple(way for way, types in ways.items() if name in types)
        for name in sorted({name for types in ways.values() for name in types})
    }


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The config of a tiny model of a type. Raises what its class raises if the sizes found do not fit together."""
    kind = CONFIG_MAPPING[model_type]
    changes = CHANGES.get(model_type, {})
    try:
        default = kind()
    except Exception:  # noqa: BLE001  (of any kind: its defaults do not fit together; CHANGES mends that)
        default = kind(**changes)
    return kind(**_merged(_shrunk(default, default.get_text_config(decoder=True)), changes))


def _merged(found: Config, changes: Mapping[str, Any]) -> Config:
    """`found` with `changes` laid over it, also inside nested configs."""
    result = dict(found)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(found.get(key), dict)
        result[key] = _merged(found[key], value) if nested else value
    return result


def _shrunk(default: PreTrainedConfig, text: PreTrainedConfig) -> Config:
    """Keys of `default` with small sizes; `text`: the part of it that is the language model."""
    found: Config = {}
    for key, kind in type(default).sub_configs.items():
        part = getattr(default, key, None)
        if part is None and "vision" in key and isinstance(kind, type) and issubclass(kind, PreTrainedConfig):
            part = kind()
        if isinstance(part, PreTrainedConfig):
            found[key] = {"model_type": part.model_type} if part.model_type else {}
            found[key] |= _shrunk(part, text)
    return found | _Shrinking(default, text).keys()


class _Shrinking:
    """Finds small sizes for the keys of one config, without those nested in it."""

    def __init__(self, default: PreTrainedConfig, text: PreTrainedConfig) -> None:
        self.is_text, self.text_hidden = default is text, getattr(text, "hidden_size", 0)
        fields = {field.name: field.default for field in dataclasses.fields(default)}
        known = self.known = default.to_dict()
        names = {theirs: ours for ours, theirs in type(default).attribute_map.items() if ours in fields}
        self.facts = {names.get(key, key): value for key, value in known.items()}
        self.facts = {
            key: value
            for key, value in self.facts.items()
            if key in fields and (isinstance(value, list) or fields[key] is not None)
        }
        self.unset = {key for key in fields if known.get(key, 0) is None}
        self.hidden = self._first("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
        self.heads = self._first("num_attention_heads", "n_head", "n_heads", "num_heads")
        self.layers = self._first("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "num_blocks")
        self.layers = self.layers or len(known.get("layer_types") or known.get("layers_block_type") or ())
        self.chosen = self._chosen()

    def _first(self, *keys: str) -> int:
        """The first of some keys that is a size; 0 if none is."""
        return next((self.known[key] for key in keys if _is_size(self.known.get(key))), 0)

    def _lists(self) -> Config:
        """Lists with a value for each layer."""
        return {
            key: value
            for key, value in self.facts.items()
            if isinstance(value, list) and len(value) == self.layers > 1 and key not in self._numbers()
        }

    def _numbers(self) -> Config:
        """Lists of numbers of layers."""
        return {
            key: value
            for key, value in self.facts.items()
            if isinstance(value, list)
            and value
            and len(value) == len(set(map(str, value)))
            and re.search(r"layers|layer_id|idx|ind(ic|ex)es", key)
            and all(type(each) is int and 0 <= each < self.layers for each in value)
        }

    def _chosen(self) -> list[int]:
        """Layers of the default model that the tiny one has: the first of each kind, and at least two."""
        kinds: dict[tuple[str, ...], int] = {}
        for layer in range(self.layers):
            kind = [str(value[layer]) for value in self._lists().values() if not isinstance(value[layer], float)]
            kind += [str(layer in value) for value in self._numbers().values()]
            kinds.setdefault(tuple(kind), layer)
        first = sorted(kinds.values())[:MOST_KINDS]
        return first if len(first) > 1 else [0, 1]

    def keys(self) -> Config:
        """The keys with their small sizes."""
        found: Config = {}
        if self._lists():
            found |= {
                key: [self._found(key, value[each]) for each in self.chosen] for key, value in self._lists().items()
            }
        for key, value in self._numbers().items():
            found[key] = [place for place, layer in enumerate(self.chosen) if layer in value]
        ids = FIRST_FREE_ID
        for key, value in self.facts.items():
            if key in IDS:
                if self.is_text:
                    found[key] = IDS[key]
                continue
            if not _is_size(value) or value <= 1 or key in found:
                continue
            if _kind_of(key) == "id":
                found[key] = ids if value > IDS["pad_token_id"] else value
                ids += 1
            else:
                found[key] = self._found(key, value)
        if self.is_text:
            found |= IDS
        return found | {key: UNSET[key] for key in self.unset & UNSET.keys()}

    def _found(self, key: str, value: Any) -> Any:
        """The small size of a key; anything but a size as it is."""
        size = _kind_of(key)
        return self._size(value, size) if _is_size(value) and size not in ("kept", "id") else value

    def _size(self, value: int, size: int | str) -> int:
        if size == "vocabulary":
            return VOCABULARY if self.is_text else min(value, 512)
        if size == "layers":
            return len(self.chosen) if value == self.layers else min(value, 2)
        if size == "key heads":
            return HEADS if value == self.heads else min(value, KEY_HEADS)
        if size == "head width":
            return self._head_width(value)
        if size in ("width", "inner"):
            if size == "inner" and (not self.hidden or value % self.hidden):
                return INNER
            whole = self.hidden and value % self.hidden == 0 and value != self.text_hidden
            return WIDTH * min(value // self.hidden, 8) if whole else WIDTH
        return min(value, int(size))

    def _head_width(self, value: int) -> int:
        """As large a part of the width as the default is of the hidden size, where the heads divide that."""
        if "mrope_section" in str(self.known.get("rope_parameters")):
            return value
        for expand in (1, 2, 4):
            if self.hidden and expand * self.hidden % value == 0 and self._counts(expand * self.hidden // value):
                return expand * WIDTH // HEADS
        return min(value, 64)

    def _counts(self, heads: int) -> bool:
        """Whether a key with a number of heads is `heads`."""
        return any(value == heads for key, value in self.facts.items() if re.search(r"heads$|^n_head$", key))


def _kind_of(key: str) -> int | str:
    return next((size for words, size in SIZES if re.search(words, key)), "kept")


def _is_size(value: Any) -> bool:
    return type(value) is int
