"""Completion from the schema: keys of the present table, words that a key allows, and tables."""

from __future__ import annotations

import pytest

from engine.config.schema.base import Table
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile
from tui.toml.completion import Completion, complete, key_help


def at_bar(text: str, model: type[Table] = Recipe) -> Completion | None:
    """Complete at the bar `|` in the text."""
    lines = text.split("\n")
    row = next(index for index, line in enumerate(lines) if "|" in line)
    column = lines[row].index("|")
    lines[row] = lines[row].replace("|", "")
    return complete(model, lines, row, column)


def words(text: str, model: type[Table] = Recipe) -> list[str]:
    """What can be written at the bar `|`."""
    found = at_bar(text, model)
    return [candidate.text for candidate in found.candidates] if found else []


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("[train]\nlear|", "learning_rate = "),
        ("[train]\nloss = |", '"auto"'),
        ('[train]\nloss = "ch|"', '"chunked"'),
        ("[train]\ngradient_checkpointing = f|", "false"),
        ("[train]\nbatch_size = |", "16"),
        ("[da|", "[data]"),
        ("[[data.v|]]", "[[data.validation]]"),
        ("[[data.sources]]\npa|", "path = "),
        ('[[stages]]\nname = "a"\n[stages.train]\nbat|', "batch_size = "),
        ("[[stages]]\nfr|", "from = "),
        ("tit|", "title = "),
    ],
)
def test_what_can_be_written_comes_first(text: str, first: str) -> None:
    assert words(text)[0] == first


def test_the_overrides_of_a_profile_are_keys_of_a_recipe() -> None:
    assert words("[overrides]\ntrain.loss|", Profile)[0] == "loss = "
    assert words("[overrides.model]\ndty|", Profile) == ["dtype = "]
    assert "[overrides.train]" in words("[over|", Profile)


def test_a_key_says_what_it_allows_and_means() -> None:
    found = at_bar("[train]\nbatch_s|")
    assert found is not None
    assert found.candidates[0].allowed == "an integer, 1 or more; default 16"
    assert found.candidates[0].help.startswith("Sequences per optimizer step")
    assert key_help(Recipe, ["[train]", "batch_size = 3"], 1) == tuple(found.candidates[0][2:])


@pytest.mark.parametrize("text", ["# lear|", 'notes = """\nlear|', "[train]\nseed = 3 # t|", "[unknown]\na|"])
def test_nothing_is_offered_where_the_schema_knows_nothing(text: str) -> None:
    assert at_bar(text) is None


def test_a_key_that_the_table_has_is_not_offered_again() -> None:
    assert "seed = " not in words("[train]\n|\nseed = 1\n[eval]\nsamples = 2")
    assert "samples = " not in words("[train]\nseed = 1\n[eval]\n|\nsamples = 2")


def test_the_rest_of_the_word_is_replaced() -> None:
    found = at_bar("[train]\nbatch|_siz = 3")
    assert found is not None
    assert (found.start, found.end, found.candidates[0].text) == (0, 9, "batch_size")
