"""A run can be started from a working directory that was deleted, although libraries that look up that directory would
end the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe


def test_a_run_trains_from_a_deleted_folder(
    tunedeck: Tunedeck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, recipe = write_profile(tmp_path), write_recipe(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        outcome = tunedeck("train", "-p", profile, "-r", recipe)
    finally:
        monkeypatch.chdir(tmp_path)
    assert outcome.code == 0, outcome.err
