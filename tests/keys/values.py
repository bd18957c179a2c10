"""Every key of a table type, and values to try for it: made from its type and limits, without knowing what it means."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from engine.config.schema.base import Table, fields_of

NUMBERS = (1, 2, 5, 3, 0)
FRACTIONS = (1e-9, 0.25, 9.0, 0.5, 3.0, 0.0)
TRIED = 3
"""Values of a number's key: twice what it is now, and the first of these that its limits allow."""


class Key(NamedTuple):
    """A key, by the names of its tables; of a list of tables, the part that stands for an entry is ENTRY."""

    parts: tuple[str, ...]
    annotation: Any
    metadata: tuple[Any, ...]
    default: Any
    table: type[Table]
    """The table that it is in."""

    @property
    def is_stated(self) -> bool:
        """Whether the schema states that it changes neither plan nor result."""
        return self.parts[-1] in self.table.beside_result

    @property
    def name(self) -> str:
        """As the documentation spells it: `data.sources[].limit`."""
        return ".".join(self.parts).replace(f".{ENTRY}", "[]")

    @property
    def is_open(self) -> bool:
        """Whether any text may be a value, or a list or table of any text: a value is then judged by itself."""
        return any(kind in (str, list, dict) for kind in _kinds(self.annotation))


ENTRY = "*"


def keys_of(model: type[Table], parts: tuple[str, ...] = (), walked: set[type[Table]] | None = None) -> Iterator[Key]:
    """Every key of a table type, of the tables in it, and of the entries of its lists of tables; with `walked`, without
    entries of a type that came before."""
    for name, field in fields_of(model).items():
        place, kinds = (*parts, name), list(_members(field.annotation))
        table = next((kind for kind in kinds if _is_table(kind)), None)
        entry = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
        if table is None:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            yield Key(place, field.annotation, tuple(field.metadata), default, model)
        else:
            yield from keys_of(table, place, walked)
        if entry is not None and _is_table(entry) and (walked is None or entry not in walked):
            if walked is not None:
                walked.add(entry)
            yield from keys_of(entry, (*place, ENTRY), walked)


def candidates(key: Key, words: tuple[str, ...], now: Any) -> list[Any]:
    """Values of a key's type, other than `now`. `words`: what text may be: names and files that exist, and nonsense."""
    found: list[Any] = []
    annotation: Any = Annotated[(key.annotation, *key.metadata)] if key.metadata else key.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    for kind in _members(key.annotation):
        made = 0
        is_number = _bare(kind) in (int, float)
        for value in [*([2 * now] if is_number and _is_number(now) else []), *_values(kind, words)]:
            if value == now and type(value) is type(now):
                continue
            try:
                adapter.validate_python(value, strict=True)
            except ValidationError:
                continue
            made += 1
            if value not in found:
                found.append(value)
            if made == TRIED and is_number:
                break
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _values(kind: Any, words: tuple[str, ...]) -> Iterator[Any]:
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _values(get_args(kind)[0], words)
    elif origin is Literal:
        yield from get_args(kind)
    elif kind is bool:
        yield from (True, False)
    elif kind is int:
        yield from NUMBERS
    elif kind is float:
        yield from FRACTIONS
    elif kind is str or kind is Any:
        yield from words
    elif origin is list:
        yield from _lists(get_args(kind)[0], words)
    elif origin is dict:
        inner = [value for member in _members(get_args(kind)[1]) for value in _values(member, words)]
        names = list(_values(get_args(kind)[0], words))
        yield from ({name: value} for name, value in zip(names, inner, strict=False))


def _lists(kind: Any, words: tuple[str, ...]) -> Iterator[list[Any]]:
    """Lists of one value, and of tables also one with a second entry that is like the first."""
    if not _is_table(kind):
        inner = [value for member in _members(kind) for value in _values(member, words)]
        yield from ([value] for value in inner)
        if inner and isinstance(inner[0], float):
            yield from ([value, value] for value in inner)
        return
    for table in _tables(kind, words):
        yield [table]
        yield [table, table]


def _tables(model: type[BaseModel], words: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Tables with the required keys, and one of the others."""
    fields = fields_of(model)
    required = [name for name, field in fields.items() if field.is_required()]
    optional = {
        name: [value for kind in _members(field.annotation) for value in _values(kind, words)]
        for name, field in fields.items()
        if not field.is_required()
    }
    for word in words:
        head = {name: (word if name != "name" else "one") for name in required}
        yield from ({**head, name: values[1]} for name, values in optional.items() if len(values) > 1)


def _members(annotation: Any) -> Iterator[Any]:
    """The types that a value may have, without None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner = get_args(annotation)[0]
        if get_origin(inner) in (Union, types.UnionType):
            yield from _members(inner)
        else:
            yield annotation if get_origin(inner) not in (list, dict, Literal) else inner
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            if member is not type(None):
                yield from _members(member)
    else:
        yield annotation


def _kinds(annotation: Any) -> Iterator[Any]:
    for member in map(_bare, _members(annotation)):
        yield get_origin(member) or member


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def toml_of(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml_of(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
