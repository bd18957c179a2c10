"""The pages that are made from the code are the code's, and the site builds without a warning.

All models, with the simulations that some need, would take half an hour (`make pages`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from benchmarks.package_drawing import drawing
from benchmarks.reference_pages import DOCS, MODELS, commands_page, keys_page, notebook
from benchmarks.site_pages import moved_links
from engine.budget.advise.model_list import known_models, list_model, shipped_gpus
from engine.commands.models import markdown_table
from tests.docs.blocks import ROOT, section


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("command-reference.md", commands_page),
        ("keys.md", keys_page),
        ("first-fine-tune.ipynb", notebook),
        ("pictures/packages.svg", drawing),
    ],
)
def test_a_reference_is_written_from_the_code(name: str, page: object) -> None:
    assert callable(page) and (DOCS / name).read_text("utf-8") == page(), "run make pages"


def test_the_notebook_has_the_blocks_that_a_test_of_the_readme_runs() -> None:
    cells = json.loads((DOCS / "first-fine-tune.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    ran = [block.text.strip() for block in section("README.md", "## Your first fine-tune") if block.label == "sh"]
    assert code and code == [f"%%bash\n{text}" for text in ran[: len(code)]]
    assert "tunedeck chat last --prompt" in code[-1]


def test_the_model_list_is_what_the_plans_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third model is planned anew, of simulated ones what needs no simulation."""
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path))  # no earlier run corrects the speed
    page = (DOCS / "models.md").read_text("utf-8")
    assert page.startswith(MODELS)
    rows = page.removeprefix(MODELS).splitlines()[2:]
    assert len(rows) == len(known_models())
    for (name, entry), row in list(zip(known_models(), rows, strict=True))[::3]:
        ours = markdown_table([list_model(name, entry, shipped_gpus())]).splitlines()[-1]
        for cell, written in zip(ours.split(" | "), row.split(" | "), strict=True):
            assert cell.strip("| ") in (written.strip("| "), "?"), f"{name}: run make pages"


def test_the_site_builds_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site")))
    first = (tmp_path / "site/index.html").read_text("utf-8")
    assert "Tunedeck" in first and 'href="commands/"' in first
    assert not re.search(r'href="(?!https?:)[^"]*\.md', first)


@pytest.mark.parametrize("link", ["missing.md", "commands.md#no-such-heading"])
def test_a_link_to_nothing_stops_the_build(tmp_path: Path, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "commands.md").write_text("# Commands\n")
    (pages / "index.md").write_text(f"# Start\n\n[there]({link})\n")
    settings: dict[str, Any] = {"docs_dir": str(pages), "site_dir": str(tmp_path / "site"), "nav": None, "hooks": []}
    with pytest.raises(Abort):
        build(load_config(str(ROOT / "mkdocs.yml"), **settings))


def test_links_of_the_root_follow() -> None:
    links = "[a](docs/memory.md#x), [b](README.md), [c](AGENTS.md)"
    assert moved_links(links) == "[a](memory.md#x), [b](index.md), [c](AGENTS.md)"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    """A title, an empty line, and a sentence: no heading, list, table or block."""
    title, empty, first = page.read_text("utf-8").splitlines()[:3]
    assert title.startswith("# ") and not empty and first[:1].isalpha()
