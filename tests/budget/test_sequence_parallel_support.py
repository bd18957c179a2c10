"""Tests that sequence parallelism is refused, before anything is loaded, for models it would compute wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from engine.architecture.lookup import find_config
from engine.architecture.support import can_be_dealt, refuse_sequence_parallel
from engine.config.schema.run import RunSpec
from engine.errors import UsageError

TINY = find_config("builtin:tiny")
"""The config of a model with four query heads and two key heads."""
GPT_OSS = find_config("openai/gpt-oss-20b")


def spec_of(sequence: int, devices: int = 4, **tables: Any) -> RunSpec:
    recipe: dict[str, Any] = {
        "name": "small",
        "model": {"id": "builtin:tiny", "tokenizer": "builtin:bytes"},
        "data": {"sources": [{"name": "main", "path": "x.jsonl"}]},
    }
    for name, table in tables.items():
        recipe[name] = {**recipe.get(name, {}), **table}
    profile = {
        "name": "here",
        "device": {"kind": "metered", "memory_gib": 1.0, "count": devices},
        "parallel": {"strategy": "replicated", "sequence": sequence},
    }
    return RunSpec.model_validate({"name": "small", "profile": profile, "recipe": recipe})


def refusal(facts: dict[str, Any], spec: RunSpec) -> UsageError:
    with pytest.raises(UsageError) as caught:
        refuse_sequence_parallel(facts, spec)
    return caught.value


def test_a_causal_model_whose_heads_divide_may_share_sequences() -> None:
    refuse_sequence_parallel(TINY, spec_of(2))
    refuse_sequence_parallel(TINY, spec_of(4))


def test_without_sharing_nothing_is_refused() -> None:
    refuse_sequence_parallel({**TINY, "model_type": "mamba"}, spec_of(1, data={"packing": True}))


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "possible"),
    [(8, 2, 4, True), (8, 8, 4, True), (8, 1, 8, True), (6, 6, 4, False), (12, 6, 4, False), (12, 3, 6, True)],
)
def test_keys_divide_over_ranks_or_ranks_over_keys(heads: int, key_heads: int, size: int, possible: bool) -> None:
    assert can_be_dealt(heads, key_heads, size) is possible


def test_heads_that_do_not_divide_are_told_with_the_sizes_that_do() -> None:
    error = refusal({**TINY, "num_attention_heads": 6, "num_key_value_heads": 6}, spec_of(4))
    assert "6 heads with 6 key-value heads" in error.found
    assert "set parallel.sequence to 1 or 2 in the profile" in error.fix


def test_packed_documents_are_refused() -> None:
    assert "data.packing" in refusal(TINY, spec_of(2, data={"packing": True})).found


def test_eager_attention_is_refused_asked_for_or_all_that_the_family_has() -> None:
    assert "eager" in refusal(TINY, spec_of(2, model={"attention": "eager"})).found
    gemma = {**TINY, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "sliding_window": None}
    assert "eager" in refusal(gemma, spec_of(2)).found
    refuse_sequence_parallel(gemma, spec_of(2, model={"attention": "flash"}))


def test_sinks_are_refused_with_every_kernel() -> None:
    for attention in ("auto", "flash"):
        found = refusal(GPT_OSS, spec_of(2, model={"attention": attention})).found
        assert "sink" in found


def test_a_window_that_is_reached_needs_flash_attention() -> None:
    facts = {**TINY, "model_type": "mistral", "sliding_window": 512}
    refuse_sequence_parallel(facts, spec_of(2, data={"max_length": 512}))
    refuse_sequence_parallel(facts, spec_of(2, data={"max_length": 4096}, model={"attention": "flash"}))
    error = refusal(facts, spec_of(2, data={"max_length": 4096}))
    assert "sliding window of 512" in error.found and "data.max_length to 512" in error.fix


@pytest.mark.parametrize("facts", [{"model_type": "mamba"}, {"layer_types": ["full_attention", "linear_attention"]}])
def test_states_from_token_to_token_are_refused(facts: dict[str, Any]) -> None:
    assert "outside attention" in refusal({**TINY, **facts}, spec_of(2)).found


def test_models_that_take_no_position_ids_are_refused() -> None:
    assert "position ids" in refusal({**TINY, "model_type": "bloom"}, spec_of(2)).found


def test_all_obstacles_are_told_at_once() -> None:
    error = refusal(GPT_OSS, spec_of(2, data={"packing": True}))
    assert "data.packing" in error.found and "sink" in error.found
