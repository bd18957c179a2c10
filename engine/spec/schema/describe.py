"""Says in words what each key allows, derived from the types in `profile.py`, `recipe.py` and `run.py`.

Try: `python -c "from engine.spec.schema import describe as d, recipe; print(d.allowed_at(recipe.Recipe, ('train',)))"`
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from itertools import chain
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.spec.files.lines import Place
from engine.spec.files.text import quoted
from engine.spec.schema.base import NAME_PATTERN, attribute_docstrings

_PLAIN = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "a table",
    Any: "any value",
}


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a table type, by their keys in the TOML file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def description_of(model: type[BaseModel], key: str) -> str:
    """What a key of a table means: the docstring of its field; empty if the table has no such key."""
    names = {field.alias or name: name for name, field in model.model_fields.items()}
    return attribute_docstrings(model).get(names.get(key, ""), "")


def type_at(model: Any, place: Place) -> tuple[Any, list[Any]] | None:
    """The annotation and the constraints (pydantic metadata) of the value at `place` inside the table type `model`;
    None where it has no such place."""
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
    """Whether a type is one of the spec's tables."""
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
    """The words that a key allows as its value; empty if the key is not restricted to certain words."""
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
    """What is allowed as the value at `place`, in words; "nothing" if the table type `model` has no such place."""
    found = type_at(model, place)
    return allowed(*found) if found else "nothing"


def allowed(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Describe a type and its constraints in words, such as "a whole number, 1 or more"."""
    annotation, notes = _unwrap(annotation, list(metadata))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(allowed(member) for member in members_of(annotation))
    if get_origin(annotation) is Literal:
        words = [quoted(word) for word in get_args(annotation)]
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    limits = _limits(notes)
    if "name" in limits:
        return "a name of lower-case letters, digits, '.', '_' and '-', 80 at most"
    return ", ".join([_kind(annotation), *limits.values()])


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is list:
        item = get_args(annotation)[0]
        return "a list of tables" if is_table(item) else f"a list, each {allowed(item)}"
    if is_table(annotation) or get_origin(annotation) is dict:
        return "a table"
    return _PLAIN.get(annotation, str(annotation))


def _limits(notes: list[Any]) -> dict[str, str]:
    """Read the constraints of a field from its pydantic metadata `notes`, as {kind: words}: {"ge": "1 or more"}.

    A field that must be a valid name gets the kind "name" with empty words; `allowed` has the words for it.
    """
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
