"""Globs on dotted names, what they freeze, and the optimizer's groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from engine.config.name_patterns import matches
from engine.config.schema.recipe import ParameterGroup, Train
from engine.errors import UsageError
from engine.model.trained import parameter_groups
from tests.model.samples import load, load_family, run_spec

WEIGHT = "model.layers.12.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [
        (WEIGHT, True),
        ("model.layers.12", True),
        ("model.layers.*.self_attn.q_proj.weight", True),
        ("**.q_proj.*", True),
        ("**.[qk]_proj.weight", True),
        ("**.[!q]_proj.weight", False),
        ("model.layers.1?.**", True),
        ("model.layers.1", False),
        ("model.*.q_proj.weight", False),
        ("q_proj", False),
        ("**", True),
    ],
)
def test_globs(pattern: str, hit: bool) -> None:
    assert matches(pattern, WEIGHT) is hit


def learning(**method: object) -> set[str]:
    return {name for name, _ in load(run_spec(method={"kind": "full", **method})).trainable()}


def test_train_only_leaves_the_rest_as_it_is() -> None:
    names = learning(train_only=["model.layers.[23].mlp.**"])
    assert names == {f"model.layers.{i}.mlp.{part}_proj.weight" for i in (2, 3) for part in ("gate", "up", "down")}


def test_freezing_either_name_of_a_tied_weight_freezes_it() -> None:
    assert "model.embed_tokens.weight" in learning()
    assert "model.embed_tokens.weight" not in learning(freeze=["lm_head"])
    assert "model.embed_tokens.weight" not in learning(freeze=["model.embed_tokens.weight"])


@pytest.mark.parametrize("key", ["train_only", "freeze"])
def test_a_pattern_without_a_match_is_an_error_that_names_neighbours(key: str) -> None:
    with pytest.raises(UsageError, match=f"method.{key}") as caught:
        learning(**{key: ["model.layers.0.self_atn.q_proj.weight"]})
    assert "model.layers.0.self_attn.q_proj.weight" in caught.value.expected


def test_freezing_everything_is_an_error() -> None:
    with pytest.raises(UsageError, match="nothing to train"):
        learning(freeze=["**"])


@pytest.mark.parametrize("key", ["targets", "exclude"])
def test_a_target_without_a_match_names_near_modules(key: str) -> None:
    with pytest.raises(UsageError, match=f"method.{key}") as caught:
        load(run_spec(method={key: ["q_prj"]}))
    assert "q_proj" in caught.value.expected


def test_targets_are_globs_and_exclusions_win() -> None:
    coverage = load(run_spec(method={"targets": ["*_proj"], "exclude": ["model.layers.0.**", "**.mlp.*"]})).coverage
    assert coverage.adapted == {f"self_attn.{part}_proj": 3 for part in "qkvo"}
    assert coverage.left_out["mlp.up_proj"] == 4


def test_also_train_must_take_whole_modules(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="selects part of"):
        load_family(tmp_path, "gpt2", method={"also_train": ["transformer.ln_f.weight"]})


def test_biases_norms_and_vectors_do_not_decay() -> None:
    loaded = load(run_spec(method={"kind": "full"}))
    groups = parameter_groups(loaded.trainable(), Train(learning_rate=2e-4, weight_decay=0.1))
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert decays["model.embed_tokens.weight"] == 0.1
    assert decays["model.layers.0.mlp.up_proj.weight"] == 0.1
    assert decays["model.layers.0.self_attn.q_proj.bias"] == 0.0
    assert decays["model.norm.weight"] == 0.0
    assert len(decays) == len(loaded.trainable())


def test_the_first_matching_group_counts() -> None:
    named = [("a.weight", Parameter(torch.ones(2, 2))), ("b.bias", Parameter(torch.ones(2)))]
    own = [
        ParameterGroup(match="a.**", learning_rate=1.0),
        ParameterGroup(match="**", learning_rate=2.0, weight_decay=0.5),
    ]
    groups = parameter_groups(named, Train(learning_rate=9.0, weight_decay=0.1, groups=own))
    assert [(g["names"], g["lr"], g["weight_decay"]) for g in groups] == [
        (["a.weight"], 1.0, 0.1),
        (["b.bias"], 2.0, 0.5),
    ]


def test_a_group_without_a_match_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"train\.groups"):
        parameter_groups(
            [("a", Parameter(torch.ones(1)))], Train(learning_rate=2e-4, groups=[ParameterGroup(match="b")])
        )
