"""The base of every table in a Tunedeck TOML file, and the constrained types of its fields.

Strict on purpose: a string in place of a number and an unknown key are errors; no value is converted.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
"""The version of the file formats that this Tunedeck reads and writes."""

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
"""Valid names. pydantic's regular expressions are Rust's: `$` matches the end of the text only."""

Count = Annotated[int, Field(ge=1)]
"""A whole number, at least 1."""

CountOrZero = Annotated[int, Field(ge=0)]
"""A whole number, at least 0."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
"""A share from 0 to 1."""

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
"""A number above zero."""

NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
"""Zero or a number above it."""

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=80)]
"""The name of a file, source or stage: lower-case letters, digits, '.', '_' and '-'."""


@cache
def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring of each attribute of a table type, those of its base classes included.

    They are read from the source on the first call. pydantic's `use_attribute_docstrings` would read them when a class
    is created, which took a fifth of the time until the console's first screen.
    """
    inherited = [attribute_docstrings(base) for base in model.__bases__ if issubclass(base, Table)]
    found = {name: text for docstrings in inherited for name, text in docstrings.items()}
    for field, text in pairwise(_classes_of(model.__module__)[model.__name__].body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """The classes that a module defines, as syntax trees."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _describe_properties(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Add the attribute docstrings to a table's JSON Schema `schema`, in place, as descriptions."""
    docstrings = attribute_docstrings(model)
    for name, field in model.model_fields.items():
        written = schema["properties"].get(field.alias or name)
        if written is not None and name in docstrings:
            written["description"] = docstrings[name]


class Table(BaseModel):
    """One TOML table. Attribute docstrings become the descriptions of the JSON Schema."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, json_schema_extra=_describe_properties)
