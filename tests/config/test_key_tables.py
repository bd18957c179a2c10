"""The tables of keys in the documentation are those that the command prints.

TUNEDECK_ACCEPT=1 writes them into the pages.
"""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from engine.cli import app
from tests.docs.blocks import ROOT

BEGIN = "\n| key | allowed | default | meaning |"


@pytest.mark.parametrize("kind", ["recipes", "profiles"])
def test_a_page_lists_every_key_as_the_command_prints_them(kind: str) -> None:
    page = ROOT / "docs" / f"{kind}.md"
    done = CliRunner().invoke(app, [kind, "schema", "--markdown"])
    assert done.exit_code == 0 and done.stdout.startswith(BEGIN.strip())
    head = page.read_text("utf-8").partition(BEGIN)[0]
    if os.environ.get("TUNEDECK_ACCEPT"):
        page.write_text(f"{head}\n{done.stdout}", "utf-8")
    tables = page.read_text("utf-8").removeprefix(f"{head}\n")
    assert tables == done.stdout, f"docs/{kind}.md lists other keys: run this test with TUNEDECK_ACCEPT=1"
