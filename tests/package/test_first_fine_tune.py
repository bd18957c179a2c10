"""The README's first fine-tune, run as printed: in an empty folder, with the installed wheel and no network."""

from __future__ import annotations

import os
from pathlib import Path

from tests.docs.blocks import section
from tests.package.conftest import Installation
from tests.package.test_wheel import run


def test_from_an_own_file_to_a_generated_answer(installation: Installation, tmp_path: Path) -> None:
    """The blocks up to the printed answer are run one after another; the last one prints that answer."""
    blocks = section("README.md", "## Your first fine-tune")
    answer = next(number for number, block in enumerate(blocks) if block.label == "text")
    path = f"{installation.command.parent}{os.pathsep}{os.environ['PATH']}"
    folder = tmp_path / "empty"
    folder.mkdir()
    written = ""
    for block in blocks[:answer]:
        done = run("bash", "-euo", "pipefail", "-c", block.text, cwd=folder, PATH=path, TUNEDECK_STATE=str(tmp_path))
        assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}{done.stderr}"
        written = done.stdout
    assert blocks[answer].text.strip() in written
