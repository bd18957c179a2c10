"""The structure of the repository: no circular imports, no definition that is never used, and every test that a
docstring names exists."""

from __future__ import annotations

import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import vulture  # type: ignore[import-untyped]  # it has no types

from tests.conftest import SLOW

ROOT = Path(__file__).parent.parent


def test_tests_that_rooms_name_exist() -> None:
    named = {
        (str(room.relative_to(ROOT)), test)
        for folder in ("engine", "tui", "tests", "benchmarks")
        for room in (ROOT / folder).rglob("*.py")
        for test in re.findall(r"tests/[\w/]+\.py", room.read_text("utf-8"))
    }
    assert len(named) > 10
    assert [(room, test) for room, test in sorted(named) if not (ROOT / test).is_file()] == []


def test_no_files_import_each_other_in_a_ring() -> None:
    graph = grimp.build_graph("engine", "tui", "profiles", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imported.values())) > 1000
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the files of the ring


CALLED_BY_LIBRARIES = ["do_*", "action_*", "on_*", "watch_*", "compose", "get_system_commands", "replace_image_token",
                       "available_themes", "*Screen", "_*", "ignore_compile_internals", "put",
                       "redirect_request", "http_open", "https_open",
                       "loglikelihood_rolling", "generate_until", "eot_token_id", "tok_encode", "apply_chat_template",
                       "tokenizer_name", "format_commands", "startup", "unused_input_names"]  # fmt: skip
"""Textual, torch, transformers, urllib and lm-eval use these by name: screens from a table, actions from the table of
keys."""


def test_everything_defined_is_used_outside_tests() -> None:
    """Only functions, methods and classes are checked, because fields of records are read by name from JSON and
    TOML."""
    search = vulture.Vulture(ignore_names=CALLED_BY_LIBRARIES, ignore_decorators=["@*.command"])
    search.scavenge([ROOT / name for name in ("engine", "tui", "benchmarks", "profiles", "tunedeck.py")])
    unused = [item for item in search.get_unused_code() if item.typ in ("function", "method", "class", "property")]
    assert [f"{item.filename}:{item.first_lineno} {item.name}" for item in unused] == []


def test_the_order_of_packages_names_every_package_and_every_extra() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if "engine.cli" in contract.get("layers", ()))
    (extras,) = (contract["modules"] for contract in contracts if contract["type"] == "independence")
    named = {name for layer in layers for name in layer.split(" | ")}
    assert {".".join(name.split(".")[:2]) for name in named} == _children(ROOT / "engine")
    assert {name for name in named if name.startswith("engine.train.")} == _children(ROOT / "engine" / "train")
    assert set(extras) == _children(ROOT / "engine" / "extras")


def _children(package: Path) -> set[str]:
    name = ".".join(package.relative_to(ROOT).parts)
    children = [path.stem for path in package.iterdir() if (path / "__init__.py").is_file() or path.suffix == ".py"]
    return {f"{name}.{child}" for child in children if child != "__init__"}


def test_files_that_the_order_of_tests_names_exist() -> None:
    """The list SLOW names files. Tests of a file that was renamed would start too late, and `make check` would run
    them."""
    assert [name for name in SLOW if not (ROOT / name).exists()] == []


def test_few_errors_of_the_type_checker_are_ignored_and_each_says_why() -> None:
    rooms = [ROOT / name for name in ("engine", "tui", "benchmarks", "profiles", "tests")]
    files = [*ROOT.glob("*.py"), *(file for room in rooms for file in room.rglob("*.py"))]
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    ignored = [line for line in lines if re.search(r"# type: ignore\[", line)]
    assert 0 < len(ignored) <= 20
    assert [line for line in ignored if not re.search(r"# type: ignore\[[a-z-]+\]  # \w", line)] == []
