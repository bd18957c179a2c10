"""What a twin changes of the recipe that ships: model, files, splits, lengths and sizes of images, steps and cadences,
and nothing else."""

from __future__ import annotations

import re

import pytest

from tests.twins.twin import SETS, listed

ALLOWED = re.compile(
    r"model\.id"
    r"|(data|evaluate)\.(sources|validation)\.[\w-]+\.(path|split)"
    r"|data\.(max_length|image_(min|max)_pixels)"
    r"|train\.(max_steps|log_every_steps)"
    r"|(checkpoint|eval)\.every_steps|stages\.[\w-]+\.checkpoint\.keep"
)


@pytest.mark.parametrize("recipe", sorted(path.stem for path in SETS.glob("*.txt")))
def test_a_twin_sets_no_other_key(recipe: str) -> None:
    keys = [line.partition("=")[0] for line in listed(recipe)]
    assert keys and not [key for key in keys if not ALLOWED.fullmatch(key)]
