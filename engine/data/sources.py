"""Opens the rows of a source: a built-in generator, or files and data sets that `engine.data.dataset_files` reads.

Try: `tunedeck data -r demo`
"""

from __future__ import annotations

from dataclasses import replace

from engine.data.builtin import ROWS, dates
from engine.data.cache import hash_text
from engine.data.source_rows import SourceRows, no_rows, split_name
from engine.errors import DataError
from engine.spec.schema.data import Source


def open_rows(source: Source, *, seed: int) -> SourceRows:
    """Open a source and apply its `limit`. `seed` is used by built-in generators only.

    Raises DataError for a source that is missing, unreadable or empty, EnvironmentProblem for an unreachable hub.
    """
    rows = _open_builtin(source, seed) if _is_builtin(source) else _open_data_set(source)
    if rows.count == 0:
        raise no_rows(source)
    return rows if source.limit is None else replace(rows, count=min(rows.count, source.limit))


def _is_builtin(source: Source) -> bool:
    return source.path is not None and source.path.startswith("builtin:")


def _open_data_set(source: Source) -> SourceRows:
    from engine.data.dataset_files import open_data_set  # imported here: `datasets` takes a second, built-in rows none

    return open_data_set(source)


def _open_builtin(source: Source, seed: int) -> SourceRows:
    base = split_name(source)
    if source.path != "builtin:dates" or base not in ROWS:
        raise DataError(
            f"source {source.name}: there is no {source.path} with split {source.split}",
            expected=f"builtin:dates with split {' or '.join(ROWS)}, or a slice of it such as train[:1000]",
        )
    rows = dates(seed, base)
    if source.split != base:
        from engine.data.dataset_files import absolute_slice  # imported here, as above

        rows = rows[slice(*absolute_slice(source, len(rows)))]
    # Hash the rows, not the seed: another version of the generator may make other rows.
    fingerprint = hash_text(*(f"{row['prompt']}{row['completion']}" for row in rows))
    return SourceRows(["prompt", "completion"], len(rows), fingerprint, rows)
