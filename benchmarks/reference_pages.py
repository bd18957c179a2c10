"""Writes the pages that are made from the code: the model list, the commands, the keys of the console.

Run: make pages        (python -m benchmarks.reference_pages; models without a closed form are simulated, once a
machine)

`tests/docs/test_reference_pages.py` holds the pages to the code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer

from engine.cli import SECTIONS, app
from tui.keys import EVERYWHERE, KEYS, all_key_labels

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

MODELS = """# Which model trains on which GPU

This page answers which of the shipped hardware profiles trains a model, by what method, up to what length, and how
fast. `tunedeck models` prints it on a terminal; `make pages` writes it.

```sh
tunedeck models qwen2.5                       # those with this in their name
tunedeck models qwen2.5-7b --all              # every profile and method, with micro-batch and peak
tunedeck models qwen2.5 -p 24gb               # on one profile, such as your own
tunedeck plan -p 24gb -r qlora --set model.id=Qwen/Qwen2.5-7B-Instruct
```

Each cell is what `tunedeck plan` says of the method's shipped recipe (`lora`, `qlora`, `full`) with this model:

- the smallest profile that trains it; with a star, only with activations or optimizer state in host memory,
- the longest sequence that fits there, alone in a micro-batch, with all layers recomputing: the largest power of two,
  in 1,024 tokens, up to the model's positions,
- the predicted tokens per second with sequences of 2,048 tokens, from the profile's datasheet. Runs on your machine
  correct it.

All of it is with Liger's fused kernels, which `pip install '.[cuda]'` brings; without them memory and time are larger.

| sign | meaning |
|---|---|
| `-` | No speed is predicted: for several devices, with optimizer state in host memory, where the step is simulated. |
| `no` | No shipped profile is known to train the model by this method: `tunedeck models NAME --all` says why. |
| `?` | Its step has not been simulated: `tunedeck models NAME --simulate` does it. |

Families without a closed form are simulated, on one device, without 4 bits and without offloads. Nothing on this page
was run on a GPU: [gpus.md](gpus.md) has what was. [families.md](families.md) has the families that were trained and
opened again at a small size. A model that is not listed is planned by its id.

"""

COMMANDS = """# Command reference

This page answers which arguments and options a command has. It is written from the command line itself (`make pages`).
[commands.md](commands.md) says what the commands are for. Every command also takes `--help`, and `--debug` for the
traceback of an error.
"""

KEYS_HEAD = """# Keys of the console

This page answers which key does what on which screen. It is written from the console's key table (`make pages`), as is
the help that `?` shows. [console.md](console.md) says what the screens are for.
"""

INSTALLED = """
This notebook trains a tiny model on any machine, in a minute, without a GPU or a screen. It needs Tunedeck beside its
kernel: `pip install '.[train]'` in a checkout. It is written from README.md (`make pages`).
"""

TITLES = {EVERYWHERE: "On every screen", "oom": "Out-of-memory report", "editor": "Editor of Library", "run": "Run"}


def models_page(*options: str) -> str:
    """Earlier runs on this machine change nothing."""
    with tempfile.TemporaryDirectory() as state:
        table = subprocess.run(
            [sys.executable, "-P", str(ROOT / "tunedeck.py"), "models", "--markdown", *options],
            check=True, text=True, stdout=subprocess.PIPE, env={**os.environ, "TUNEDECK_STATE": state},
        ).stdout  # fmt: skip
    return MODELS + table


def commands_page() -> str:
    group: Any = typer.main.get_command(app)
    lines = [COMMANDS]
    for title, names in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += _command_lines(f"tunedeck {name}", group.commands[name])
    return "\n".join(lines).rstrip() + "\n"


def _command_lines(path: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        yield from (f"### {path}", "", _sentence(command.help), "")
        for name, inner in command.commands.items():
            if not inner.hidden:
                yield from (line.replace("### ", "#### ", 1) for line in _command_lines(f"{path} {name}", inner))
        return
    yield from (f"### {path}", "", _sentence(command.help), "")
    context = typer.Context(command)
    rows = [row for parameter in command.params if (row := _parameter_row(parameter, context))]
    if rows:
        yield from ("| argument or option | meaning |", "|---|---|", *rows, "")


def _parameter_row(parameter: Any, context: Any) -> str:
    record = None if getattr(parameter, "hidden", False) else parameter.get_help_record(context)
    if record is None or parameter.name == "help":
        return ""
    names = record[0]
    if parameter.param_type_name == "argument":
        names = re.sub(r" <[^>]*>$", "", names)  # its type
    return f"| `{_cell(names)}` | {_cell(record[1])} |"


def keys_page() -> str:
    lines = [KEYS_HEAD]
    for screen in dict.fromkeys(key.screen for key in KEYS):
        lines += [f"## {TITLES.get(screen, screen.capitalize())}", "", "| key | what it does |", "|---|---|"]
        lines += [f"| {_keys(key.keys)} | {_cell(key.help)} |" for key in KEYS if key.screen == screen]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _keys(keys: str) -> str:
    return " ".join(f"`{label}`" if label != "|" else "`\\|`" for label in all_key_labels(keys).split())


def _sentence(text: str | None) -> str:
    return " ".join((text or "").replace("\b", "").split())


def _cell(text: str | None) -> str:
    return _sentence(text).replace("|", "\\|")


FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def notebook() -> str:
    """The README's first fine-tune, a cell for each block, headless: nothing in it asks or opens a screen."""
    text = (ROOT / "README.md").read_text("utf-8")
    part = text.partition("## Your first fine-tune\n")[2].partition("[docs/first-fine-tune.ipynb]")[0]
    cells: list[dict[str, Any]] = [_notebook_cell("markdown", "# Your first fine-tune\n" + INSTALLED)]
    position = 0
    for block in FENCE.finditer(part):
        cells.append(_notebook_cell("markdown", part[position : block.start()]))
        code = ("code", "%%bash\n" + block[2]) if block[1] == "sh" else ("markdown", block[0])
        cells.append(_notebook_cell(*code))
        position = block.end()
    named = [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells) if cell["source"]]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": named, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _notebook_cell(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.strip().splitlines(keepends=True), **more}


PAGES: dict[str, Callable[[], str]] = {
    "models.md": partial(models_page, "--simulate"),
    "command-reference.md": commands_page,
    "keys.md": keys_page,
    "first-fine-tune.ipynb": notebook,
}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"written: docs/{name}")


if __name__ == "__main__":
    main()
