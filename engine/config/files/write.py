"""Writes profile and recipe files: new ones, existing ones with other values (comments stay), and those somebody
shared."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import BaseModel
from tomlkit.items import Table as TomlTable

from engine.config.check.check import check_table
from engine.config.check.overrides import parse_overrides, set_value
from engine.config.files.document import FROM_COMMAND_LINE, read_document, value_at
from engine.config.files.find import (
    KIND_FOLDERS,
    SpecKind,
    find_spec_file,
    make_absolute,
    path_values,
    unshareable_paths,
    user_folder,
)
from engine.config.files.machine import working_directory
from engine.config.files.text import quoted, visible
from engine.config.load import SPEC_TABLES, settle_name
from engine.config.schema import base
from engine.config.schema.base import NAME_PATTERN
from engine.config.schema.data import Data, Eval, Source
from engine.config.schema.recipe import Checkpoint, Method, Model, Recipe, Train
from engine.config.schema.run import Device, Profile
from engine.errors import SpecError, UsageError

Values = dict[str, Any]

RECIPE_TABLES: tuple[tuple[str, type[BaseModel], Values], ...] = (
    ("model", Model, {"id": "Qwen/Qwen2.5-0.5B-Instruct", "dtype": "auto", "quantize": "none"}),
    ("method", Method, {"kind": "lora", "rank": 16, "targets": "all-linear", "dropout": 0.0}),
    (
        "train",
        Train,
        {"epochs": 1.0, "batch_size": 16, "micro_batch": "auto", "learning_rate": 2e-4, "warmup_ratio": 0.03},
    ),
    ("checkpoint", Checkpoint, {"every_minutes": 30.0, "keep": 2}),
    ("eval", Eval, {"metrics": ["loss"]}),
)
DATA: Values = {"max_length": 2048, "over_length": "auto", "packing": False, "valid_fraction": 0.0}
SOURCE: Values = {"name": "main", "path": "data/train.jsonl", "format": "auto"}


def new_recipe(name: str) -> str:
    document = _head("recipe", name, "My recipe", Recipe)
    for key, model, values in RECIPE_TABLES:
        document[key] = _table(model, values)
        if key == "method":
            data = _table(Data, DATA)
            sources = tomlkit.aot()
            sources.append(_table(Source, SOURCE))
            data["sources"] = sources
            document["data"] = data
    return tomlkit.dumps(document)


def new_profile(name: str | None, device: Values, *, title: str, notes: str) -> str:
    """`device` has the keys of the [device] table. `name`: by which commands find the file; None if they do not."""
    document = _head("profile", name, title, Profile)
    document["notes"] = notes
    document["device"] = _table(Device, device)
    return tomlkit.dumps(document)


def _head(kind: str, name: str | None, title: str, model: type[BaseModel]) -> tomlkit.TOMLDocument:
    document = tomlkit.document()
    check = f"  Check it with: tunedeck {kind}s check {name}" if name is not None else ""
    document.add(tomlkit.comment(f"{model.__doc__}{check}"))
    for key, value in {"schema": 1, "kind": kind, "title": title}.items():
        document[key] = value
    return document


def _table(model: type[BaseModel], values: Values) -> TomlTable:
    table = tomlkit.table()
    for key, value in values.items():
        table.add(tomlkit.comment(base.description_of(model, key).replace("\n", " ")))
        table[key] = value
    return table


def rewrite_text(kind: SpecKind, source: str, overrides: Sequence[str], changes: dict[str, Any], target: Path) -> str:
    """The text of `source` (a name or path) with overrides and `changes` (dotted key = value) applied, to be written to
    `target`. Overrides of the other kind of file are left out; [parallel] belongs to a recipe that has it.

    Raises SpecError for an override of a key that does not exist, UsageError for a target whose name is not valid.
    """
    if target.suffix != ".toml" or not re.fullmatch(NAME_PATTERN, target.stem):
        raise UsageError(
            f"{target} is not a valid name for a {kind}",
            expected=f"a file such as my-{kind}.toml, in lower-case letters",
        )
    cwd = working_directory()
    source_file = find_spec_file(kind, source, cwd)
    document = read_document(source_file.path)
    parsed, problems = parse_overrides(overrides)
    for override in parsed:
        in_recipe = kind == "recipe" and value_at(document.data, override.key) is not None
        if kind_of_table(override.key[0]) == kind or in_recipe:
            problems += _problem_of(set_value(document, override.key, override.value, FROM_COMMAND_LINE))
    for key, value in changes.items():
        problems += _problem_of(set_value(document, tuple(key.split(".")), value, "advise"))
    if problems:
        raise SpecError(problems)
    moved = target.absolute().parent != Path(source_file.path).absolute().parent
    if kind == "recipe" and moved and list(path_values(document.data)):
        make_absolute(document, source_file.folder, cwd)
    if "name" in document.data:
        document.data["name"] = target.stem
    import tomlkit  # slow to import: not before the console's first screen

    text = tomlkit.parse(Path(source_file.path).read_text(encoding="utf-8"))
    _update(text, document.data)
    return tomlkit.dumps(text)


def _problem_of(text: str) -> list[str]:
    return [text] if text else []


def kind_of_table(table: str) -> SpecKind:
    return "profile" if table in Profile.model_fields else "recipe"


def _update(node: Any, wanted: Any) -> None:
    """Change a tomlkit table or array in place until it equals `wanted`; equal parts stay untouched."""
    if isinstance(wanted, list):
        for index, value in enumerate(wanted):
            _update(node[index], value)
        return
    for key in [key for key in node if key not in wanted]:
        del node[key]
    for key, value in wanted.items():
        nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
        if nested and key in node and (isinstance(value, dict) or len(value) == len(node[key])):
            _update(node[key], value)
        elif key not in node or node[key] != value:
            node[key] = value


def import_spec_file(
    kind: SpecKind, source: Path, *, name: str | None = None, to: Path | None = None, force: bool = False
) -> Path:
    """Check someone else's file and copy it to `to`, or into the user's folder as `name`, under its `name` key or its
    own name; return the copy.

    Raises SpecError for every problem of the file and for paths that leave its folder, UsageError for a symbolic link
    and, without `force`, for a name that already exists.
    """
    if source.is_symlink():
        raise UsageError(f"{visible(str(source))} is a symbolic link", expected="the file itself")
    document = read_document(source)
    if "name" not in document.data:
        settle_name(document, source.stem)
    table, problems = check_table(SPEC_TABLES[kind], document.data)
    problems += unshareable_paths(document.data)
    if problems or table is None:
        raise SpecError(
            document.render_all(problems), fix="nothing was imported: correct the file, or use it by its path"
        )
    if name is not None:
        require_name(name)
    target = to or user_folder() / KIND_FOLDERS[kind] / f"{name or table.name}.toml"
    return write_new_file(target, source.read_bytes(), force=force)


def require_name(name: str) -> None:
    """Raises UsageError."""
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > 80 or name.endswith(".toml"):
        better = re.sub("[^a-z0-9._-]+", "-", name.lower().removesuffix(".toml")).strip("-._")[:80]
        raise UsageError(
            f"{quoted(name)} is not a valid name",
            expected="lower-case letters, digits, '.', '_' and '-', at most 80, without .toml",
            fix=f"call it {better}" if better else "",
        )


def write_new_file(target: Path, content: bytes, *, force: bool) -> Path:
    """Write `content` whole or not at all, creating folders; returns `target`. Raises UsageError if it exists and
    `force` is not given, or cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
            if force:
                os.replace(temporary, target)
            else:
                os.link(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError:
        raise UsageError(
            f"{visible(str(target))} already exists", fix="choose another name, or add --force to replace it"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{visible(str(target))} cannot be written: {error.strerror}", fix="check the permissions of its folder"
        ) from None
    return target
