"""A recipe's patterns on dotted names."""

from __future__ import annotations

import pytest

from engine.config.name_patterns import compile_pattern, matches, matches_end, no_match


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
    assert compile_pattern("**.mlp").matches("model.layers.3.mlp")
    assert not compile_pattern("**.mlp").matches("model.layers.3.mlp.up_proj")


def test_what_is_suggested_for_a_pattern_without_a_match_has_one() -> None:
    """Regression: `train_only = ["q_proj"]` was told "did you mean 'q_proj'?"."""
    names = ["model.layers.0.self_attn.q_proj.weight"]
    assert no_match("q_proj", names, "method.train_only").fix == "did you mean '**.q_proj'?"
    assert no_match("q_prj", ["model.layers.0.self_attn.q_proj"], "method.targets").fix == "did you mean 'q_proj'?"


NAMES = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(80) for part in "qkvo"]
LONG = "a" * 5_000


@pytest.mark.parametrize("pattern", [
    "*" * 40 + "z", "*a" * 40 + "z", "**a" * 40 + "z", "**.*" * 40 + "z", "?*" * 40 + "z", "[!z]*" * 40 + "z",
    "*" * 1_900 + "z", "*a" * 900 + "z", "*[a-z]" * 300 + "z", "*a" * 5_000 + "z", "**" * 500_000 + "z",
])  # fmt: skip
def test_a_pattern_of_many_stars_takes_time_by_the_length_of_the_names(pattern: str) -> None:
    """Regression: a regular expression did not end for 40 stars."""
    assert not any(matches(pattern, name) or matches_end(pattern, name) for name in [*NAMES, LONG, f"a.{LONG}"])
    assert matches(pattern, LONG + "z") is matches(pattern, LONG + "z.weight")


def test_a_long_pattern_is_cut_in_the_message() -> None:
    error = no_match("*a" * 100_000, NAMES, "method.targets")
    assert len(error.render()) < 1000


@pytest.mark.parametrize(("piece", "inside", "outside"), [
    ("[0-9]", "059", "a."), ("[!0-9]", "a.", "5"), ("[^0-9]", "a", "5"), ("[a-]", "a-", "b"), ("[-a]", "a-", "b"),
    ("[z-a]", "", "zma"), ("[\\d]", "\\d", "5"), ("[", "[", "a"), ("[a.]", "a.", "b"), ("?", "a[", "."),
])  # fmt: skip
def test_one_character_is_matched(piece: str, inside: str, outside: str) -> None:
    assert all(compile_pattern(piece).matches(character) for character in inside)
    assert not any(compile_pattern(piece).matches(character) for character in outside)
