"""Packed documents do not see each other: the logits of a packed row are those of its documents alone. A model with
which that is not so is refused when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.architecture.support import why_documents_mix
from engine.errors import UsageError
from engine.journal.events import Journal
from engine.model.config import check_packing
from engine.model.loaded import LoadedModel
from engine.model.verify import require_causality, require_known_family, require_separation
from engine.train.run.setup import set_up
from tests.data.specs import run_spec
from tests.model.samples import FAMILIES, cpu, load, load_family, write_model
from tests.model.samples import run_spec as model_spec

LENGTHS = ((11, 5, 4), (3, 17))


def build(family: str, attention: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.for_model(family, **FAMILIES[family])
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


PAIRS = [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")]
PAIRS.remove(("gemma2", "sdpa"))
"""transformers has no sdpa with a soft-cap; engine.model.attention never chooses it."""


@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_packed_documents_have_the_logits_they_have_alone(family: str, attention: str) -> None:
    model = build(family, attention)
    assert why_documents_mix(model.config.to_dict()) is None
    generator = torch.Generator().manual_seed(2)
    rows = [[torch.randint(0, 256, (length,), generator=generator) for length in row] for row in LENGTHS]
    ids_BS = torch.stack([torch.cat(row) for row in rows])
    positions_BS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    with torch.no_grad():
        packed_BSV = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).logits
        alone = [torch.cat([model(input_ids=doc[None], use_cache=False).logits[0] for doc in row]) for row in rows]
    torch.testing.assert_close(packed_BSV, torch.stack(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decoder", [True, False])
def test_a_model_whose_tokens_see_those_behind_them_is_refused(tmp_path: Path, decoder: bool) -> None:
    """BERT for generation: transformers opens it as a causal language model, which it is with `is_decoder` alone."""
    folder = write_model(
        tmp_path / "model", "bert-generation", vocab_size=264, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128, is_decoder=decoder,
    )  # fmt: skip
    loaded = load(model_spec(str(folder), method={"kind": "full"}))
    if decoder:
        require_causality(loaded)
        return
    with pytest.raises(UsageError, match="lets tokens attend to later ones"):
        require_causality(loaded)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "mixtral"])
def test_causal_models_pass_the_proof_of_causality(tmp_path: Path, family: str) -> None:
    require_causality(load_family(tmp_path, family))


def test_families_with_a_running_state_are_refused() -> None:
    assert "state" in (why_documents_mix({"model_type": "mamba"}) or "")
    mixed = {"model_type": "something_new", "layer_types": ["full_attention", "linear_attention"]}
    assert "state" in (why_documents_mix(mixed) or "")


_SMALL = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
_WIDE = {**_SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
MASK_WITHOUT_POSITIONS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**_WIDE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "afmoe": {**_WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1},
    "falcon": {**_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
    "opt": {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 128},
    "biogpt": {**_SMALL, "intermediate_size": 48, "max_position_embeddings": 128},
    "xglm": {"vocab_size": 264, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "pad_token_id": 0},
    "bloom": {"vocab_size": 264, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0},
    "mpt": {"vocab_size": 264, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
}
"""Families that build their attention mask without position ids, which the engine hands over."""
MIXING: dict[str, dict[str, Any]] = {
    "bart": {"vocab_size": 264, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
             "encoder_layers": 2, "is_decoder": True, "is_encoder_decoder": False, "pad_token_id": 0},
    "qwen3_5_text": {**_WIDE, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                     "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "mamba": {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0},
}  # fmt: skip
"""Families whose documents see each other, or get other positions than alone."""


def loaded(tmp_path: Path, family: str, sizes: dict[str, Any], **options: Any) -> LoadedModel:
    folder = write_model(tmp_path, family, **sizes)
    return load(model_spec(str(folder), method={"kind": "full"}, **options))


@pytest.mark.parametrize("family", MASK_WITHOUT_POSITIONS)
def test_positions_are_handed_to_masks_that_are_built_without(tmp_path: Path, family: str) -> None:
    require_separation(loaded(tmp_path, family, MASK_WITHOUT_POSITIONS[family], attention="eager"))


@pytest.mark.parametrize("family", MIXING)
def test_a_model_whose_documents_mix_is_refused_when_it_is_loaded(tmp_path: Path, family: str) -> None:
    with pytest.raises(UsageError, match=r"packed document.* by \d+ ?%|the next packed document by \d+ ?%"):
        require_separation(loaded(tmp_path, family, MIXING[family]))


def test_separation_is_tried_in_bfloat16_too(tmp_path: Path) -> None:
    require_separation(loaded(tmp_path / "llama", "llama", {}, dtype="bfloat16"))
    with pytest.raises(UsageError, match="the next packed document"):
        require_separation(loaded(tmp_path / "mamba", "mamba", MIXING["mamba"], dtype="bfloat16"))


def test_shards_pack_only_families_that_are_known() -> None:
    require_known_family("qwen2")
    with pytest.raises(UsageError, match="it is unknown whether"):
        require_known_family("opt")


def test_layer_types_of_a_nested_config_are_read() -> None:
    text = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
    assert "state" in (why_documents_mix({"model_type": "qwen3_5", "text_config": text}) or "")


def test_a_run_that_would_mix_documents_ends_before_its_first_step(tmp_path: Path) -> None:
    sizes = {"vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    folder = write_model(tmp_path / "model", "openai-gpt", **sizes)
    data = {"sources": [{"name": "main", "path": "builtin:dates", "limit": 40}], "packing": True, "max_length": 96}
    spec = run_spec(data, model={"id": str(folder)}, method={"kind": "full"}, train={"max_steps": 1, "batch_size": 2})
    with pytest.raises(UsageError, match=r"data\.packing = true, but with this model"):
        set_up(spec, cpu(), Journal(None), report=lambda recovered: None)


def test_packing_is_refused_where_documents_would_mix(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "vocab_size": 264}')
    data = {"sources": [{"name": "main", "path": "builtin:dates"}], "packing": True}
    with pytest.raises(UsageError, match="packed documents would affect each other"):
        check_packing(run_spec(data, model={"id": str(tmp_path)}))
    check_packing(run_spec({**data, "packing": False}, model={"id": str(tmp_path)}))
