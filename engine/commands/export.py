"""`tunedeck merge`: merges a LoRA adapter into its base model.

Try: `tunedeck merge last --out merged`
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.commands.importing import importing
from engine.commands.options import RunArgument, RunsOption, TrustOption, find_result_run
from engine.commands.output import print_line, print_progress

OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to; by default merged/ in the run's folder.")
]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", metavar="STEP|best", help="Which weights; by default the run's result.")
]


def merge(
    run: RunArgument,
    out: OutOption = None,
    checkpoint: CheckpointOption = None,
    trust_remote_code: TrustOption = False,
    runs: RunsOption = None,
) -> None:
    """Merge a LoRA run's adapter into its base model. It then loads without peft. Uses host memory only."""
    from engine.journal.event_text import format_bytes

    with importing():
        from engine.export.merge import merge as merge_adapter
        from engine.model.library_output import silence_libraries
        from engine.model.reference import find_run_weights

    silence_libraries()
    directory = find_result_run(run, runs)
    adapter = find_run_weights(f"run:{directory.path}" + (f"@{checkpoint}" if checkpoint else ""))
    target = (out or directory.path / "merged").absolute()
    size_bytes = merge_adapter(adapter, target, print_progress, trust_remote_code=trust_remote_code)
    print_line(f"{target} ({format_bytes(size_bytes)}) loads with from_pretrained of transformers")
