"""`tunedeck profiles` and `tunedeck recipes`: list, show, check, new, export, import and schema.

One set of commands for both kinds; only `new --detect` belongs to profiles alone. The work is in `engine.spec`, which
is imported inside the commands.

Try: `tunedeck recipes list`, `tunedeck profiles show 24gb --json`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.options import JsonOption

if TYPE_CHECKING:
    from engine.spec.files.find import SpecFile, SpecKind

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help="A name, or a path to a TOML file.", show_default=False)
]
NewNameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the new file.", show_default=False)]
ToOption = Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write here.", show_default=False)]
DetectOption = Annotated[bool, typer.Option("--detect", help="Fill in this machine's first GPU, or its CPU.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]


def register(app: typer.Typer) -> None:
    """Add both groups."""
    app.add_typer(_group("profile", "Hardware profiles: which device, and how much of it."), name="profiles")
    app.add_typer(_group("recipe", "Recipes: what is trained, how, on what data."), name="recipes")


def _group(kind: SpecKind, summary: str) -> typer.Typer:
    group = typer.Typer(help=summary, no_args_is_help=True, rich_markup_mode=None)

    @group.command("list", help=f"Every {kind} that can be used by name.")
    def list_all(as_json: JsonOption = False) -> None:
        _list(kind, as_json)

    @group.command(help=f"One {kind}: its file, or with --json all its values.")
    def show(name: NameArgument, as_json: JsonOption = False) -> None:
        _show(kind, name, as_json)

    @group.command(help="Check files; every problem with file and line, exit code 2.")
    def check(
        names: Annotated[list[str], typer.Argument(metavar="NAME|FILE...", show_default=False)],
        as_json: JsonOption = False,
    ) -> None:
        _check(kind, names, as_json)

    @group.command(help=f"Print a {kind}'s file, to pass it on.")
    def export(name: NameArgument, to: ToOption = None, force: ForceOption = False) -> None:
        _export(kind, name, to, force)

    @group.command("import", help=f"Check someone's {kind} and copy it into your own folder.")
    def import_(
        file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)], force: ForceOption = False
    ) -> None:
        from engine.spec.files.share import import_spec_file

        target = import_spec_file(kind, file, force=force)
        _say(f"imported {target.stem}: {target}")

    @group.command(help="The JSON Schema, for editors.")
    def schema() -> None:
        from engine.spec.load import SPEC_TABLES

        _print_json(SPEC_TABLES[kind].model_json_schema(by_alias=True))

    _add_new(group, kind)
    return group


def _add_new(group: typer.Typer, kind: SpecKind) -> None:
    summary = f"Write a commented {kind} into ./profiles, or to --to FILE."
    if kind == "recipe":

        @group.command("new", help=summary)
        def new_recipe(name: NewNameArgument, to: ToOption = None, force: ForceOption = False) -> None:
            from engine.spec.files import templates

            _write(kind, name, to, force, templates.new_recipe)

    else:
        @group.command("new", help=summary)
        def new_profile(
            name: NewNameArgument,
            detect: DetectOption = False,
            to: ToOption = None,
            force: ForceOption = False,
        ) -> None:
            _write(kind, name, to, force, lambda stem: _profile_text(stem, detect))


def _profile_text(name: str, detect: bool) -> str:
    from engine.spec.files import detect as detection
    from engine.spec.files import templates

    device: dict[str, Any] = {
        "kind": "cuda",
        "count": 1,
        "memory_gib": 23.5,
        "reserve_gib": 1.0,
        "allocator": "expandable_segments:True",
    }
    title = "My GPU"
    notes = "memory_gib: what the driver offers a process, less than nvidia-smi's total by some hundreds of MiB."
    if detect:
        device, title, notes = detection.detect_device()
    return templates.new_profile(name, device, title=title, notes=notes)


def _list(kind: SpecKind, as_json: bool) -> None:
    from engine.errors import SpecError
    from engine.spec.files.find import list_spec_files
    from engine.spec.load import load_spec_file

    rows: list[dict[str, str]] = []
    for located in list_spec_files(kind):
        try:
            title = str(getattr(load_spec_file(kind, located), "title", ""))
        except SpecError as error:
            count = len(error.problems)
            title = f"broken: {count} problem{'s' * (count > 1)}, see tunedeck {kind}s check {located.name}"
        rows.append({"name": located.name, "title": title, "origin": located.origin, "path": str(located.path)})
    if as_json:
        _print_json(rows)
    else:
        width = max((len(row["name"]) for row in rows), default=0)
        _say("\n".join(f"{row['name']:{width}}  {row['origin']:8}  {row['title']}" for row in rows))


def _show(kind: SpecKind, name: str, as_json: bool) -> None:
    from engine.spec.files.find import find_spec_file
    from engine.spec.files.text import visible
    from engine.spec.load import load_spec_file

    located = find_spec_file(kind, name)
    table = load_spec_file(kind, located)
    if as_json:
        values = table.model_dump(by_alias=True)
        _print_json({**values, "origin": located.origin, "path": str(located.path)})
    else:
        _say(f"# {located.origin}: {visible(str(located.path))}\n{visible(_text(located), keep=chr(10) + chr(9))}")


def _check(kind: SpecKind, names: list[str], as_json: bool) -> None:
    from engine.errors import SpecError
    from engine.spec.files.find import find_spec_file
    from engine.spec.load import load_spec_file

    problems: list[str] = []
    for name in names:
        try:
            load_spec_file(kind, find_spec_file(kind, name))
        except SpecError as error:
            problems += error.problems
    if as_json:
        _print_json({"ok": not problems, "problems": problems})
    if problems and not as_json:
        raise SpecError(problems)
    if problems:
        raise typer.Exit(2)
    if not as_json:
        _say(f"{len(names)} file{'s' * (len(names) > 1)} checked, no problems")


def _export(kind: SpecKind, name: str, to: Path | None, force: bool) -> None:
    from engine.spec.files.document import read_document
    from engine.spec.files.find import find_spec_file
    from engine.spec.files.paths import unshareable_paths
    from engine.spec.files.share import write_new_file
    from engine.spec.files.text import visible
    from engine.spec.load import load_spec_file

    located = find_spec_file(kind, name)
    load_spec_file(kind, located)
    document = read_document(located.path)
    for line in document.refuse(unshareable_paths(document.data)):
        sys.stderr.write(f"warning: {line}; import will refuse it\n")
    if to is not None:
        _say(f"exported {located.name}: {write_new_file(to, located.path.read_bytes(), force=force)}")
    else:
        text = _text(located)
        sys.stdout.write(visible(text, keep="\n\t") if sys.stdout.isatty() else text)


def _write(kind: SpecKind, name: str, to: Path | None, force: bool, make: Any) -> None:
    import re

    from engine.errors import UsageError
    from engine.spec.files.find import KIND_FOLDERS
    from engine.spec.files.share import write_new_file
    from engine.spec.files.text import quoted
    from engine.spec.schema.base import NAME_PATTERN

    if not re.fullmatch(NAME_PATTERN, name) or len(name) > 80:
        raise UsageError(
            f"{quoted(name)} is no name", expected="lower-case letters, digits, '.', '_' and '-', 80 at most"
        )
    if to is not None and to.name != f"{name}.toml":
        raise UsageError(
            f"--to {quoted(to.name)}", expected=f"a file named {name}.toml: a file's name and its stem are the same"
        )
    target = to or Path("profiles") / KIND_FOLDERS[kind] / f"{name}.toml"
    _say(f"wrote {write_new_file(target, make(name).encode(), force=force)}")


def _text(located: SpecFile) -> str:
    return located.path.read_text(encoding="utf-8-sig")


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=True) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
