"""`tunedeck push`: sends a run's result to a repository of the Hugging Face hub."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.export import CheckpointOption, require_weights
from engine.commands.handover import FORMS, best_of_failed
from engine.commands.shared import (
    JsonOption,
    RunArgument,
    RunsOption,
    TrustOption,
    find_result_run,
    importing,
    print_json,
    print_line,
    print_progress,
    print_rows,
)
from engine.errors import StoppedError, UsageError

if TYPE_CHECKING:
    from engine.handover.hub import Parcel, Place


def push(
    run: RunArgument,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME, or NAME of your own.", show_default=False)],
    public: Annotated[bool, typer.Option("--public", help="Everybody may read it; by default only you.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Merge an adapter into its base first.")] = False,
    checkpoint: CheckpointOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Send without asking.")] = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Send a result and its model card to the Hugging Face hub. Lists the files, and asks first."""
    words = ["tunedeck", "push", run, repo]
    if not yes and (as_json or not sys.stdin.isatty()):
        raise UsageError("push asks before it sends, and nobody can answer here", fix=shlex.join([*words, "--yes"]))
    directory = find_result_run(run, runs)
    from engine.config.load import load_run_spec

    spec = load_run_spec(directory.run_toml, own=True)
    which = checkpoint or best_of_failed(directory)
    require_weights(directory, which, words)
    with importing():
        from engine.handover.hub import prepare_push, send

    api, place, parcel = prepare_push(
        directory, spec, repo, which, print_progress, public=public, merged=merged, trust_remote_code=trust_remote_code
    )
    if not as_json:
        _print(place, parcel)
    if not yes:
        _ask(place.repo)
    url, changed = send(api, place, parcel, f"{directory.name}, by tunedeck")
    if as_json:
        files = {item.path: item.size_bytes for item in parcel.items}
        listed = {"form": parcel.form, "files": files, "removed": parcel.stale, "notes": parcel.notes}
        print_json({"run": directory.name, "url": url, "private": place.private, "changed": changed, **listed})
    else:
        print_line(f"\n{url}" if changed else f"\n{url} has all of it already")


def _print(place: Place, parcel: Parcel) -> None:
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
    sys.stderr.write(f"send it to {repo}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise StoppedError("nothing was sent")
