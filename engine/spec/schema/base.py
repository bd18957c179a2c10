"""The base of every table in a Tunedeck TOML file, and the constrained types its fields are made of.

Strict on purpose: a string where a number belongs is an error, an unknown key is an error, nothing is converted.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
"""The version of the file formats that this Tunedeck reads and writes."""

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
"""What a name may look like. pydantic's regular expressions are Rust's: `$` is the end of the text, not of a line."""

Count = Annotated[int, Field(ge=1)]
"""A whole number of things, at least one."""

CountOrZero = Annotated[int, Field(ge=0)]
"""A whole number of things, none allowed."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
"""A share from 0 to 1."""

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
"""A number above zero."""

NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
"""Zero or a number above it."""

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=80)]
"""The name of a file, source or stage: lower-case letters, digits, '.', '_' and '-'."""


class Table(BaseModel):
    """One TOML table. Attribute docstrings become the descriptions of the JSON Schema."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)
