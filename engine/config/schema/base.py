"""The base of every table in a Tunedeck TOML file, and what each key allows, in words made from its type."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterable
from functools import cache
from itertools import chain, pairwise
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from engine.config.files.document import Place
from engine.config.files.text import quoted

SCHEMA_VERSION = 1

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
"""Valid names. pydantic's regular expressions are Rust's: `$` matches the end of the text only."""

Count = Annotated[int, Field(ge=1)]

CountOrZero = Annotated[int, Field(ge=0)]

Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=80)]
"""Lower-case letters, digits, '.', '_' and '-'."""


@cache
def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring of each attribute of a table type, inherited ones included, read from the source on the first call:
    pydantic's `use_attribute_docstrings` reads them when a class is created, a fifth of the time until the first
    screen."""
    inherited = [attribute_docstrings(base) for base in model.__bases__ if issubclass(base, Table)]
    found = {name: text for docstrings in inherited for name, text in docstrings.items()}
    for field, text in pairwise(_classes_of(model.__module__)[model.__name__].body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _describe_properties(schema: dict[str, Any], model: type[BaseModel]) -> None:
    docstrings = attribute_docstrings(model)
    for name, field in model.model_fields.items():
        written = schema["properties"].get(field.alias or name)
        if written is not None and name in docstrings:
            written["description"] = docstrings[name]


class Table(BaseModel):
    """One TOML table. Attribute docstrings become the descriptions of the JSON Schema."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, json_schema_extra=_describe_properties)

    beside_result: ClassVar[frozenset[str]] = frozenset()
    """Keys that change neither the plan nor the result of a run in which nothing fails, as their descriptions say:
    labels, texts for readers, speed, and what happens after an error."""


_PLAIN = {
    str: "text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    dict: "a table",
    Any: "any value",
}


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields by their keys in the TOML file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def description_of(model: type[BaseModel], key: str) -> str:
    """The docstring of the key's field; empty if the table has no such key."""
    names = {field.alias or name: name for name, field in model.model_fields.items()}
    return attribute_docstrings(model).get(names.get(key, ""), "")


def type_at(model: Any, place: Place) -> tuple[Any, list[Any]] | None:
    """Annotation and constraints (pydantic metadata) at `place` in the table type; None where it has no such place."""
    annotation: Any = model
    metadata: list[Any] = []
    for part in place:
        step = _step(annotation, part)
        if step is None:
            return None
        annotation, metadata = step
    return annotation, metadata


def _step(annotation: Any, part: str | int) -> tuple[Any, list[Any]] | None:
    for member in members_of(annotation):
        bare, _ = _unwrap(member, [])
        origin = get_origin(bare) or bare
        if isinstance(part, int) and origin is list:
            return _unwrap(get_args(bare)[0], [])
        if isinstance(part, str) and origin is dict:
            return get_args(bare)[1], []
        if isinstance(part, str) and is_table(bare) and part in fields_of(bare):
            field = fields_of(bare)[part]
            return _unwrap(field.annotation, list(field.metadata))
    return None


def is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def table_at(model: Any, place: Place) -> type[BaseModel] | None:
    """The table type at `place`; None where the value there is not a table."""
    found = type_at(model, place)
    return next((member for member in members_of(found[0]) if is_table(member)), None) if found else None


def members_of(annotation: Any) -> list[Any]:
    """The types that a value of this annotation may have, without None."""
    bare, _ = _unwrap(annotation, [])
    if get_origin(bare) in (Union, types.UnionType):
        return [member for member in get_args(bare) if member is not type(None)]
    return [bare]


def _unwrap(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any]]:
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        return _unwrap(inner, [*metadata, *notes])
    return annotation, metadata


def choices_at(model: Any, place: Place) -> list[str]:
    """The words that a key allows; empty if it is not restricted to certain words."""
    found = type_at(model, place)
    members = members_of(found[0]) if found else []
    return [
        word
        for member in members
        if get_origin(member) is Literal
        for word in get_args(member)
        if isinstance(word, str)
    ]


def allowed_at(model: Any, place: Place) -> str:
    """What is allowed at `place`, in words; "nothing" if the table type has no such place."""
    found = type_at(model, place)
    return allowed(*found) if found else "nothing"


def allowed(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Describe a type and its constraints in words, such as "an integer, 1 or more"."""
    annotation, notes = _unwrap(annotation, list(metadata))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(allowed(member) for member in members_of(annotation))
    if get_origin(annotation) is Literal:
        words = [quoted(word) for word in get_args(annotation)]
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    limits = _limits(notes)
    if "name" in limits:
        return "a name of lower-case letters, digits, '.', '_' and '-', at most 80"
    return ", ".join([_kind(annotation), *limits.values()])


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is list:
        item = get_args(annotation)[0]
        return "a list of tables" if is_table(item) else f"a list, each {allowed(item)}"
    if is_table(annotation) or get_origin(annotation) is dict:
        return "a table"
    return _PLAIN.get(annotation, str(annotation))


def _limits(notes: list[Any]) -> dict[str, str]:
    """Constraints as {kind: words}, such as {"ge": "1 or more"}; a valid name is "name" with empty words."""
    limits: dict[str, str] = {}
    words = {
        "ge": "{} or more",
        "gt": "above {}",
        "le": "at most {}",
        "lt": "below {}",
        "min_length": "at least {} of them",
    }
    for note in chain.from_iterable(item.metadata if isinstance(item, FieldInfo) else [item] for item in notes):
        for kind, text in words.items():
            if (bound := getattr(note, kind, None)) is not None:
                limits[kind] = text.format(f"{bound:g}")
        if getattr(note, "pattern", None) == NAME_PATTERN:
            limits["name"] = ""
    return limits
