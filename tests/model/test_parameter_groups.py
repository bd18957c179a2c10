"""Entries of [[train.groups]]: the plan has the engine's names of parameters, and a group without any is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn import Parameter

from engine.architecture.lookup import find_facts
from engine.budget.advise.model_rules import refuse_with_model
from engine.budget.advise.preflight import warnings_of
from engine.budget.trace.memory_config import memory_config_of
from engine.budget.trace.trainable import trained_parameters
from engine.config.schema.run import RunSpec
from engine.errors import UsageError
from engine.model.trained import parameter_groups
from tests.model.samples import load, run_spec, write_model


def planned(spec: RunSpec) -> dict[str, list[str]]:
    arch = find_facts(spec.recipe.model).require_architecture()
    return trained_parameters(arch, memory_config_of(arch, spec))


@pytest.mark.parametrize(
    ("family", "method", "keys"),
    [
        ("llama", {}, {}),
        ("llama", {"dora": True, "also_train": ["lm_head"], "freeze": ["model.layers.0"]}, {"add_tokens": ["<a>"]}),
        ("qwen2", {"kind": "full"}, {"tie_word_embeddings": True}),
        ("gpt2", {"targets": ["c_attn"]}, {"add_tokens": ["<a>"]}),
        ("mixtral", {"targets": ["gate_up_proj", "down_proj", "q_proj"]}, {}),
        ("mixtral", {"targets": ["down_proj"]}, {}),
    ],
)
def test_the_plan_knows_the_names_of_trained_parameters(
    family: str, method: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    changes = {key: value for key, value in keys.items() if key.startswith("tie")}
    rest = {key: value for key, value in keys.items() if key not in changes}
    if "lm_head" in method.get("also_train", ()):
        method = {**method, "also_train": ["lm_head", "model.embed_tokens"]}
    spec = run_spec(str(write_model(tmp_path / "model", family, **changes)), method=method, **rest)
    loaded = load(spec)
    assert planned(spec) == loaded.names_of(name for name, _ in loaded.trainable())


def groups(*matches: str) -> dict[str, Any]:
    return {"groups": [{"match": each, "learning_rate": 1e-5 * (1 + i)} for i, each in enumerate(matches)]}


def test_each_group_reports_what_it_has() -> None:
    spec = run_spec(method={"kind": "full"}, train=groups("**.layers.0.**", "**.layers.**", "lm_head.weight"))
    notes = [note for note in warnings_of(find_facts(spec.recipe.model), spec) if note.startswith("train.groups")]
    assert len(notes) == 1 and '"**.layers.**" has 36 parameters, without 12 that an earlier group has' in notes[0]
    assert '"lm_head.weight" has 1 parameter' in notes[0]


@pytest.mark.parametrize(
    ("matches", "says"),
    [
        (("**.layers.**", "**.layers.0.**"), '"\\*\\*.layers.0.\\*\\*" has no parameter left'),
        (("**.layers.**", "**.layers.**"), "has no parameter left"),
        (("**.self_atn.**",), "does not match a name"),
    ],
)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_group_without_parameters_is_refused_before_the_start_and_by_the_engine(
    matches: tuple[str, ...], says: str, kind: str
) -> None:
    spec = run_spec(method={"kind": kind}, train=groups(*matches))
    with pytest.raises(UsageError, match=says):
        refuse_with_model(spec, find_facts(spec.recipe.model))
    named = [(name, Parameter()) for name in planned(spec)]
    with pytest.raises(UsageError, match=says):
        parameter_groups(named, spec.recipe.train)


def test_the_groups_of_adapters_are_found_by_their_matrices() -> None:
    spec = run_spec(train=groups("**.lora_B.**"))
    refuse_with_model(spec, find_facts(spec.recipe.model))
    spec = run_spec(method={"freeze": ["**.mlp"]}, train=groups("**.mlp.**"))
    with pytest.raises(UsageError, match="does not match a name"):
        refuse_with_model(spec, find_facts(spec.recipe.model))
