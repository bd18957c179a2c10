"""Rows of held-out data that are rows of the training data, too, exactly or nearly.

Rows are compared by their tokens. Exact ones have equal tokens and images. Near-duplicates share most of their runs of
three tokens (Jaccard similarity), without the runs that many rows have, such as a system prompt: MinHash signatures in
bands find candidates (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3), whose similarity is then
computed. Work is bounded: of more than SEARCHED_TOKENS a part of the rows is searched for near-duplicates, evenly, and
the report says how much. Results are kept in the cache folder.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config.files.caches import cache_folder
from engine.data.store import hash_text, make_cache_folder
from engine.data.tokens import TokenData

if TYPE_CHECKING:
    from rensa import RMinHashDigestMatrix

VERSION = "overlap 1"
"""Part of the cache entry. Increase it when other rows would be found."""

SIMILAR = 0.7
"""Jaccard similarity from which two rows are near-duplicates: of a row of 30 tokens one or two may differ."""

RUN = 3
"""Tokens of a run."""

MULTIPLIER = 0x9E3779B97F4A7C15
"""An odd number of 64 random-looking bits, by which tokens of a run are kept apart (2^64 by the golden ratio)."""

SIGNATURE, BANDS = 64, 16
"""Values of a signature, and the bands of equal width that it is cut into: 99 % of the pairs with a similarity of 0.7
have a band in common."""

SEARCHED_TOKENS = 100_000_000
"""Training tokens, and half of it held-out tokens, that are searched for near-duplicates."""

CHUNK_TOKENS = 4_000_000
"""Tokens that are searched at once."""

CANDIDATES = 4
"""Rows of a chunk, the likeliest ones, whose similarity to a row is computed."""

COMMON_SHARE, COMMON_ROWS = 0.1, 3
"""A run that more than this share of the rows have, and more than this number, does not distinguish rows."""

FEWEST_RUNS = 6
"""Runs that are not common, of which a row needs as many to be searched for: fewer show little."""

SAMPLED_ROWS = 2_000
"""Different rows in which common runs are counted."""

TABLE_BITS = 20
"""Bits of a hash by which most runs that are not common are recognised."""

MOST_PAIRS = 1_000
"""Pairs that are kept to be shown."""


class Pair(NamedTuple):
    """Two rows, by their first documents in the columns of their parts."""

    document: int
    other: int
    similarity: float
    """1 for exact duplicates."""


@dataclass(frozen=True)
class Overlap:
    """What one part of the data has in common with an earlier one."""

    part: str
    """The held-out part: validation or evaluation."""
    other: str
    rows: int
    """Rows of the held-out part."""
    exact: int
    """Rows of the held-out part that are in the other part."""
    near: int
    """Rows of the held-out part that are nearly in the other part."""
    searched: float
    """Share of the comparisons for near-duplicates that were made."""
    pairs: list[Pair]
    """For each such row the most similar one of the other part, up to MOST_PAIRS, exact ones first."""

    def line(self) -> str:
        """Return a sentence, which begins as a warning does where there are duplicates."""
        other = {"train": "training"}.get(self.other, self.other)
        more = "" if self.searched == 1 else f" (searched: {100 * self.searched:.0f} %)"
        if not self.exact and not self.near:
            return f"{self.part}: none of {self.rows:,} rows is equal or similar to a row of the {other} data{more}"
        return (
            f"WARNING: {self.part}: {self.exact:,} of {self.rows:,} rows {'is' if self.exact == 1 else 'are'} "
            f"also in the {other} data; near-duplicates: {self.near:,}{more}"
        )


class _Rows:
    """The rows of one part: the documents that were made from the same row of a source, as one."""

    def __init__(self, data: TokenData) -> None:
        self.data, columns = data, data.columns
        documents = np.sort(data.documents)
        changed = (np.diff(columns.sources[documents]) != 0) | (np.diff(columns.origins[documents]) != 0)
        first = np.flatnonzero(np.append(True, changed))
        self.documents: NDArray[np.int64] = documents[first]
        self.starts: NDArray[np.int64] = np.asarray(columns.offsets[self.documents])
        last = documents[np.append(first[1:], len(documents)) - 1]
        self.stops: NDArray[np.int64] = np.asarray(columns.offsets[last + 1])
        self.last = last

    def __len__(self) -> int:
        return len(self.documents)

    def ids(self, row: int) -> NDArray[np.int32]:
        return self.data.columns.ids[self.starts[row] : self.stops[row]]

    def images(self, row: int) -> list[int]:
        """Digests of the row's images."""
        found = self.data.columns.images
        if found is None:
            return []
        return list(found.digests[found.offsets[self.documents[row]] : found.offsets[self.last[row] + 1]].tolist())

    def chunks(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Cut `rows` into pieces of about CHUNK_TOKENS."""
        place = np.cumsum(self.stops[rows] - self.starts[rows]) // CHUNK_TOKENS
        yield from (piece for piece in np.split(rows, np.flatnonzero(np.diff(place)) + 1) if len(piece))

    def evenly(self, tokens: int) -> NDArray[np.int64]:
        """Return all rows, or as many of them, evenly, as have about `tokens` in all."""
        step = max(1, -(-int((self.stops - self.starts).sum()) // tokens))
        return np.arange(0, len(self), step)

    def hashes(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        """A hash of the tokens of each row, uint64[rows]."""
        places, lengths = self._places(rows, 0)
        within = np.arange(len(places)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        mixed = _mixed(self.data.columns.ids[places].astype(np.uint64) + (within.astype(np.uint64) << np.uint64(32)))
        sums: NDArray[np.uint64] = np.add.reduceat(mixed, np.cumsum(lengths) - lengths)
        return sums

    def runs(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """(hashes of all runs of tokens, number of them in each row). A row shorter than a run has one."""
        places, lengths = self._places(rows, RUN - 1)
        ends, ids = np.repeat(self.stops[rows] - 1, lengths), self.data.columns.ids
        found = np.zeros(len(places), np.uint64)
        for step in range(RUN):
            found = found * np.uint64(MULTIPLIER) + ids[np.minimum(places + step, ends)].astype(np.uint64)
        return _mixed(found), lengths

    def _places(self, rows: NDArray[np.int64], less: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(places in the columns, of each row all but the last `less`, number of them in each row)."""
        lengths = np.maximum(self.stops[rows] - self.starts[rows] - less, 1)
        first = self.starts[rows] - (np.cumsum(lengths) - lengths)
        return np.repeat(first, lengths) + np.arange(int(lengths.sum())), lengths


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each value to 64 bits that look random (the finaliser of SplitMix64, Steele et al. 2014)."""
    mixed = values + np.uint64(MULTIPLIER)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def find_overlap(parts: Sequence[tuple[str, TokenData]], key: Sequence[str]) -> list[Overlap]:
    """Return what each part has in common with each part before it, from the cache if it was found before. `key` has
    everything that decides the rows of all parts."""
    entry = cache_folder() / "overlap" / f"{hash_text(VERSION, *(name for name, _ in parts), *key)}.json"
    if (found := _cached(entry)) is not None:
        return found
    rows = [(name, _Rows(data)) for name, data in parts]
    found = [_between(name, held, other_name, other)
             for number, (name, held) in enumerate(rows) for other_name, other in rows[:number]]  # fmt: skip
    make_cache_folder(entry.parent)
    descriptor, draft = tempfile.mkstemp(dir=entry.parent)
    with os.fdopen(descriptor, "w") as file:
        json.dump([asdict(each) for each in found], file)
    os.replace(draft, entry)
    return found


def _cached(entry: Path) -> list[Overlap] | None:
    try:
        found = json.loads(entry.read_text("utf-8"))
        return [Overlap(**{**each, "pairs": [Pair(*pair) for pair in each["pairs"]]}) for each in found]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # never found, or damaged: it is found again


def _between(name: str, held: _Rows, other_name: str, other: _Rows) -> Overlap:
    exact = _exact(held, other)
    near, searched = _near(held, other, set(exact))
    pairs = [Pair(int(held.documents[row]), int(other.documents[twin]), 1.0) for row, twin in exact.items()]
    pairs += [Pair(int(held.documents[row]), int(other.documents[twin]), round(similarity, 3))
              for row, (twin, similarity) in sorted(near.items(), key=lambda each: -each[1][1])]  # fmt: skip
    return Overlap(name, other_name, len(held), len(exact), len(near), searched, pairs[:MOST_PAIRS])


def _exact(held: _Rows, other: _Rows) -> dict[int, int]:
    """The first row of `other` that is equal, by row of `held`."""
    hashes = [np.concatenate([rows.hashes(chunk) for chunk in rows.chunks(np.arange(len(rows)))])
              for rows in (held, other)]  # fmt: skip
    order = np.argsort(hashes[1], kind="stable")
    starts = np.searchsorted(hashes[1], hashes[0], "left", sorter=order)
    stops = np.searchsorted(hashes[1], hashes[0], "right", sorter=order)
    found = {}
    for row in np.flatnonzero(stops > starts).tolist():
        for twin in order[starts[row] : stops[row]].tolist():
            if np.array_equal(held.ids(row), other.ids(twin)) and held.images(row) == other.images(twin):
                found[row] = int(twin)
                break
    return found


def _near(held: _Rows, other: _Rows, exact: set[int]) -> tuple[dict[int, tuple[int, float]], float]:
    """Return, by row of `held` that is not in `exact`, the most similar row of `other` that was found and the
    similarity; and the share of the comparisons that were made."""
    from rensa import RMinHashLSH  # imported here: most processes compare no rows

    mine, theirs = held.evenly(SEARCHED_TOKENS // 2), other.evenly(SEARCHED_TOKENS)
    searched = len(mine) / len(held) * len(theirs) / len(other)
    mine = mine[~np.isin(mine, list(exact))]
    common = _common_runs(other)
    signed = [_signed(held, chunk, common) for chunk in held.chunks(mine)]
    if not signed or not sum(len(rows) for rows, _ in signed):
        return {}, searched
    rows, signatures = (np.concatenate(parts) for parts in zip(*signed, strict=True))
    bands = _band_keys(signatures)
    order = np.argsort(bands, axis=0, kind="stable")
    best: dict[int, tuple[int, float]] = {}
    sets: dict[int, set[int]] = {}
    index = RMinHashLSH(SIMILAR, SIGNATURE, BANDS)
    for copy in range(2):  # A row is flagged that has two matches: one would be the row itself, were it in the index.
        index.insert_matrix(_matrix(held, rows, common)[1], copy * len(rows))
    for chunk in other.chunks(theirs):
        likely, matrix = _matrix(other, chunk, common)
        flags = index.query_duplicate_flags_matrix(matrix) if len(likely) else []
        twins, twin_signatures = _signed(other, likely[np.array(flags, np.bool_)], common)
        for row, twin in _candidates(signatures, bands, order, twin_signatures):
            if row not in sets:
                sets[row] = _run_set(held, int(rows[row]), common)
            found = _run_set(other, int(twins[twin]), common)
            similarity = len(sets[row] & found) / len(sets[row] | found)
            number = int(rows[row])
            if similarity < SIMILAR or similarity <= best.get(number, (0, 0.0))[1]:
                continue
            if held.images(number) == other.images(int(twins[twin])):
                best[number] = int(twins[twin]), similarity
    return best, searched


def _matrix(
    rows: _Rows, chosen: NDArray[np.int64], common: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], RMinHashDigestMatrix]:
    """(those of the rows that have FEWEST_RUNS besides common ones, their signatures)."""
    from rensa import RMinHash

    runs, lengths = rows.runs(chosen)
    kept = ~_in_sorted(runs, common)
    counts = np.add.reduceat(kept, np.cumsum(lengths) - lengths, dtype=np.int64) if len(chosen) else lengths
    enough = counts >= FEWEST_RUNS
    kept &= np.repeat(enough, lengths)
    offsets = np.append(0, np.cumsum(counts[enough])).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(runs[kept], offsets, SIGNATURE, 42)
    return chosen[enough], matrix


def _in_sorted(values: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each value is one of `known`, which is sorted: a table of some of its bits answers most of them."""
    if not len(known):
        return np.zeros(len(values), np.bool_)
    bits = np.uint64(TABLE_BITS)
    table = np.zeros(1 << TABLE_BITS, np.bool_)
    table[known >> (np.uint64(64) - bits)] = True
    found: NDArray[np.bool_] = table[values >> (np.uint64(64) - bits)]
    hits = np.flatnonzero(found)
    places = np.minimum(np.searchsorted(known, values[hits]), len(known) - 1)
    found[hits] = known[places] == values[hits]
    return found


def _signed(
    rows: _Rows, chosen: NDArray[np.int64], common: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """(those of the rows that have FEWEST_RUNS besides common ones, their signatures, uint32[rows, SIGNATURE])."""
    kept, matrix = _matrix(rows, chosen, common)
    return kept, np.array(matrix.to_rows(), np.uint32).reshape(-1, SIGNATURE)


def _band_keys(signatures: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """A hash of each band, uint64[rows, BANDS]."""
    parts = signatures.reshape(len(signatures), BANDS, SIGNATURE // BANDS).astype(np.uint64)
    keys = np.zeros(parts.shape[:2], np.uint64)
    for column in range(parts.shape[2]):
        keys = _mixed(keys ^ parts[:, :, column])
    return keys


def _candidates(
    signatures: NDArray[np.uint32],
    bands: NDArray[np.uint64],
    order: NDArray[np.int64],
    twins: NDArray[np.uint32],
) -> Iterator[tuple[int, int]]:
    """(row, twin) of rows with a band in common, for each row the CANDIDATES twins whose signatures agree most. `order`
    sorts each column of `bands`."""
    keys, found = _band_keys(twins), []
    for band in range(BANDS):
        column = bands[order[:, band], band]
        left, right = (np.searchsorted(column, keys[:, band], side) for side in ("left", "right"))
        hits = np.flatnonzero(right > left)
        lengths = right[hits] - left[hits]
        first = left[hits] - (np.cumsum(lengths) - lengths)
        places = np.repeat(first, lengths) + np.arange(int(lengths.sum()))
        found.append(np.stack([order[places, band], np.repeat(hits, lengths)], axis=1))
    pairs = np.unique(np.concatenate(found), axis=0)
    alike = (signatures[pairs[:, 0]] == twins[pairs[:, 1]]).sum(axis=1)
    likely = alike >= SIGNATURE * (SIMILAR - 0.2)  # three standard deviations below the similarity
    pairs, alike = pairs[likely], alike[likely]
    pairs = pairs[np.lexsort((-alike, pairs[:, 0]))]
    place = np.arange(len(pairs)) - np.searchsorted(pairs[:, 0], pairs[:, 0], "left")
    yield from ((int(row), int(twin)) for row, twin in pairs[place < CANDIDATES])


def _run_set(rows: _Rows, row: int, common: NDArray[np.uint64]) -> set[int]:
    runs, _ = rows.runs(np.array([row]))
    return set(runs[~_in_sorted(runs, common)].tolist())


def _common_runs(rows: _Rows) -> NDArray[np.uint64]:
    """Return the runs that many rows have, sorted. Equal rows count once."""
    step = max(1, len(rows) // SAMPLED_ROWS)
    sample = np.arange(0, len(rows), step)[:SAMPLED_ROWS]
    _, first = np.unique(np.concatenate([rows.hashes(chunk) for chunk in rows.chunks(sample)]), return_index=True)
    distinct = sample[np.sort(first)]
    found = [np.unique(rows.runs(np.array([row]))[0]) for row in distinct.tolist()]
    runs, counts = np.unique(np.concatenate(found), return_counts=True)
    return runs[counts > max(COMMON_ROWS, COMMON_SHARE * len(distinct))]
