"""`tunedeck merge`: merges a LoRA adapter into its base model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.commands.shared import (
    RunArgument,
    RunsOption,
    TrustOption,
    find_result_run,
    importing,
    print_line,
    print_progress,
)
from engine.errors import UsageError
from engine.journal.checkpoints_on_disk import best_step, find_checkpoints
from engine.journal.directory import RunDirectory

OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to; by default merged/ in the run's folder.")
]
OntoOption = Annotated[
    Literal["weights", "dequantized"],
    typer.Option("--onto", help="Of a base in 4 bits: its own weights, or those that the adapter was trained on."),
]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", metavar="STEP|best", help="Which weights; by default the run's result.")
]


def merge(
    run: RunArgument,
    out: OutOption = None,
    checkpoint: CheckpointOption = None,
    onto: OntoOption = "weights",
    trust_remote_code: TrustOption = False,
    runs: RunsOption = None,
) -> None:
    """Merge a LoRA run's adapter into its base model. It then loads without peft. Uses host memory only."""
    from engine.config.load import load_run_spec
    from engine.journal.event_text import format_bytes

    with importing():
        from engine.export.merge import Bases
        from engine.export.merge import merge as merge_adapter
        from engine.model.config import silence_libraries
        from engine.model.reference import find_run_weights

    silence_libraries()
    directory = find_result_run(run, runs)
    require_weights(directory, checkpoint, ["tunedeck", "merge", run, *(["--runs", str(runs)] if runs else [])])
    adapter = find_run_weights(f"run:{directory.path}" + (f"@{checkpoint}" if checkpoint else ""))
    target = (out or directory.path / "merged").absolute()
    quantize = load_run_spec(directory.run_toml, own=True).recipe.model.quantize
    bases = Bases(quantize == "nf4", onto == "dequantized")
    size_bytes = merge_adapter(adapter, target, print_progress, bases=bases, trust_remote_code=trust_remote_code)
    print_line(f"{target} ({format_bytes(size_bytes)}) loads with from_pretrained of transformers")


def require_weights(directory: RunDirectory, checkpoint: str | None, command: list[str]) -> None:
    """Raise UsageError if the weights to merge do not exist. `command`: the words from which the fix is made."""
    if checkpoint is None and (directory.adapter.is_dir() or directory.model.is_dir()):
        return
    steps = [found.step for found in find_checkpoints(directory.checkpoints)]
    best = best_step(directory.checkpoints)
    if checkpoint is not None and checkpoint in ("best" if best is not None else "", *map(str, steps)):
        return
    missing = "no result yet" if checkpoint is None else f"no checkpoint {checkpoint}"
    raise UsageError(
        f"{directory.name} has {missing}",
        expected=f"a checkpoint of step {', '.join(map(str, steps))}" if steps else "a result or a checkpoint",
        fix=shlex.join([*command, "--checkpoint", str(steps[0])] if steps else ["tunedeck", "resume", *command[2:]]),
    )
