"""Completes keys, values and table headers of a profile or recipe from its schema.

`complete` takes the text and the cursor and returns what can be written there. Pure functions.

Try: `python -c "from tui.toml.completion import complete; from engine.config.schema.recipe import Recipe;
print(complete(Recipe, ['[train]', 'seq'], 1, 3))"`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from engine.config.files.document import Place
from engine.config.files.text import quoted
from engine.config.schema import base
from engine.config.schema.base import Table
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile
from tui.toml.syntax import OUTSIDE, ScannedLine, scan

_HEADER = re.compile(r"\s*(\[\[?)\s*([\w.-]*)\s*(\]?\]?)\s*(?:#.*)?$")
_KEY_TYPED = re.compile(r"\s*([\w.-]*)$")
_VALUE_TYPED = re.compile(r"\s*([\w.-]+)\s*=\s*(.*)$")
_KEY_WRITTEN = re.compile(r"\s*([\w.-]+)\s*=")
_WORD_TYPED = re.compile(r"(?:^|[\[,]\s*)(\"?[\w./+-]*)$")


class Candidate(NamedTuple):
    """Something that can be written at the cursor."""

    text: str
    """The text to insert."""
    name: str
    """The key, value or table, as it is listed."""
    allowed: str
    """What a key allows, in words; of a value "default" where it is."""
    help: str
    """What the key or table means; empty for values."""


class Completion(NamedTuple):
    """The candidates for the text between two columns of a line."""

    start: int
    end: int
    """The columns of the text that a candidate replaces; `end` is excluded."""
    typed: str
    """What is written there already."""
    candidates: list[Candidate]


def complete(model: type[Table], lines: Sequence[str], row: int, column: int) -> Completion | None:
    """Return what can be written at `column` of line `row` (both counted from 0) in a file of the table type `model`,
    a `Recipe` or a `Profile`; None in comments, in long strings, and where the schema knows nothing."""
    scanned, before = scan(lines), lines[row][:column]
    in_comment = any(span.kind == "comment" and span.start < column for span in scanned[row].spans)
    if scanned[row].state != OUTSIDE or in_comment:
        return None
    found: Completion | None = None
    if header := _HEADER.match(before):
        found = _tables_completion(model, lines, header.start(1), column, row)
    elif key := _KEY_TYPED.match(before):
        found = _keys_completion(model, lines, scanned, row, column, key[1])
    elif value := _VALUE_TYPED.match(before):
        place = [*_table_above(lines, scanned, row), *value[1].split(".")]
        found = _values_completion(model, place, lines[row], column, value[2])
    return found if found and found.candidates else None


def key_help(model: type[Table], lines: Sequence[str], row: int) -> tuple[str, str] | None:
    """Return what the key of line `row` allows and what it means; None on lines that begin with no key of the
    schema."""
    scanned = scan(lines)
    written = _KEY_WRITTEN.match(lines[row])
    if written is None or scanned[row].state != OUTSIDE:
        return None
    names: list[str] = [*_table_above(lines, scanned, row), *written[1].split(".")]
    *parents, key = names
    table = _table_type(model, parents)
    if table is None or key not in base.fields_of(table):
        return None
    return _allowed(table, key), _one_line(base.description_of(table, key))


def _tables_completion(model: type[Table], lines: Sequence[str], start: int, column: int, row: int) -> Completion:
    """The headers of tables that begin as the header that is being typed in line `row`."""
    header = _HEADER.match(lines[row])
    end = header.end(3) if header else column
    typed = lines[row][start:column].lstrip("[").strip()
    others = {match[2] for index, line in enumerate(lines) if index != row and (match := _HEADER.match(line))}
    candidates = [
        Candidate(f"[[{path}]]" if listed else f"[{path}]", path, "a list of tables" if listed else "a table", text)
        for path, listed, text in _tables_of(model)
        if listed or path.startswith("stages.") or path not in others
    ]
    return Completion(start, end, typed, _matching(candidates, typed))


def _tables_of(model: type[Table], prefix: str = "") -> Iterator[tuple[str, bool, str]]:
    """Yield path, whether it is a list of tables, and meaning of each table that a file may have, tables in tables
    after the outer one."""
    for key, field in base.fields_of(model).items():
        for member in base.members_of(field.annotation):
            listed = get_origin(member) is list
            table = get_args(member)[0] if listed else member
            if base.is_table(table):
                yield prefix + key, listed, _one_line(table.__doc__ or "")
                yield from _tables_of(table, f"{prefix}{key}.")
            elif get_origin(member) is dict and _is_recipe_table(key):
                yield prefix + key, False, _one_line(base.description_of(model, key))
    if model is Profile:
        yield from ((f"overrides.{key}", False, text) for key, _, text in _tables_of(Recipe) if "." not in key)


def _is_recipe_table(key: str) -> bool:
    """Whether a key is a table of recipes; those of stages and [overrides] may repeat it."""
    return base.table_at(Recipe, (key,)) is not None


def _keys_completion(
    model: type[Table], lines: Sequence[str], scanned: Sequence[ScannedLine], row: int, column: int, typed: str
) -> Completion | None:
    """The keys of the table of line `row` that the table does not have yet and that begin as what is typed."""
    above, (*parents, word) = _table_above(lines, scanned, row), typed.split(".")
    table = _table_type(model, [*above, *parents])
    if table is None:
        return None
    rest = re.match(r"[\w-]*", lines[row][column:])
    end = column + (rest.end() if rest else 0)
    written = _keys_written(lines, scanned, row)
    has_value = "=" in lines[row][end:].partition("#")[0]
    candidates = [
        Candidate(key if has_value else f"{key} = ", key, _allowed(table, key), _one_line(text))
        for key, text in ((key, base.description_of(table, key)) for key in base.fields_of(table))
        if not _is_tables(table, key) and ".".join([*parents, key]) not in written
    ]
    return Completion(column - len(word), end, word, _matching(candidates, word))


def _is_tables(table: type[Table], key: str) -> bool:
    """Whether the value of a key is a table or a list of tables, which is written below a header of its own."""
    annotation = base.fields_of(table)[key].annotation
    return base.table_at(table, (key,)) is not None or any(
        get_origin(member) is dict or (get_origin(member) is list and base.is_table(get_args(member)[0]))
        for member in base.members_of(annotation)
    )


def _keys_written(lines: Sequence[str], scanned: Sequence[ScannedLine], row: int) -> set[str]:
    """The keys of the table of line `row`, without that of the line itself."""
    first = next((index for index in range(row, -1, -1) if _is_header(lines, scanned, index)), -1) + 1
    last = next((index for index in range(row, len(lines)) if _is_header(lines, scanned, index)), len(lines))
    return {
        match[1]
        for index in range(first, last)
        if index != row and scanned[index].state == OUTSIDE and (match := _KEY_WRITTEN.match(lines[index]))
    }


def _values_completion(
    model: type[Table], names: Sequence[str], line: str, column: int, typed: str
) -> Completion | None:
    """The words that a key allows, true and false; where nothing is typed yet, also the default."""
    *parents, key = names
    table = _table_type(model, parents)
    word = _WORD_TYPED.search(typed)
    if table is None or word is None or key not in base.fields_of(table):
        return None
    place: Place = (key, 0) if typed.startswith("[") else (key,)
    default = "" if typed.startswith("[") else _default(table, key)
    words = [quoted(choice) for choice in base.choices_at(table, place)]
    found = base.type_at(table, place)
    words += ["true", "false"] if found and bool in base.members_of(found[0]) else []
    words += [default] if default and default not in words and not word[1] else []
    rest = re.match(r"[\w./+-]*\"?", line[column:])
    end = column + (rest.end() if rest else 0)
    candidates = [Candidate(text, text, "default" if text == default else "", "") for text in words]
    return Completion(column - len(word[1]), end, word[1], _matching(candidates, word[1].strip('"')))


def _default(table: type[Table], key: str) -> str:
    """The default of a key, as TOML; empty if there is none, or none that can be written."""
    field = base.fields_of(table)[key]
    value: Any = None if field.is_required() else field.get_default(call_default_factory=True)
    return quoted(value) if isinstance(value, str | bool | int | float) and value != "" else ""


def _allowed(table: type[Table], key: str) -> str:
    """What a key allows, in words, and its default."""
    default = _default(table, key)
    allowed = base.allowed_at(table, (key,))
    return f"{allowed}; default {default}" if default else allowed


def _matching(candidates: Sequence[Candidate], typed: str) -> list[Candidate]:
    """The candidates that begin with what is typed, then those that contain it."""
    word = typed.lower()
    begins = [each for each in candidates if each.name.strip('"').lower().startswith(word)]
    return begins + [each for each in candidates if word in each.name.lower() and each not in begins]


def _is_header(lines: Sequence[str], scanned: Sequence[ScannedLine], row: int) -> bool:
    return scanned[row].state == OUTSIDE and _HEADER.match(lines[row]) is not None


def _table_above(lines: Sequence[str], scanned: Sequence[ScannedLine], row: int) -> list[str]:
    """The names in the header of the table to which line `row` belongs; empty above the first header."""
    for index in range(row, -1, -1):
        header = _HEADER.match(lines[index]) if _is_header(lines, scanned, index) else None
        if header is not None:
            return header[2].split(".")
    return []


def _table_type(model: type[Table], names: Sequence[str]) -> type[Table] | None:
    """The type of the table with these names below each other. [overrides] of a profile and the tables of a stage are
    tables of a recipe."""
    if model is Profile and names[:1] == ["overrides"]:
        model, names = Recipe, names[1:]
    elif model is Recipe and names[:1] == ["stages"] and len(names) > 1 and _is_recipe_table(names[1]):
        names = names[1:]
    place: Place = ()
    for name in names:
        place = (*place, name)
        if base.table_at(model, (*place, 0)) is not None:
            place = (*place, 0)
    table = base.table_at(model, place)
    return table if table is not None and issubclass(table, Table) else None


def _one_line(text: str) -> str:
    return " ".join(text.split())
