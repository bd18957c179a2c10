"""Configs of tiny models, one for each model family that `benchmarks.families` tries: 32 wide, one or two layers.

Keys are those of transformers 5.23. What is not set has the value of the family's own config class, dropout too.
`vocab_size` is that of the byte tokenizer. Families whose layers may differ have two layers.

Try: `python -m benchmarks.families --only gpt2`
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

IDS: Config = {"vocab_size": 264, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
PLAIN: Config = {
    **IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
GROUPED: Config = {**PLAIN, "num_key_value_heads": 2}
SIZED: Config = {**GROUPED, "head_dim": 8}
SINGLE: Config = {**SIZED, "num_hidden_layers": 1}
GPT: Config = {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
MOE: Config = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURE: Config = {**SIZED, **MOE}
ROUTED: Config = {
    **MIXTURE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT: Config = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK: Config = {**PLAIN, **MOE, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1}
DEEPSEEK |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
SCAN: Config = {**IDS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 1}
MAMBA2: Config = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
MAMBA2 |= {"mamba_chunk_size": 16}
DELTA: Config = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
WINDOWED = ["sliding_attention", "full_attention"]

DENSE: dict[str, Config] = {
    "apertus": SINGLE,
    "arcee": SINGLE,
    "biogpt": {**PLAIN, "num_hidden_layers": 1},
    "bloom": {**IDS, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "codegen": {**GPT, "n_layer": 1, "rotary_dim": 4},
    "cohere": SIZED,
    "cohere2": {**SIZED, "sliding_window": 32, "layer_types": WINDOWED},
    "ctrl": {**GPT, "n_layer": 1, "dff": 48},
    "cwm": {**SIZED, "sliding_window": 32, "layer_types": WINDOWED},
    "diffllama": SIZED,
    "ernie4_5": SINGLE,
    "exaone4": {**SIZED, "sliding_window": 32, "layer_types": WINDOWED},
    "falcon": {**PLAIN, "alibi": False},
    "falcon, alibi": {**PLAIN, "alibi": True},
    "gemma": SINGLE,
    "gemma2": {**SIZED, "sliding_window": 32, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SIZED, "sliding_window": 32, "layer_types": WINDOWED},
    "glm": SINGLE,
    "glm4": SINGLE,
    "gpt2": GPT,
    "gpt_bigcode": {**GPT, "n_layer": 1},
    "gpt_neo": {
        **IDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128,
        "attention_types": [[["global", "local"], 1]], "intermediate_size": 48, "window_size": 32,
    },
    "gpt_neox": {**PLAIN, "rotary_pct": 0.25},
    "gptj": {**GPT, "n_layer": 1, "rotary_dim": 4},
    "granite": SIZED,
    "helium": SINGLE,
    "hunyuan_v1_dense": SINGLE,
    "llama": SIZED,
    "minicpm3": {**PLAIN, **LATENT, "num_hidden_layers": 1},
    "ministral": {**SIZED, "sliding_window": 32, "layer_types": WINDOWED},
    "mistral": {**SIZED, "sliding_window": 32},
    "mpt": {**IDS, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 128, "expansion_ratio": 2},
    "nanochat": SINGLE,
    "nemotron": SINGLE,
    "olmo": SINGLE,
    "olmo2": SIZED,
    "olmo3": {**SIZED, "sliding_window": 32},
    "openai-gpt": {**GPT, "n_layer": 1},
    "opt": {**PLAIN, "num_hidden_layers": 1, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {**PLAIN, "num_hidden_layers": 1},
    "phi": GROUPED,
    "phi3": GROUPED,
    "qwen2": GROUPED,
    "qwen3": SIZED,
    "seed_oss": SINGLE,
    "smollm3": SINGLE,
    "stablelm": {**GROUPED, "num_hidden_layers": 1},
    "starcoder2": SINGLE,
    "vaultgemma": {**SIZED, "sliding_window": 32},
    "xglm": {**IDS, "d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 48},
}  # fmt: skip

MIXTURES: dict[str, Config] = {
    "dbrx": {
        **IDS, "d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**DEEPSEEK, "topk_method": "greedy"},
    "deepseek_v3": DEEPSEEK,
    "dots1": ROUTED,
    "ernie4_5_moe": {**MIXTURE, "moe_num_experts": 4, "moe_k": 2},
    "flex_olmo": MIXTURE,
    "glm4_moe": ROUTED,
    "gpt_oss": {**MIXTURE, "sliding_window": 32},
    "granitemoe": {**MIXTURE, "num_hidden_layers": 1},
    "hunyuan_v1_moe": {**MIXTURE, "moe_topk": 2},
    "jetmoe": {**PLAIN, **MOE, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8},
    "lfm2_moe": {**MIXTURE, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "llama4_text": {**MIXTURE, "intermediate_size_mlp": 48, "attention_chunk_size": 64},
    "mixtral": {**GROUPED, **MOE},
    "olmoe": {**GROUPED, **MOE, "num_hidden_layers": 1},
    "phimoe": {**GROUPED, **MOE, "num_hidden_layers": 1},
    "qwen2_moe": {**GROUPED, **MOE, "num_hidden_layers": 1, "shared_expert_intermediate_size": 16},
    "qwen3_moe": MIXTURE,
}  # fmt: skip

RECURRENT: dict[str, Config] = {
    "bamba": {**SIZED, **MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**SIZED, **MAMBA2, "mamba_d_ssm": 64},
    "falcon_mamba": SCAN,
    "granitemoehybrid": {
        **MIXTURE, **MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48,
    },
    "jamba": {
        **GROUPED, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
    },
    "lfm2": {**SIZED, "full_attn_idxs": [1], "block_ff_dim": 48},
    "mamba": SCAN,
    "mamba2": {**SCAN, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "minimax": {**MIXTURE, "layer_types": ["full_attention", "linear_attention"], "block_size": 16},
    "qwen3_next": {**MIXTURE, **DELTA, "shared_expert_intermediate_size": 24},
    "recurrent_gemma": {
        **SIZED, "lru_width": 32, "attention_window_size": 32, "block_types": ["recurrent", "attention"],
    },
    "rwkv": {**IDS, "hidden_size": 32, "num_hidden_layers": 1, "context_length": 128},
    "xlstm": {**IDS, "hidden_size": 32, "num_blocks": 2, "num_heads": 4, "qk_dim_factor": 0.5},
    "zamba2": {
        **SIZED, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1,
        "attention_head_dim": 16,
    },
}  # fmt: skip
"""Families with layers that carry a state from token to token."""

TRAINED: dict[str, Config] = {**DENSE, **MIXTURES, **RECURRENT}
"""Families that are trained. What follows a comma in a name is a variant of the model type before it."""

REFUSED: dict[str, Config] = {
    "bart": {"is_encoder_decoder": True}, "bert": {}, "deberta-v2": {}, "distilbert": {}, "electra": {},
    "longt5": {"is_encoder_decoder": True}, "mbart": {"is_encoder_decoder": True}, "modernbert": {}, "mt5": {},
    "pegasus": {}, "roberta": {}, "t5": {}, "whisper": {}, "xlm-roberta": {}, "xlnet": {},
    "internlm2": {"auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"}},
}  # fmt: skip
"""Configs of families that no method trains: what `config.json` says of them beside its model type."""


def model_type(name: str) -> str:
    """Return the model type of the family `name` in TRAINED or REFUSED: the part before a comma."""
    return name.partition(",")[0]
