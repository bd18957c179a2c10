"""[parallel] in a recipe: it overrides the profile's, is overridden by --set, and is ignored with one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.budget.advise.parallel import settle_parallel
from engine.config.load import dump_run_spec, load_run_spec, override, resolve
from engine.config.schema.run import RunSpec
from engine.errors import SpecError, UsageError

RECIPE = """schema = 1
kind = "recipe"
[model]
id = "{model}"
[method]
kind = "lora"
[parallel]
{parallel}
[data]
max_length = {length}
[[data.sources]]
name = "main"
path = "main.jsonl"
"""
AUTO_SHARDED = 'strategy = "sharded"\nsequence = "auto"'
LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def recipe(parallel: str, *, model: str = LLAMA, length: int = 4096) -> str:
    Path("mine.toml").write_text(RECIPE.format(parallel=parallel, model=model, length=length))
    return "mine.toml"


def parallel_of(spec: RunSpec) -> tuple[str, str, int]:
    found = spec.profile.parallel
    return found.strategy, found.shard, found.sequence


def test_the_recipe_counts_more_than_the_profile_and_run_toml_says_so() -> None:
    resolved = resolve("4xh100", recipe('strategy = "sharded"\nshard = "gradients"\nsequence = 4'))
    assert parallel_of(resolved.spec) == ("sharded", "gradients", 4)
    assert resolved.spec.provenance.parallel == (
        'strategy = "sharded" (profile: "auto"), shard = "gradients" (profile: "parameters"), sequence = 4 (profile: 1)'
    )
    assert not resolved.notices
    Path("run.toml").write_text(dump_run_spec(resolved.spec))
    again = override(load_run_spec("run.toml"), ["train.max_steps=3"]).spec
    assert parallel_of(again) == parallel_of(resolved.spec)
    assert again.provenance.parallel == resolved.spec.provenance.parallel
    elsewhere = override(again, [], profile="4xh200").spec
    assert parallel_of(elsewhere) == ("sharded", "gradients", 4)
    Path("mine-4.toml").write_text('kind = "profile"\n[device]\nkind = "cpu"\nmemory_gib = 4.0\n')
    assert override(again, [], profile="mine-4.toml").spec.profile.name == "mine-4"


def test_the_command_line_counts_more_than_the_recipe() -> None:
    name = recipe('strategy = "sharded"\nshard = "gradients"\nsequence = 4')
    spec = resolve("4xh100", name, ["parallel.sequence=2", 'parallel={strategy="replicated"}']).spec
    assert parallel_of(spec) == ("replicated", "gradients", 2)
    assert parallel_of(resolve("4xh100", name, ["parallel.sequence="]).spec)[2] == 1


def test_with_one_device_it_is_left_out_with_one_notice() -> None:
    resolved = resolve("80gb", recipe('strategy = "sharded"\nsequence = 4'))
    assert parallel_of(resolved.spec) == ("single", "parameters", 1)
    (notice,) = resolved.notices
    assert notice.startswith('the recipe\'s [parallel] (strategy = "sharded", sequence = 4) is not used: profile 80gb')
    assert not settle_parallel(resolve("80gb", recipe('sequence = "auto"')).spec).notices


def test_what_the_devices_cannot_do_is_a_problem_at_its_line_of_the_recipe() -> None:
    with pytest.raises(SpecError) as caught:
        resolve("4xh100", recipe('strategy = "single"\nsequence = 3'))
    strategy, sequence = sorted(caught.value.problems)
    assert "mine.toml:8: parallel.strategy:" in strategy and '"single" with 4 devices' in strategy
    assert "mine.toml:9: parallel.sequence:" in sequence and "a divisor of 4" in sequence


@pytest.mark.parametrize(("length", "size"), [(4096, 1), (262144, 2), (524288, 4)])
def test_auto_is_the_fewest_devices_with_which_the_longest_sequence_fits(length: int, size: int) -> None:
    spec, notices = settle_parallel(resolve("4xh100", recipe(AUTO_SHARDED, length=length)).spec)
    assert spec.profile.parallel.sequence == size
    line = f'strategy = "sharded" (profile: "auto"), sequence = {size} (recipe: "auto")'
    assert len(notices) == 1 and spec.provenance.parallel == line
    assert settle_parallel(spec).spec == spec


def test_auto_from_the_command_line_and_where_nothing_fits_or_nothing_is_known() -> None:
    spec, (_, notice) = settle_parallel(
        resolve("4xh100", "lora", ["parallel.sequence=auto", "data.max_length=9999999"]).spec
    )
    # Qwen2.5-0.5B has 14 heads: four devices cannot share them.
    assert spec.profile.parallel.sequence == 2 and "does not fit" in notice
    with pytest.raises(UsageError) as caught:
        settle_parallel(resolve("4xh100", recipe('sequence = "auto"', model="nobody/unheard-of")).spec)
    assert "a divisor of 4" in caught.value.expected
