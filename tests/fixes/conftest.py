"""Records which fix texts were given, and where in the code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine import errors
from tests.cli.conftest import started, tunedeck
from tests.fixes.walk import ROOT, place_of

__all__ = ["started", "tunedeck"]

Given = list[tuple[str, str]]
"""(place, fix) of each error that was made."""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    places: Given = []
    make = errors.TunedeckError.__init__

    def recorded(self: errors.TunedeckError, found: str, *, expected: str = "", fix: str = "") -> None:
        make(self, found, expected=expected, fix=fix)
        frame = sys._getframe(1)
        while frame.f_code.co_filename == errors.__file__ and frame.f_code.co_name == "__init__" and frame.f_back:
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            places.append((f"{place_of(path)}:{frame.f_code.co_name}", fix))

    monkeypatch.setattr(errors.TunedeckError, "__init__", recorded)
    return places
