"""The keys of a profile or recipe as Markdown tables, for `tunedeck recipes schema --markdown`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.commands.plan_text import toml_text
from engine.config.schema import base

HEAD = ("| key | allowed | default | meaning |", "|---|---|---|---|")


def schema_markdown(model: type[BaseModel]) -> str:
    """The keys at the top of the file, then every table with a heading."""
    return "\n".join(_table_lines(model, "", {})).strip()


def _table_lines(model: type[BaseModel], heading: str, shown: dict[type[BaseModel], str]) -> Iterator[str]:
    """The heading and rows of a table, then the tables inside it. `shown` maps the table types listed so far to their
    headings: their keys are not repeated."""
    inner: list[tuple[str, type[BaseModel]]] = []
    rows: list[str] = []
    for key, field in base.fields_of(model).items():
        table, listed = _table_of(field.annotation)
        if table is None:
            rows.append(_key_row(model, key, field))
        else:
            path = f"{heading.strip('[]')}.{key}" if heading else key
            inner.append((f"[[{path}]]" if listed else f"[{path}]", table))
    if heading:
        yield from ("", f"### `{heading}`", "", _sentence(model.__doc__ or ""))
    if model in shown:
        yield f"The keys are those of `{shown[model]}`."
        return
    shown[model] = heading
    yield from ("", *HEAD, *rows) if rows else ()
    for path, table in inner:
        yield from _table_lines(table, path, shown)


def _table_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The table type, and whether the field is a list of such tables; (None, False) if the field is no table."""
    for member in base.members_of(annotation):
        listed = get_origin(member) is list
        table = get_args(member)[0] if listed else member
        if base.is_table(table):
            return table, listed
    return None, False


def _key_row(model: type[BaseModel], key: str, field: FieldInfo) -> str:
    allowed = base.allowed(field.annotation, field.metadata)
    meaning = _sentence(base.description_of(model, key))
    return f"| `{key}` | {_sentence(allowed)} | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "" if default in (None, {}) else f"`{_sentence(toml_text(default))}`"


def _sentence(text: str) -> str:
    """Return the text on one line, with "|" escaped, which would end a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
