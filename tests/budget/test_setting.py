"""What plans are looked up by: equal models and equal choices are one object, however they came about."""

from __future__ import annotations

from typing import Any

import pytest

from engine.budget.architecture import from_config
from engine.budget.lookup import find_config
from engine.budget.plan import _CHOICES, _remedies, remedies
from engine.budget.predict import Budget
from engine.budget.setting import setting_of
from tests.budget.metered import QWEN2, run_spec

ARCH = from_config(QWEN2)


def test_equal_models_are_one_object() -> None:
    found = from_config(QWEN2)
    assert from_config(dict(QWEN2)) is found
    assert from_config({**QWEN2, "hidden_size": 2 * QWEN2["hidden_size"]}) is not found
    seeing = find_config("google/gemma-3-4b-pt")
    assert from_config(seeing) is from_config(seeing)


def test_equal_choices_are_one_object() -> None:
    setting = setting_of(ARCH, run_spec(train={"loss": "plain"}))
    assert setting_of(ARCH, run_spec(train={"loss": "plain"})) is setting
    assert setting.but(loss="fused") is setting_of(ARCH, run_spec(train={"loss": "fused"}))
    assert setting.but(loss="fused").but(loss="plain") is setting


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(KeyError):
        setting_of(ARCH, run_spec()).but(gradient_checkpointing=True)


@pytest.mark.parametrize("method", [{"kind": "full"}, {"rank": 4}], ids=str)
def test_a_remedied_budget_is_that_of_the_remedied_recipe(method: dict[str, Any]) -> None:
    spec = run_spec(method=method, train={"loss": "plain", "gradient_checkpointing": False})
    budget = Budget(ARCH, spec)
    tried = list(zip(_remedies(spec), remedies(spec), strict=True))
    assert len(tried) > 3
    for changes, remedied in tried:
        found = budget.remedied({_CHOICES.get(key, key): value for key, value in changes.items()})
        assert found.setting is setting_of(ARCH, remedied)
        assert found.above_bytes(2, 64) == Budget(ARCH, remedied).above_bytes(2, 64)
