"""A cache of its own for every test of this room, and small files to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TUNEDECK_CACHE", str(folder))
    return folder


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
