"""What a run takes from the adapter that it continues: plans count its rank and modules, and a key of [method] that
differs is an error, as is another base."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.architecture.lookup import find_architecture, find_facts
from engine.budget.advise.plan import make_plan
from engine.budget.predict.static import static_bytes
from engine.budget.trace.memory_config import memory_config_of
from engine.checks.run import PLAN, CheckedRun, check_run
from engine.config.load import dump_run_spec, load_run_spec, resolve
from engine.config.schema.run import RunSpec
from engine.errors import UnknownArchitectureError, UsageError
from engine.journal.directory import RunDirectory
from tests.model.samples import load, write_model
from tests.model.saved_adapters import foreign, lora

RECIPE = """
model = {{ id = "{base}", dtype = "float32" }}
data = {{ max_length = 64, sources = [{{ name = "dates", path = "builtin:dates" }}] }}
train = {{ max_steps = 2, batch_size = 4 }}
"""
PROFILE = 'device = { kind = "cpu", memory_gib = 4.0 }\n'


def admit(spec: RunSpec) -> CheckedRun:
    """Check a run as `plan` does."""
    return check_run(spec, PLAN).require()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bases") / "llama", "llama")


def spec_of(folder: Path, base: Path, *sets: str, more: str = "") -> RunSpec:
    (folder / "cpu.toml").write_text(PROFILE)
    (folder / "recipe.toml").write_text(RECIPE.format(base=base) + more)
    return resolve(str(folder / "cpu.toml"), str(folder / "recipe.toml"), sets).spec


@pytest.mark.parametrize(
    ("change", "sets"),
    [
        ({}, []),
        ({"r": 32, "target_modules": "all-linear"}, []),
        ({"use_dora": True, "modules_to_save": ["lm_head"]}, []),
        ({"layers_to_transform": [1]}, ['method.also_train=["model.norm", "lm_head"]']),
    ],
)
def test_a_plan_counts_what_the_adapter_has(
    tmp_path: Path, base: Path, change: dict[str, Any], sets: list[str]
) -> None:
    folder = foreign(base, tmp_path / "adapter", lora(**change))
    spec = admit(spec_of(tmp_path, base, f"model.adapter={folder}", *sets)).spec
    loaded = load(spec)
    sizes = {name: each.numel() * 4 for name, each in loaded.trainable()}
    arch = find_architecture(spec)
    planned = static_bytes(arch, memory_config_of(arch, spec)).total
    blocks = [-(-size // 512) * 512 for size in sizes.values()]
    matrices = [-(-size // 512) * 512 for name, size in sizes.items() if "lora_" in name]
    assert (planned.adapters, planned.gradients) == (sum(matrices), sum(blocks))
    assert make_plan(spec).as_json()["components"]["adapters"] == sum(matrices)
    assert load_run_spec_of(tmp_path, spec).recipe.method == spec.recipe.method


def load_run_spec_of(folder: Path, spec: RunSpec) -> RunSpec:
    (folder / "run.toml").write_text(dump_run_spec(spec))
    return load_run_spec(folder / "run.toml")


@pytest.mark.parametrize("change", [{"rank_pattern": {"q_proj": 2}}, {"target_modules": ["q_proj", "lm_head"]}])
def test_an_adapter_without_a_formula_is_simulated(tmp_path: Path, base: Path, change: dict[str, Any]) -> None:
    folder = foreign(base, tmp_path / "adapter", lora(**change))
    facts = find_facts(spec_of(tmp_path, base, f"model.adapter={folder}").recipe.model)
    assert isinstance(facts.reason, UnknownArchitectureError) and str(folder) in facts.reason.found


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            ["method.rank=64", "method.dora=true", "method.dropout=0.5"],
            r"rank = 64.*dropout = 0\.5.*dora = true.*rank = 4",
        ),
        (["method.alpha=4"], "alpha = 4.*alpha = 8"),
        (["method.rslora=true"], "rslora = true.*rslora = false"),
        (['method.targets="all-linear"'], 'targets = "all-linear".*targets = \\["q_proj", "v_proj"\\]'),
        (['method.exclude=["**.layers.0.**"]', 'method.targets=["q_proj", "v_proj"]'], r"exclude = .*exclude = \[\]"),
    ],
)
def test_what_differs_from_the_adapter_is_an_error(tmp_path: Path, base: Path, sets: list[str], said: str) -> None:
    folder = foreign(base, tmp_path / "adapter", lora())
    with pytest.raises(UsageError, match=said) as caught:
        admit(spec_of(tmp_path, base, f"model.adapter={folder}", *sets))
    assert str(folder) in caught.value.found


def test_what_agrees_is_none_and_the_values_are_shown(tmp_path: Path, base: Path) -> None:
    folder = foreign(base, tmp_path / "adapter", lora())
    sets = [f"model.adapter={folder}", "method.rank=4", "method.alpha=8", 'method.targets=["v_proj", "q_proj"]']
    admitted = admit(spec_of(tmp_path, base, *sets))
    assert any("rank = 4, alpha = 8" in notice and str(folder) in notice for notice in admitted.notices)
    again = admit(load_run_spec_of(tmp_path, admitted.spec)).spec
    assert again.recipe == admitted.spec.recipe


def test_a_recipe_with_another_rank_is_an_error_only_where_it_names_the_adapter(tmp_path: Path, base: Path) -> None:
    folder = foreign(base, tmp_path / "adapter", lora())
    admitted = admit(spec_of(tmp_path, base, f"model.adapter={folder}", more="method = { rank = 16 }\n"))
    assert admitted.spec.recipe.method.rank == 4 and any("rank = 16 of the recipe" in each for each in admitted.notices)
    inside = f'method = {{ rank = 16 }}\n[model]\nid = "{base}"\nadapter = "{folder}"\n'
    data = RECIPE.format(base=base).partition("data =")[2]
    (tmp_path / "recipe.toml").write_text(f"data ={data}{inside}")
    with pytest.raises(UsageError, match=r"rank = 16.*rank = 4"):
        admit(resolve(str(tmp_path / "cpu.toml"), str(tmp_path / "recipe.toml")).spec)


STAGES = """
[[stages]]
name = "one"
[[stages]]
name = "two"
from = "one"
method = {{ {keys} }}
"""


def test_a_stage_takes_the_method_of_the_stage_whose_adapter_it_continues(tmp_path: Path, base: Path) -> None:
    with pytest.raises(UsageError, match=r"stage two: rank = 32, alpha = 64, dropout = 0\.1.*stage one.*rank = 16"):
        admit(spec_of(tmp_path, base, more=STAGES.format(keys='rank = 32, dropout = 0.1, also_train = ["lm_head"]')))
    admit(spec_of(tmp_path, base, more=STAGES.format(keys='also_train = ["lm_head"]')))


def test_the_base_of_the_adapters_run_is_compared(tmp_path: Path, base: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "20261120T000000Z-first")
    run.path.mkdir(parents=True)
    run.run_toml.write_text(dump_run_spec(spec_of(tmp_path, base)))
    foreign(base, run.adapter, lora())
    other = write_model(tmp_path / "other", "llama", num_hidden_layers=3)
    with pytest.raises(UsageError, match=r"other, but the adapter .* was trained on .*llama"):
        admit(spec_of(tmp_path, other, f"model.adapter=run:{run.path}"))
    admit(spec_of(tmp_path, base, f"model.adapter=run:{run.path}"))


def test_another_base_than_the_adapters_config_names_is_shown(tmp_path: Path, base: Path) -> None:
    folder = foreign(base, tmp_path / "adapter", lora())
    other = write_model(tmp_path / "other", "qwen2")
    notices = admit(spec_of(tmp_path, other, f"model.adapter={folder}")).notices
    assert any(f"was trained on {base}, but model.id is {other}" in notice for notice in notices)
    shutil.copytree(base, tmp_path / "copied")
    same = admit(spec_of(tmp_path, tmp_path / "copied", f"model.adapter={folder}")).notices
    assert not any("was trained on" in notice for notice in same)
