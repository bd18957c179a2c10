"""`compare --fail-if`: a change beyond the bound ends with code 8, unless its interval says that it may be chance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.journal.compare import failures, parse_condition
from engine.journal.score_groups import HELD_OUT
from tests.cli.conftest import Tunedeck, tunedeck
from tests.journal.test_compare import finished, scored

__all__ = ["tunedeck"]


@pytest.mark.parametrize(
    ("text", "reference", "change", "holds"),
    [
        ("exact_match < -1%", 0.5, -0.011, True),
        ("exact_match < -1%", 0.5, -0.009, False),
        ("exact_match<=-0.5", 0.5, -0.5, True),
        ("loss > 2%", 4.0, 0.07, False),
        ("loss > 2%", 4.0, 0.09, True),
        ("gsm8k/exact_match >= 1e-1", 0.0, 0.1, True),
    ],
)
def test_conditions_are_points_of_shares_and_per_cent_of_losses(
    text: str, reference: float, change: float, holds: bool
) -> None:
    assert parse_condition(text).holds(change, reference) is holds


@pytest.mark.parametrize("text", ["", "exact_match", "exact_match = 1", "< 1", "loss > x", "loss > 1 %%"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--fail-if"):
        parse_condition(text)


def test_only_what_is_worse_beyond_its_interval_fails(tmp_path: Path) -> None:
    a, b = finished(tmp_path, "a", 0.5), finished(tmp_path, "b", 0.4)
    scored(a, 10, [1.0] * 40, metric="exact_match")
    scored(b, 10, [1.0] * 30 + [0.0] * 10, metric="exact_match")
    (failed,) = failures([a, b], [parse_condition("exact_match < -1%")], a.name)
    assert failed.run == b.name and "interval" in failed.sentence
    assert not failures([a, b], [parse_condition("exact_match < -30%")], a.name)
    assert failures([a, b], [parse_condition("exact_match < 5%")], a.name), "a demanded gain that is not there"
    chance = finished(tmp_path, "chance", 0.4)
    scored(chance, 10, [1.0] * 39 + [0.0], metric="exact_match")
    assert not failures([a, chance], [parse_condition("exact_match < -1%")], a.name), "one sample of forty is chance"


def test_the_command_ends_with_code_8(tmp_path: Path, tunedeck: Tunedeck) -> None:
    a, b = finished(tmp_path / "runs", "a", 0.5), finished(tmp_path / "runs", "b", 0.4)
    scored(a, 10, [1.0] * 40, metric="exact_match")
    scored(b, 10, [0.0] * 40, metric="exact_match")
    done = tunedeck("compare", a.name, b.name, "--fail-if", "exact_match < -1%")
    assert done.code == 8 and b.name in done.out, done.err
    assert "exact_match < -1%" in done.err and "100.0 %" in done.err
    done = tunedeck("compare", a.name, b.name, "--fail-if", "exact_match < -1%", "--json")
    assert done.code == 8 and [each["run"] for each in json.loads(done.out)["failed"]] == [b.name]
    assert tunedeck("compare", a.name, b.name, "--against", b.name, "--fail-if", "exact_match < -1%").code == 0
    tunedeck("compare", a.name, b.name, "--fail-if", "rouge < 0").complains(2, "rouge")


def test_scores_that_are_not_there_or_of_other_samples_are_told_apart(tmp_path: Path) -> None:
    a, b = finished(tmp_path, "a", 0.5), finished(tmp_path, "b", 0.4)
    asked = [parse_condition("exact_match < -1%")]
    scored(a, 10, [1.0] * 40, metric="exact_match")
    with pytest.raises(UsageError, match=f"no exact_match for {b.name}") as error:
        failures([a, b], asked, a.name)
    assert error.value.fix == f"""tunedeck eval {b.name} --set 'evaluate.metrics=["exact_match"]'""" + HELD_OUT
    scored(b, 10, [1.0] * 30, metric="exact_match")
    with pytest.raises(UsageError, match="validation data differs") as error:
        failures([a, b], asked, a.name)
    assert "--set 'data.validation=" in str(error.value.fix)
    with pytest.raises(UsageError, match="no exact_match for the base") as error:
        failures([a, b], asked, "base")
    assert (
        error.value.fix
        == f"""tunedeck eval {a.name} {b.name} --base --set 'evaluate.metrics=["exact_match"]'{HELD_OUT}"""
    )
