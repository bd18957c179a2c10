"""Stages of a recipe: what each inherits, what it may start from, and where its problems are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import dump_run_spec, load_run_spec, resolve
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import RunSpec
from engine.config.stages import dependants, last_training_stage, required_stages, stage_specs
from engine.errors import SpecError

HEAD = """schema = 1
kind = "recipe"
name = "staged"
[model]
id = "owner/base"
revision = "v2"
[method]
kind = "lora"
rank = 4
[data]
sources = [{ name = "main", path = "train.jsonl" }]
[train]
max_steps = 8
warmup_ratio = 0.25
"""
TWO = """[[stages]]
name = "first"
train = { learning_rate = 1e-3, warmup_steps = 2 }
finish = { merge = true }
[[stages]]
name = "second"
from = "first"
method = { kind = "full" }
"""
ASSEMBLY = """[[stages]]
name = "a"
method = { kind = "full" }
[[stages]]
name = "b"
method = { kind = "full" }
[[stages]]
name = "mixture"
kind = "assemble"
from = ["a", "b", "base"]
[[stages]]
name = "router"
from = "mixture"
method = { kind = "full" }
"""


def spec_of(folder: Path, stages: str, *overrides: str) -> RunSpec:
    """Resolve a recipe of these stages on the demo profile."""
    (folder / "staged.toml").write_text(HEAD + stages)
    return resolve("demo", str(folder / "staged.toml"), overrides).spec


def recipes(spec: RunSpec) -> dict[str, Recipe]:
    return {stage.name.removeprefix("staged/"): stage.recipe for stage in stage_specs(spec)}


def problems(folder: Path, stages: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        spec_of(folder, stages)
    return caught.value.problems


def test_a_stage_is_the_recipe_with_its_own_tables_over_it(tmp_path: Path) -> None:
    first, second = recipes(spec_of(tmp_path, TWO)).values()
    assert (first.model.id, first.model.revision, first.train.learning_rate) == ("owner/base", "v2", 1e-3)
    assert (first.train.max_steps, second.train.max_steps) == (8, 8)
    assert first.stages == second.stages == []


def test_a_key_of_a_stage_replaces_the_key_that_excludes_it(tmp_path: Path) -> None:
    first, second = recipes(spec_of(tmp_path, TWO)).values()
    assert (first.train.warmup_steps, first.train.warmup_ratio) == (2, None)
    assert (second.train.warmup_steps, second.train.warmup_ratio) == (None, 0.25)


def test_a_stage_that_names_its_method_does_not_inherit_the_recipes(tmp_path: Path) -> None:
    first, second = recipes(spec_of(tmp_path, TWO)).values()
    assert (first.method.kind, first.method.rank) == ("lora", 4)
    assert (second.method.kind, second.method.rank) == ("full", 16)


def test_a_stage_that_starts_from_another_leaves_the_recipes_model_behind(tmp_path: Path) -> None:
    model = recipes(spec_of(tmp_path, TWO))["second"].model
    assert (model.id, model.revision) == ("stage:first", None)


def test_overrides_reach_all_stages_or_one(tmp_path: Path) -> None:
    found = recipes(spec_of(tmp_path, TWO, "train.learning_rate=0.5", "stages.second.train.max_steps=3"))
    assert [(stage.train.learning_rate, stage.train.max_steps) for stage in found.values()] == [(0.5, 8), (0.5, 3)]


def test_each_stage_has_the_default_learning_rate_of_its_own_method(tmp_path: Path) -> None:
    unset = TWO.replace("learning_rate = 1e-3, ", "")
    spec = spec_of(tmp_path, unset)
    (tmp_path / "run.toml").write_text(dump_run_spec(spec))
    for staged in (spec, load_run_spec(tmp_path / "run.toml")):
        assert [recipe.train.learning_rate for recipe in recipes(staged).values()] == [2e-4, 2e-5]
    given = recipes(spec_of(tmp_path, unset, "train.learning_rate=3e-4"))
    assert [recipe.train.learning_rate for recipe in given.values()] == [3e-4, 3e-4]
    with pytest.raises(SpecError) as caught:
        spec_of(tmp_path, unset, "train.min_learning_rate=1e-4")
    assert "0.0001 above learning_rate = 2e-05; 2e-05 or less is allowed" in caught.value.problems[0]
    assert spec_of(tmp_path, TWO.replace('kind = "full"', 'kind = "lora"'), "train.min_learning_rate=1e-4")


def test_a_staged_run_spec_survives_being_written_and_read(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, ASSEMBLY)
    (tmp_path / "run.toml").write_text(dump_run_spec(spec))
    assert load_run_spec(tmp_path / "run.toml") == spec


def test_an_assembly_needs_its_experts_and_passes_on_to_what_starts_from_it(tmp_path: Path) -> None:
    recipe = spec_of(tmp_path, ASSEMBLY).recipe
    assert required_stages(recipe.stages[2]) == ["a", "b"]
    assert dependants(recipe, "a") == {"mixture", "router"}
    assert last_training_stage(recipe)[1].name == "router"


WRONG = {
    '[[stages]]\nname = "a"\nfrom = "b"\n': ["stages.a.from", "not an earlier stage"],
    '[[stages]]\nname = "first"\n[[stages]]\nname = "b"\nfrom = "frist"\n': ["stages.b.from", 'did you mean "first"?'],
    '[[stages]]\nname = "a"\n[[stages]]\nname = "b"\nmodel = { adapter = "stage:c" }\n': ["stages.b.model", "earlier"],
    '[[stages]]\nname = "a"\nenabled = false\n[[stages]]\nname = "b"\nfrom = "a"\n': ["disabled", "enabled=false"],
    '[[stages]]\nname = "a"\n[[stages]]\nname = "b"\nfrom = ["a", "a"]\n': ["2 stages to start from", "assemble"],
    '[[stages]]\nname = "a"\n[[stages]]\nname = "b"\nfrom = "a"\nmodel = { id = "x/y" }\n': ["both from and model.id"],
    '[[stages]]\nname = "a"\nrouter = "random"\n': ["stages.a.router", "assemble"],
    '[[stages]]\nname = "a"\n[[stages]]\nname = "m"\nkind = "assemble"\nfrom = "a"\n': ["1 expert", "two or more"],
    ASSEMBLY.replace('"base"]', '"base"]\nexperts_per_token = 4'): ["4 of 3 experts", "at most 3"],
    ASSEMBLY.replace('"base"]', '"base"]\ntrain = { seed = 1 }'): ["[train]", "does not train"],
    ASSEMBLY.replace('name = "a"\nmethod = { kind = "full" }', 'name = "a"'): ["ends with an adapter", "finish.merge"],
    TWO.replace("merge = true", "merge = false"): ["full fine-tuning needs full weights", "finish.merge = true"],
    '[[stages]]\nname = "base"\n': ["stages.base.name", "another name"],
    '[[stages]]\nname = "a"\nenabled = false\n': ["no enabled stage trains"],
    '[[stages]]\nname = "a"\ntrain = { warmup_steps = -1 }\n': ["stages.a.train.warmup_steps"],
    '[[stages]]\nname = "a"\nmethod = { train_only = ["**"] }\n': ["stages.a.method.train_only"],
    '[[stages]]\nname = "a"\nmodel = { quantize = "nf4" }\n': ["stages.a.model.quantize", "CUDA"],
}  # fmt: skip


@pytest.mark.parametrize("stages", WRONG)
def test_a_wrong_stage_is_refused_at_its_own_line(tmp_path: Path, stages: str) -> None:
    found = problems(tmp_path, stages)
    assert any(all(word in line for word in WRONG[stages]) for line in found), found
    assert all(line.startswith(f"{tmp_path}/staged.toml:") for line in found), found


WITHOUT_SOURCES = HEAD.replace('[data]\nsources = [{ name = "main", path = "train.jsonl" }]\n', "")
OWN_SOURCES = """[[stages]]
name = "first"
data = { sources = [{ name = "one", path = "one.jsonl" }] }
[[stages]]
name = "second"
from = "first"
data = { sources = [{ name = "two", path = "two.jsonl" }], max_length = 64 }
"""


def test_a_recipe_whose_stages_all_name_data_needs_none_of_its_own(tmp_path: Path) -> None:
    recipe = tmp_path / "staged.toml"
    recipe.write_text(WITHOUT_SOURCES + OWN_SOURCES)
    spec = resolve("demo", str(recipe), ["stages.second.data.sources.two.limit=5"]).spec
    first, second = stage_specs(spec)
    assert [source.name for stage in (first, second) for source in stage.recipe.data.sources] == ["one", "two"]
    assert second.recipe.data.sources[0].limit == 5 and second.recipe.data.max_length == 64
    (tmp_path / "run.toml").write_text(dump_run_spec(spec))
    assert load_run_spec(tmp_path / "run.toml") == spec
    recipe.write_text(WITHOUT_SOURCES + TWO + OWN_SOURCES.replace('"first"', '"third"').replace('"second"', '"fourth"'))
    with pytest.raises(SpecError, match=r"data: missing"):
        resolve("demo", str(recipe), [])
