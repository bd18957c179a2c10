"""`tunedeck merge`: what becomes of a finished run.

Try: `tunedeck merge last --out merged`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from engine.commands.importing import importing
from engine.commands.options import RunArgument, RunsOption, runs_folder

Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to; by default merged/ in the run's folder.")
]
Which = Annotated[
    str | None, typer.Option("--checkpoint", metavar="STEP|best", help="Which weights; by default the run's result.")
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow code that comes with a hub model.")]


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(merge)


def merge(
    run: RunArgument, out: Out = None, checkpoint: Which = None, trust_remote_code: Trust = False,
    runs: RunsOption = None,
) -> None:  # fmt: skip
    """Make a LoRA run's adapter and its base one model, which opens without peft. Uses host memory only."""
    from engine.journal.event_text import format_bytes
    from engine.journal.index import resolve_run

    with importing():
        from engine.export.merge import merge as merge_adapter
        from engine.model.library_output import silence_libraries
        from engine.model.reference import find_run_weights

    silence_libraries()
    directory = resolve_run(run, runs_folder(runs))
    adapter = find_run_weights(f"run:{directory.path}" + (f"@{checkpoint}" if checkpoint else ""))
    target = (out or directory.path / "merged").absolute()
    size_bytes = merge_adapter(adapter, target, _say, trust_remote_code=trust_remote_code)
    sys.stdout.write(f"{target} ({format_bytes(size_bytes)}) opens with from_pretrained of transformers\n")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
