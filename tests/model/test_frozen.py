"""What method.freeze leaves as it is: beside new adapters, of an adapter that is continued, parts of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from engine.architecture.facts import from_config
from engine.architecture.lookup import find_facts
from engine.architecture.parameters import globs_of_parts, parameter_names
from engine.budget.advise.model_rules import refuse_patterns
from engine.budget.advise.preflight import warnings_of
from engine.budget.trace.memory_config import patterns_of
from engine.budget.trace.trainable import learning_names
from engine.config.name_patterns import PARTS, compile_patterns
from engine.errors import UsageError
from engine.model.trained import parameters_of_part
from tests.model.samples import disturb, load, load_family, name_base, run_spec
from tests.nested_models import NESTED
from tests.vision_models import write_gemma3, write_qwen2_vl


def trained(**method: Any) -> set[str]:
    return {name for name, _ in load(run_spec(method=method)).trainable()}


@pytest.mark.parametrize("pattern", ["model.layers.0", "model.layers.0.**.weight", "**.layers.0.*.*_proj"])
def test_frozen_modules_get_no_adapter(pattern: str) -> None:
    rest = {name for name in trained() if ".layers.0." not in name}
    assert rest and trained(freeze=[pattern]) == rest


def test_frozen_modules_are_not_trained_in_full_beside_adapters() -> None:
    norms = ["**.*_layernorm"]
    names = {name for name in trained(also_train=norms) if ".layers.0.post" not in name}
    assert trained(also_train=norms, freeze=["**.layers.0.post_*"]) == names


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ({"freeze": ["nonsense.**"]}, "method.freeze: 'nonsense.\\*\\*' does not match a name"),
        ({"freeze": ["model.norm"], "also_train": ["model.norm"]}, "method.also_train: 'model.norm' names only what"),
        ({"freeze": ["model"]}, "nothing to train"),
        ({"freeze": ["vision"]}, '"vision" names a part of models with images'),
        ({"kind": "full", "train_only": ["model.norm", "lm_head"], "freeze": ["model.norm"]}, "method.train_only"),
    ],
)
def test_a_pattern_that_freezes_nothing_or_too_much_is_refused(method: dict[str, Any], says: str) -> None:
    spec = run_spec(method=method)
    arch = find_facts(spec.recipe.model).require_architecture()
    with pytest.raises(UsageError, match=says):
        refuse_patterns(arch, spec.recipe)
    with pytest.raises(UsageError, match=says):
        load(spec)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_only_the_named_layers_get_adapters(targets: Any) -> None:
    spec = run_spec(method={"targets": targets, "layers": [1, 3]})
    rest = {name for name in trained(targets=targets) if name.startswith(("model.layers.1.", "model.layers.3."))}
    assert rest and {name for name, _ in load(spec).trainable()} == rest
    arch = find_facts(spec.recipe.model).require_architecture()
    planned = learning_names(arch, patterns_of(arch, spec.recipe))
    assert {name.removesuffix(".weight") for name in planned} == {name.partition(".lora_")[0] for name in rest}
    beyond = run_spec(method={"layers": [1, 4]})
    for check in (lambda: refuse_patterns(arch, beyond.recipe), lambda: load(beyond)):
        with pytest.raises(UsageError, match=r"method\.layers: no target is in layer 4"):
            check()


def test_added_tokens_whose_embedding_is_frozen_are_refused() -> None:
    with pytest.raises(UsageError, match="would never learn the added tokens"):
        load(run_spec(add_tokens=["<a>"], method={"freeze": ["model.embed_tokens"]}))


def test_freezing_what_is_not_trained_anyway_is_noted() -> None:
    spec = run_spec(method={"freeze": ["model.norm", "model.layers.1"]})
    notes = [note for note in warnings_of(find_facts(spec.recipe.model), spec) if "method.freeze" in note]
    assert len(notes) == 1 and '"model.norm" has no effect' in notes[0]


@pytest.mark.parametrize("method", [{}, {"kind": "full"}, {"also_train": ["lm_head"]}])
def test_the_plan_counts_what_the_engine_trains(method: dict[str, Any]) -> None:
    spec = run_spec(method={**method, "freeze": ["model.layers.[0-1]", "**.mlp.down_proj"]})
    arch = find_facts(spec.recipe.model).require_architecture()
    planned = {name.removesuffix(".weight") for name in learning_names(arch, patterns_of(arch, spec.recipe))}
    assert {name.partition(".lora_")[0].removesuffix(".weight") for name, _ in load(spec).trainable()} == planned


def test_frozen_matrices_of_a_continued_adapter_stay_as_they_are(tmp_path: Path) -> None:
    first = load_family(tmp_path, "llama", method={"also_train": ["lm_head"]})
    disturb(first)
    first.save(tmp_path / "adapter")
    name_base(tmp_path / "adapter", tmp_path / "llama")
    freeze = ["model.layers.0.self_attn", "lm_head"]
    loaded = load(run_spec(str(tmp_path / "adapter"), method={"freeze": freeze}))
    names = {name for name, _ in first.trainable()}
    frozen = {name for name in names if name.startswith(tuple(freeze))}
    assert len(frozen) > 2 and {name for name, _ in loaded.trainable()} == names - frozen
    loaded.save(tmp_path / "again")
    assert _tensors(tmp_path / "adapter") == _tensors(tmp_path / "again")


def _tensors(folder: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("family", NESTED)
def test_the_parts_of_a_model_with_images_are_told_apart(family: str) -> None:
    config = AutoConfig.for_model(family, **NESTED[family])
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    parts = {part: parameters_of_part(model, part) for part in PARTS}
    assert set().union(*parts.values()) == names and sum(map(len, parts.values())) == len(names)
    assert all(parts.values())
    words = ("projector", "merger", "connector")
    assert all(any(word in name for word in words) for name in parts["projector"])
    assert all(
        "language_model" in name or "text_model" in name or name == "lm_head.weight" for name in parts["language"]
    )


@pytest.mark.parametrize("write", [write_qwen2_vl, write_gemma3])
def test_the_plan_finds_the_same_parts(write: Any, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write(tmp_path))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    arch = from_config(config.to_dict())
    for part in PARTS:
        test = compile_patterns(globs_of_parts([part], arch)).matches
        assert {name for name in parameter_names(arch) if test(name)} == parameters_of_part(model, part)


def test_a_part_is_frozen_by_its_name(tmp_path: Path) -> None:
    folder = str(write_gemma3(tmp_path))
    whole = {"kind": "full", "train_only": ["**"]}
    names = {name for name, _ in load(run_spec(folder, method=whole)).trainable()}
    for part, prefix in (("vision", "model.vision_tower."), ("projector", "model.multi_modal_projector.")):
        kept = {name for name, _ in load(run_spec(folder, method={**whole, "freeze": [part]})).trainable()}
        assert names - kept == {name for name in names if name.startswith(prefix)} != set()
    targets = {"targets": ["q_proj"], "freeze": ["language"]}
    left = {name for name, _ in load(run_spec(folder, method=targets)).trainable()}
    assert left and all(name.startswith("model.vision_tower.") for name in left)
