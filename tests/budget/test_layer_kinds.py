"""Tests that layers are sorted into kinds by trained weights, attention mask, and where gradients stop."""

from __future__ import annotations

from typing import Any

from engine.architecture.facts import Architecture, from_config
from engine.architecture.lookup import builtin_config
from engine.budget.trace.layer import LayerKind, LayerStack, layer_stack
from engine.budget.trace.memory_config import memory_config_of
from tests.budget.metered_step import GEMMA2, GEMMA3, GPT_OSS, MISTRAL, QWEN2, run_spec

TINY = from_config(builtin_config("builtin:tiny"))


def stack(arch: Architecture, **tables: Any) -> LayerStack:
    return layer_stack(arch, memory_config_of(arch, run_spec(**tables)))


def kinds(arch: Architecture, **tables: Any) -> list[LayerKind]:
    return list(stack(arch, **tables).layers)


def test_nothing_below_the_first_adapter_learns() -> None:
    assert [kind.follows for kind in kinds(TINY)] == [False] + [True] * (TINY.layers - 1)


def test_training_the_embeddings_sends_gradients_through_every_layer() -> None:
    assert all(kind.follows for kind in kinds(TINY, method={"kind": "full"}))


def test_layers_below_the_lowest_one_that_learns_have_no_backward() -> None:
    last = TINY.layers - 1
    found = kinds(TINY, method={"kind": "full", "train_only": [f"model.layers.{last}.**"]})
    assert [kind.learns for kind in found] == [False] * last + [True]


def test_only_layers_with_a_window_that_sequences_exceed_need_a_mask() -> None:
    gemma = from_config({**GEMMA3, "num_hidden_layers": 7})
    long, short = {"data": {"max_length": 128}}, {"data": {"max_length": 64}}
    assert [kind.masked for kind in kinds(gemma, **long)] == [True] * 5 + [False] + [True]
    assert not any(kind.masked for kind in kinds(gemma, **short))


def test_window_patterns_are_those_of_the_families() -> None:
    sliding = {config["model_type"]: from_config(config).sliding_layers for config in (GEMMA2, GPT_OSS, MISTRAL)}
    assert sliding["gemma2"] == (True, False, True)
    assert sliding["gpt_oss"] == (True, False, True, False)
    assert from_config({**MISTRAL, "sliding_window": 4096}).sliding_layers == (True,) * 3
    switched_off = from_config({**QWEN2, "sliding_window": 99, "max_window_layers": 2})
    assert sliding["mistral"] == () == switched_off.sliding_layers


def test_a_kind_that_holds_more_is_one_of_the_same_weights_with_a_mask_or_a_gradient_of_its_input() -> None:
    gemma = from_config({**GEMMA3, "num_hidden_layers": 7})
    found = stack(gemma, data={"max_length": 128})
    first, masked, plain = found.kinds
    assert (first.follows, masked.follows, masked.masked, plain.masked) == (False, True, True, False)
    assert found.larger(first) == found.larger(plain) == [masked]
    assert found.larger(masked) == []


def test_layers_between_two_are_counted_by_kind() -> None:
    found = stack(from_config({**GEMMA3, "num_hidden_layers": 7}), data={"max_length": 128})
    _, masked, plain = found.kinds
    assert found.counts(1, 7) == {masked: 5, plain: 1}
    assert (found.spans[masked], found.spans[plain]) == ((1, 6), (5, 5))


def test_of_each_kind_the_first_and_the_last_layer_may_decide_backward() -> None:
    found = stack(from_config({**GEMMA3, "num_hidden_layers": 7}), data={"max_length": 128})
    assert found.ends(checkpointed=False) == {6: "layer_first", 5: "layer_first", 1: "layer_last", 0: "layer_last"}
    assert found.ends(checkpointed=True) == {6: "layer_first", 1: "layer_last", 0: "layer_last"}, "5 is between 1 and 6"
    upper = stack(TINY, method={"kind": "full", "train_only": [f"model.layers.{TINY.layers - 1}.**"]})
    assert upper.ends(checkpointed=True) == {TINY.layers - 1: "layer_first"}
