from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config.files.find import list_spec_files
from engine.config.files.machine import working_directory


@pytest.fixture
def deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory that has been deleted; the process is still in it."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    folder.rmdir()
    yield folder
    monkeypatch.chdir(tmp_path)


def test_a_deleted_working_directory_keeps_the_name_it_had(deleted: Path) -> None:
    assert working_directory() == deleted


def test_without_a_name_it_is_the_root(deleted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PWD")
    assert working_directory() == Path("/")


def test_the_shipped_files_are_found_from_there(deleted: Path) -> None:
    assert {located.origin for located in list_spec_files("recipe")} == {"shipped"}
