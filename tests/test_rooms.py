"""The shape of the tree: no ring of imports, and the tests that docstrings name exist."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent


def test_tests_that_rooms_name_exist() -> None:
    named = {
        (str(room.relative_to(ROOT)), test)
        for folder in ("engine", "tui", "tests", "benchmarks")
        for room in (ROOT / folder).rglob("*.py")
        for test in re.findall(r"tests/[\w/]+\.py", room.read_text("utf-8"))
    }
    assert len(named) > 50
    assert [(room, test) for room, test in sorted(named) if not (ROOT / test).is_file()] == []


def test_no_files_import_each_other_in_a_ring() -> None:
    graph = grimp.build_graph("engine", "tui", "profiles", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imported.values())) > 1000
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the files of the ring
