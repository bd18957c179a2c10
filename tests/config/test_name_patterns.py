"""A recipe's patterns on dotted names."""

from __future__ import annotations

import pytest

from engine.config.name_patterns import compile_pattern, matches, no_match


@pytest.mark.parametrize(
    ("pattern", "name", "wanted"),
    [
        ("model.layers.*.mlp", "model.layers.3.mlp.up_proj.weight", True),
        ("model.layers.*", "model.embed_tokens.weight", False),
        ("*.mlp", "model.layers.3.mlp", False),
        ("**.mlp", "model.layers.3.mlp", True),
        ("model.layers.[0-2]", "model.layers.1.mlp", True),
        ("model.layers.[!0-2]", "model.layers.1.mlp", False),
        ("model.layers.[!0-2]", "model.layers.3.mlp", True),
        ("model.layers.?", "model.layers.12", False),
        ("**.bias", "model.layers.1.self_attn.q_proj.bias", True),
    ],
)
def test_a_pattern_names_parameters_and_modules(pattern: str, name: str, wanted: bool) -> None:
    assert matches(pattern, name) is wanted


def test_a_pattern_for_whole_names_does_not_reach_into_modules() -> None:
    assert compile_pattern("**.mlp").fullmatch("model.layers.3.mlp")
    assert not compile_pattern("**.mlp").fullmatch("model.layers.3.mlp.up_proj")


def test_what_is_suggested_for_a_pattern_without_a_match_has_one() -> None:
    """Regression: `train_only = ["q_proj"]` was told "did you mean 'q_proj'?"."""
    names = ["model.layers.0.self_attn.q_proj.weight"]
    assert no_match("q_proj", names, "method.train_only").fix == "did you mean '**.q_proj'?"
    assert no_match("q_prj", ["model.layers.0.self_attn.q_proj"], "method.targets").fix == "did you mean 'q_proj'?"
