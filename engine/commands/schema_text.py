"""Formats the schema of profiles and recipes as Markdown: a table for each TOML table, with a row per key.

`docs/recipes.md` and `docs/profiles.md` contain what is printed here; a test compares them. Pure; nothing is printed.

Try: `tunedeck recipes schema --markdown`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args, get_origin

from engine.spec.schema import describe

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

HEAD = ("| key | allowed | default | meaning |", "|---|---|---|---|")


def schema_markdown(model: type[BaseModel]) -> str:
    """Return the keys of a profile or recipe (`model` is its schema's class) as Markdown: those at the top of the file,
    then every table with a heading."""
    return "\n".join(_table_lines(model, "", {})).strip()


def _table_lines(model: type[BaseModel], heading: str, shown: dict[type[BaseModel], str]) -> Iterator[str]:
    """Yield the heading and rows of a table, then the lines of the tables inside it. `shown` maps the table types that
    have been listed to their headings: their keys are not repeated."""
    inner: list[tuple[str, type[BaseModel]]] = []
    rows: list[str] = []
    for key, field in describe.fields_of(model).items():
        table, listed = _table_of(field.annotation)
        if table is None:
            rows.append(_row(model, key, field))
        else:
            path = f"{heading.strip('[]')}.{key}" if heading else key
            inner.append((f"[[{path}]]" if listed else f"[{path}]", table))
    if heading:
        yield from ("", f"### `{heading}`", "", _text(model.__doc__ or ""))
    if model in shown:
        yield f"The keys are those of `{shown[model]}`."
        return
    shown[model] = heading
    yield from ("", *HEAD, *rows) if rows else ()
    for path, table in inner:
        yield from _table_lines(table, path, shown)


def _table_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the table type of a field by its annotation, and whether the field is a list of such tables; (None, False)
    if the field is no table."""
    for member in describe.members_of(annotation):
        listed = get_origin(member) is list
        table = get_args(member)[0] if listed else member
        if describe.is_table(table):
            return table, listed
    return None, False


def _row(model: type[BaseModel], key: str, field: FieldInfo) -> str:
    allowed = describe.allowed(field.annotation, field.metadata)
    meaning = _text(describe.description_of(model, key))
    return f"| `{key}` | {_text(allowed)} | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    from engine.commands.plan_text import toml_text

    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "" if default in (None, {}) else f"`{_text(toml_text(default))}`"


def _text(text: str) -> str:
    """Return the text on one line, with "|" escaped, which would end a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
