"""`tunedeck profiles` and `tunedeck recipes`: the commands list, show, check, new, export, import and schema."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.completion import names_in_group, recipe_names
from engine.commands.shared import JsonOption, print_json, print_line, print_notices, print_progress, print_text
from engine.errors import SpecError, TunedeckError, UsageError

if TYPE_CHECKING:
    from engine.budget.advise.plan import Plan
    from engine.budget.advise.staged_plan import StagedPlan
    from engine.checks.rule import Finding
    from engine.config.files.find import SpecFile, SpecKind


NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        autocompletion=names_in_group,
        help="A name, or a path to a TOML file.",
        show_default=False,
    ),
]
NewNameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the new file.", show_default=False)]
ToOption = Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Output file.", show_default=False)]
DetectOption = Annotated[
    bool, typer.Option("--detect", help="Fill in the values of this machine's first GPU, or of its CPU.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="NAME|FILE", autocompletion=recipe_names, help="Copy this recipe.", show_default=False
    ),
]
FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="A TOML file; for a recipe also a YAML file or script of another tool.", show_default=False
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name of the recipe; by default the file's name.", show_default=False),
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        "--devices",
        min=1,
        help="With another tool's file: the number of devices it trained on; by default one.",
        show_default=False,
    ),
]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print tables of keys, as in the documentation.")]


def make_group(kind: SpecKind, summary: str) -> typer.Typer:
    group = typer.Typer(help=summary, no_args_is_help=True, rich_markup_mode=None)

    @group.command("list", help=f"List every {kind} that can be used by name.")
    def list_all(as_json: JsonOption = False) -> None:
        _list(kind, as_json)

    @group.command(help=f"Show one {kind}: its file, or with --json all its values.")
    def show(name: NameArgument, as_json: JsonOption = False) -> None:
        _show(kind, name, as_json)

    @group.command(help="Check files and list every problem with file and line. Exit code 2 if there are problems.")
    def check(
        names: Annotated[
            list[str], typer.Argument(metavar="NAME|FILE...", autocompletion=names_in_group, show_default=False)
        ],
        as_json: JsonOption = False,
    ) -> None:
        _check(kind, names, as_json)

    @group.command(help=f"Print a {kind}'s file, or write a copy of it to --to FILE.")
    def export(name: NameArgument, to: ToOption = None, force: ForceOption = False) -> None:
        _export(kind, name, to, force)

    @group.command(help="Print the JSON Schema for editors. With --markdown, print a table of all keys.")
    def schema(as_markdown: MarkdownOption = False) -> None:
        from engine.commands.schema_text import schema_markdown
        from engine.config.load import SPEC_TABLES

        if as_markdown:
            print_line(schema_markdown(SPEC_TABLES[kind]))
        else:
            print_json(SPEC_TABLES[kind].model_json_schema(by_alias=True))

    _add_import(group, kind)
    _add_new(group, kind)
    return group


def _add_import(group: typer.Typer, kind: SpecKind) -> None:
    if kind == "recipe":

        @group.command("import", help="Check and copy a recipe, or convert one of another tool.")
        def import_recipe(
            file: FileArgument,
            devices: DevicesOption = None,
            name: NameOption = None,
            to: ToOption = None,
            force: ForceOption = False,
        ) -> None:
            if name is not None and to is not None:
                raise UsageError("--name and --to exclude each other", fix="use one of them")
            if file.suffix.lower() == ".toml":
                _import(kind, file, force, name=name, to=to)
            else:
                from engine.commands.imported import import_configuration_file

                import_configuration_file(file, devices=devices, name=name, to=to, force=force)

    else:

        @group.command("import", help="Check someone's profile and copy it into your own folder.")
        def import_profile(file: FileArgument, force: ForceOption = False) -> None:
            _import(kind, file, force)


def _import(kind: SpecKind, file: Path, force: bool, *, name: str | None = None, to: Path | None = None) -> None:
    from engine.config.files.write import import_spec_file

    target = import_spec_file(kind, file, name=name, to=to, force=force)
    print_line(f"imported {target.stem}: {target}")


def _add_new(group: typer.Typer, kind: SpecKind) -> None:
    summary = (
        f"Write a commented {kind} into ./profiles, or to --to FILE. In Tunedeck's own checkout, where "
        "./profiles has the shipped files, the file goes into your configuration folder."
    )
    if kind == "recipe":

        @group.command("new", help=summary)
        def new_recipe(
            name: NewNameArgument, source: FromOption = None, to: ToOption = None, force: ForceOption = False
        ) -> None:
            from engine.config.files import write

            _write(
                kind,
                name,
                to,
                force,
                lambda stem: write.new_recipe(stem) if source is None else _copy(source, stem),
            )

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
    from engine.config.files import machine as detection
    from engine.config.files import write

    device: dict[str, Any] = {
        "kind": "cuda",
        "count": 1,
        "memory_gib": 23.5,
        "reserve_gib": 1.0,
        "allocator": "expandable_segments:True",
    }
    title = "My GPU"
    notes = "memory_gib: the memory a process can use, some hundred MiB less than nvidia-smi's total."
    if detect:
        device, title, notes = detection.detect_device()
    return write.new_profile(name, device, title=title, notes=notes)


def _copy(source: str, name: str) -> str:
    """The recipe under another name; relative paths of a `source` that is a path become absolute."""
    from engine.config.files.find import find_spec_file
    from engine.config.files.write import rewrite_text

    file = find_spec_file("recipe", source)
    # Beside its source, so that the relative paths of a recipe that is found by name stay relative.
    target = Path(f"{name}.toml") if file.origin == "path" else file.path.with_name(f"{name}.toml")
    return rewrite_text("recipe", source, [], {}, target)


def _list(kind: SpecKind, as_json: bool) -> None:
    from engine.config.files.find import list_spec_files

    rows = [_row(kind, file) for file in list_spec_files(kind)]
    if as_json:
        print_json(rows)
        return
    columns = ("name", "origin", "profile", "verdict") if kind == "recipe" else ("name", "origin")
    widths = [max((len(row[column] or "") for row in rows), default=0) for column in columns]
    for row in rows:
        cells = [f"{row[column] or '':{width}}" for column, width in zip(columns, widths, strict=True)]
        print_line("  ".join([*cells, row["title"] or ""]))


def _row(kind: SpecKind, file: SpecFile) -> dict[str, str | None]:
    """Name, title, origin and path; for a recipe also the `profile` it is meant for and the `verdict` there. An invalid
    file has the number of its problems as title."""
    from engine.config.load import load_spec_file
    from engine.config.schema.recipe import Recipe

    row: dict[str, str | None] = {"name": file.name, "title": "", "origin": file.origin, "path": str(file.path)}
    try:
        table = load_spec_file(kind, file)
    except SpecError as error:
        count = len(error.problems)
        title = f"invalid: {count} problem{'s' * (count > 1)}, see tunedeck {kind}s check {file.name}"
        return {**row, "title": title, **({"profile": None, "verdict": None} if kind == "recipe" else {})}
    row["title"] = str(getattr(table, "title", ""))
    if isinstance(table, Recipe):
        row["profile"] = table.profile
        row["verdict"] = _verdict(table.profile, str(file.path)) if table.profile else None
    return row


def _verdict(profile: str, recipe: str) -> str:
    """Whether a recipe fits its profile; "no plan" if files on this machine cannot tell. Sends no request."""
    from engine.budget.advise.parallel import settle_parallel
    from engine.budget.advise.plan import make_plan
    from engine.budget.advise.staged_plan import find_run_facts, make_staged_plan
    from engine.config.load import resolve
    from engine.errors import TunedeckError
    from engine.journal.event_text import describe_verdict

    try:
        spec = resolve(profile, recipe).spec
        facts = find_run_facts(spec)
        spec = settle_parallel(spec, facts).spec
        if spec.recipe.stages:
            plan: Plan | StagedPlan = make_staged_plan(spec, facts)
        else:
            plan = make_plan(spec, facts=facts.of(spec.recipe.model))
    except TunedeckError:  # no such profile, or a model whose memory is not known: tunedeck plan says which
        return "no plan"
    return describe_verdict(plan.verdict)


def _show(kind: SpecKind, name: str, as_json: bool) -> None:
    from engine.config.files.find import find_spec_file
    from engine.config.files.text import visible
    from engine.config.load import load_spec_file

    file = find_spec_file(kind, name)
    table = load_spec_file(kind, file)
    if as_json:
        values = table.model_dump(by_alias=True)
        print_json({**values, "origin": file.origin, "path": str(file.path)})
    else:
        print_line(f"# {file.origin}: {visible(str(file.path))}\n{visible(_text(file), keep=chr(10) + chr(9))}")


def _check(kind: SpecKind, names: list[str], as_json: bool) -> None:
    from engine.checks.rule import one_error
    from engine.config.files.find import find_spec_file
    from engine.config.load import load_spec_file, name_note

    problems: list[str] = []
    notes: list[str] = []
    errors: list[TunedeckError] = []
    for name in names:
        try:
            file = find_spec_file(kind, name)
            load_spec_file(kind, file)
            notes += [note] if (note := name_note(file)) else []
            if kind == "recipe":
                found, noted = _check_start(file)
                problems += [f"{file.path}: {line}" for finding in found for line in finding.lines()]
                errors += [finding.error for finding in found]
                notes += [f"{file.name}: {note}" for note in noted]
        except SpecError as error:
            problems += error.problems
            errors.append(error)
    failure = one_error(errors)
    if as_json:
        print_json({"ok": not problems, "problems": problems, "notes": notes})
        raise typer.Exit(failure.exit_code if failure is not None else 0)
    print_notices(notes)
    if failure is not None:
        shown = SpecError(problems)
        shown.exit_code = failure.exit_code
        raise shown
    outcome = f"no errors, {len(notes)} note{'s' * (len(notes) > 1)}" if notes else "no problems"
    print_line(f"{len(names)} file{'s' * (len(names) > 1)} checked, {outcome}")


def _check_start(file: SpecFile) -> tuple[list[Finding], list[str]]:
    """Why a recipe cannot be trained, and what a start on this machine would be refused for: on the profile that it
    names if that is found here, else on any. Its model is not checked where its config is not on this machine."""
    from engine.checks.run import ANY_PROFILE, CHECK, check_runs
    from engine.config.load import load_recipe, resolve
    from engine.config.schema.run import RunSpec
    from engine.config.stages import stage_specs
    from engine.extras.harness.task_files import notes_on_tasks

    recipe = load_recipe(file)
    spec = RunSpec(schema=1, name=recipe.name, profile=ANY_PROFILE, recipe=recipe)
    if recipe.profile is not None and _has_profile(recipe.profile):
        spec = resolve(recipe.profile, str(file.path)).spec
    recipes = [part.recipe for part in (spec, *(stage_specs(spec) if spec.recipe.stages else []))]
    runs = check_runs(spec, CHECK)
    found = {finding.error.render(): finding for run in runs for finding in run.refused}
    notes = dict.fromkeys(note for run in runs for note in run.reported)
    return list(found.values()), [*notes, *notes_on_tasks(recipes)]


def _has_profile(name: str) -> bool:
    from engine.config.files.find import find_spec_file

    try:
        find_spec_file("profile", name)
    except SpecError:
        return False
    return True


def _export(kind: SpecKind, name: str, to: Path | None, force: bool) -> None:
    from engine.config.files.document import read_document
    from engine.config.files.find import find_spec_file, unshareable_paths
    from engine.config.files.write import write_new_file
    from engine.config.load import load_spec_file

    file = find_spec_file(kind, name)
    load_spec_file(kind, file)
    document = read_document(file.path)
    for line in document.render_all(unshareable_paths(document.data)):
        print_progress(f"warning: {line}; this recipe cannot be imported")
    if to is not None:
        print_line(f"exported {file.name}: {write_new_file(to, file.path.read_bytes(), force=force)}")
    else:
        text = _text(file)
        if sys.stdout.isatty():
            print_text(text)
        else:
            sys.stdout.write(text)  # a copy of the file, to be read by a program


def _write(kind: SpecKind, name: str, to: Path | None, force: bool, make_text: Callable[[str], str]) -> None:
    from engine.config.files.find import own_folder
    from engine.config.files.text import quoted
    from engine.config.files.write import require_name, write_new_file

    require_name(name)
    if to is not None and to.name != f"{name}.toml":
        raise UsageError(
            f"--to {quoted(to.name)}", expected=f"a file named {name}.toml, because a {kind} is named after its file"
        )
    target = to or own_folder(kind) / f"{name}.toml"
    written = write_new_file(target, make_text(name).encode(), force=force)
    shown = written.relative_to(Path.cwd()) if written.is_relative_to(Path.cwd()) else written
    print_line(f"wrote {shown}")


def _text(file: SpecFile) -> str:
    return file.path.read_text(encoding="utf-8-sig")
