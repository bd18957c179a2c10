"""The list of rules: what each says about itself is true, and only rules whose needs are known are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.budget.advise.staged_plan import find_run_facts
from engine.checks.rule import Known, Need, SeveralProblems, one_error
from engine.checks.rules import RULES
from engine.checks.run import CHECK, PLAN, QUEUE, START, check_run, run_checks
from engine.config.files.data_files import missing_data_files
from engine.config.load import resolve
from engine.config.schema.base import type_at
from engine.config.schema.data import Source
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile, RunSpec
from engine.errors import DataError, EnvironmentProblem, UsageError
from tests.cli.small_recipes import write_profile, write_recipe


def broken(folder: Path) -> RunSpec:
    """A run with a missing file, a missing tracker, and a pattern that matches nothing."""
    pattern = ('kind = "full"', 'kind = "full"\ntrain_only = ["lm_haed"]')
    recipe = write_recipe(folder, pattern, more='\n[trackers]\nuse = ["mlflow"]\n', data=None)
    return resolve(str(write_profile(folder)), str(recipe)).spec


def test_the_keys_of_rules_exist() -> None:
    named = {key for rule in RULES for key in rule.keys if not key.startswith("--")}
    assert len(named) > 40
    unknown = [key for key in named if not any(type_at(table, tuple(key.split("."))) for table in (Recipe, Profile))]
    assert unknown == []


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"recipe"}, []),
        ({"recipe", "config"}, ["'lm_haed' does not match a name"]),
        ({"recipe", "files"}, ["data.jsonl does not exist"]),
        ({"recipe", "machine"}, ["mlflow is not installed"]),
        ({"config", "files", "machine"}, []),
    ],
)
def test_a_rule_is_run_where_its_needs_are_known(tmp_path: Path, needs: set[Need], said: list[str]) -> None:
    spec = broken(tmp_path)
    found = [finding.error.found for finding in run_checks(spec, Known(frozenset(needs), find_run_facts(spec)))]
    assert len(found) == len(said) and all(words in text for words, text in zip(said, found, strict=True))


def test_a_command_refuses_by_level_and_reports_the_rest(tmp_path: Path) -> None:
    spec = broken(tmp_path)
    for command in (CHECK, PLAN, QUEUE, START):
        with pytest.raises(SeveralProblems) as refused:
            check_run(spec, command).require()
        assert [type(error) for error in refused.value.errors] == [UsageError, DataError, EnvironmentProblem]
        assert refused.value.exit_code == UsageError.exit_code
    method = spec.recipe.method.model_copy(update={"train_only": []})
    right = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"method": method})})
    assert len(check_run(right, PLAN).require().reported) == 2
    with pytest.raises(SeveralProblems) as refused:
        check_run(right, QUEUE).require()  # by the tracker: the file may come while it waits
    assert refused.value.exit_code == DataError.exit_code


def test_several_errors_are_one_block() -> None:
    one, other = UsageError("a is wrong", fix="set a"), DataError("b is missing", expected="b")
    assert one_error([]) is None and one_error([other]) is other
    both = one_error([one, other])
    assert both is not None and both.render() == "a is wrong\nfix: set a\nb is missing\nexpected: b"
    assert both.exit_code == 2


def test_a_folder_has_to_hold_a_file_that_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "rows" / "deep").mkdir(parents=True)
    (tmp_path / "rows" / ".hidden").touch()
    sources = [Source(name="main", path=str(tmp_path / "rows"))]
    ((key, error),) = missing_data_files("data.sources", sources, trees=False)
    assert key == "data.sources.main.path" and "has no files" in error.found
    (tmp_path / "rows" / "deep" / "a.jsonl").touch()
    assert not list(missing_data_files("data.sources", sources, trees=False))


def test_patterns_over_whole_trees_are_searched_apart(tmp_path: Path) -> None:
    sources = [Source(name="main", path=str(tmp_path / "**" / "*.jsonl"))]
    assert not list(missing_data_files("data.sources", sources, trees=False))
    ((_, error),) = missing_data_files("data.sources", sources, trees=True)
    assert "no file matches" in error.found
