"""What the values of an Arrow table mean: objects without the keys that other rows have, names of classes, JSON, dates.

An Arrow struct has the same keys in every row. A key that a row does not have is null in it, as is one that the row has
with the value null; `shapes_of` says which nulls stay."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

Kind = Literal["list", "object", "class", "json", "date", "decimal"]


@dataclass(frozen=True)
class Shape:
    """How stored values become those of a row."""

    kind: Kind
    item: Shape | None = None
    """Of the elements of a list."""
    keys: Mapping[str, Shape | None] = field(default_factory=dict)
    """Of the values of an object."""
    own_nulls: frozenset[str] = frozenset()
    """Keys of an object that stay where they are null."""
    names: tuple[str, ...] = ()
    """Of classes."""


def plain(value: Any, shape: Shape | None) -> Any:
    """Return a stored value as the row has it. `shape` None: it is stored as it is."""
    if shape is None or value is None:
        return value
    if shape.kind == "list":
        return [plain(each, shape.item) for each in value]
    if shape.kind == "object":
        return {
            key: plain(each, shape.keys.get(key))
            for key, each in value.items()
            if each is not None or key in shape.own_nulls
        }
    if shape.kind == "class":
        return _class_name(value, shape.names)
    if shape.kind == "json":
        return json.loads(value)
    return format(value, "f") if isinstance(value, Decimal) else value.isoformat()


def _class_name(value: Any, names: Sequence[str]) -> Any:
    """Return the name of a class by its number, which may be text; None for -1. A name stays."""
    if isinstance(value, str):
        if value in names or not value.removeprefix("-").isdecimal():
            return value
        value = int(value)
    return names[value] if 0 <= value < len(names) else None


def shapes_of(features: Mapping[str, Any], table: Any) -> dict[str, Shape]:
    """Return the shapes of the columns that need one. `features` and `table` are those of a `datasets.Dataset`.

    A key that is null in some rows alone is taken for one that these rows do not have. A key that is null in every row
    was written as null, as otherwise there would be no such key; it stays where no other key of its object is ever
    missing, because then the rows have equal keys."""
    found = {name: _shape(feature, table.column(name).chunks) for name, feature in features.items()}
    return {name: shape for name, shape in found.items() if shape is not None}


def class_shapes(features: Mapping[str, Any] | None) -> dict[str, Shape]:
    """Return the shapes of columns of classes, of rows that have numbers in them and were not read from a table."""
    found = {name: _shape(feature, []) for name, feature in (features or {}).items() if _has_classes(feature)}
    return {name: shape for name, shape in found.items() if shape is not None}


def date_columns(shapes: Mapping[str, Shape]) -> list[str]:
    """Return the columns that have dates, times or decimals."""
    return [name for name, shape in shapes.items() if _has_dates(shape)]


def _has_dates(shape: Shape | None) -> bool:
    return shape is not None and (
        shape.kind in ("date", "decimal") or _has_dates(shape.item) or any(map(_has_dates, shape.keys.values()))
    )


def _has_classes(feature: Any) -> bool:
    import datasets

    if isinstance(feature, dict):
        return any(map(_has_classes, feature.values()))
    return isinstance(feature, datasets.ClassLabel) or (hasattr(feature, "feature") and _has_classes(feature.feature))


def _shape(feature: Any, arrays: Sequence[Any]) -> Shape | None:
    """`arrays`: the stored values of the feature."""
    import datasets
    import pyarrow

    if isinstance(feature, datasets.ClassLabel):
        return Shape("class", names=tuple(feature.names))
    if isinstance(feature, datasets.Json):
        return Shape("json")
    if isinstance(feature, datasets.List | datasets.LargeList):
        item = _shape(feature.feature, [array.flatten() for array in arrays])
        return Shape("list", item) if item is not None else None
    if isinstance(feature, dict):
        return _object_shape(feature, [array.filter(array.is_valid()) for array in arrays])
    if isinstance(feature, datasets.Value):
        type_ = feature.pa_type
        if pyarrow.types.is_date(type_) or pyarrow.types.is_timestamp(type_) or pyarrow.types.is_time(type_):
            return Shape("date")
        return Shape("decimal") if pyarrow.types.is_decimal(type_) else None
    return None


def _object_shape(feature: Mapping[str, Any], arrays: Sequence[Any]) -> Shape:
    """`arrays`: structs, none of which is null."""
    count = sum(map(len, arrays))
    values = {key: [array.field(key) for array in arrays] for key in feature}
    nulls = {key: sum(array.null_count for array in found) for key, found in values.items()}
    always = frozenset(key for key, number in nulls.items() if number == count)
    are_equal = all(number == 0 for key, number in nulls.items() if key not in always)
    shapes = {key: _shape(each, values[key]) for key, each in feature.items()}
    return Shape("object", keys=shapes, own_nulls=always if are_equal else frozenset())
