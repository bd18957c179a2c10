"""The base of every table in a Tunedeck TOML file, and the constrained types of its fields.

Strict on purpose: a string in place of a number and an unknown key are errors; no value is converted.
"""

from __future__ import annotations

from typing import Annotated

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


class Table(BaseModel):
    """One TOML table. Attribute docstrings become the descriptions of the JSON Schema."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)
