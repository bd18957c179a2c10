"""The order of samples, a pure function of seed, epoch and step; the packing of short samples into long rows; and which
samples are held out for validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from engine.errors import DataError


def pack(lengths: NDArray[np.int32], max_length: int) -> list[list[int]]:
    """Numbers of the documents of each row of at most `max_length` tokens, in the order of the data; rows by first
    document. Raises ValueError for a longer document. Best-fit decreasing: at most 11/9 of the fewest possible rows,
    plus one (Johnson et al., SIAM J. Comput. 3, 1974). Bit n of `rooms` says whether a row with n free tokens exists,
    so a shift finds the fullest row into which a document fits."""
    if len(lengths) and int(lengths.max()) > max_length:
        raise ValueError(f"a document of {int(lengths.max())} tokens does not fit into rows of {max_length}")
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0
    for document in np.argsort(-lengths.astype(np.int64), kind="stable"):
        length = int(lengths[document])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = max_length, len(rows)
            rows.append([])
        rows[row].append(int(document))
        if left := room - length:
            by_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return sorted(sorted(row) for row in rows)


CACHED_EPOCHS = 2
"""Epochs whose order stays in memory: a step across an epoch boundary needs two."""

MAX_DENOMINATOR = 1_000_000
"""Weights are rounded to fractions with at most this denominator, so 0.1 is exactly a tenth."""

DRAW_KEY, ORDER_KEY, MIX_KEY = 0, 1, 2
"""Keys of random streams: the samples that a fractional weight draws, the order within an epoch, and the sources of an
epoch's samples."""


class SampleOrder:
    """The order of samples over a run. Neither world size nor micro-batch matters, so a run's position is its step
    number.

    `weights_or_count` is the number of samples, or how often each occurs in an epoch. A sample of weight 2.3 occurs
    twice in every epoch; in addition, each epoch takes the next 30 % of all samples of this weight, in an order
    shuffled by seed, so that all epochs have `epoch_size` entries. `epochs` ends the sequence, perhaps with a smaller
    step. `in_pairs`: what is ordered are pairs of rows, 2·p and 2·p + 1, which stay together.

    Raises DataError when an epoch would hold no sample at all.
    """

    def __init__(
        self,
        weights_or_count: int | Sequence[float] | NDArray[np.float64],
        *,
        seed: int,
        shuffle: bool,
        batch_size: int,
        epochs: float | None = None,
        in_pairs: bool = False,
    ) -> None:
        self.seed, self.shuffle, self.batch_size, self.in_pairs = seed, shuffle, batch_size, in_pairs
        given = weights_or_count
        weights = np.ones(given) if isinstance(given, int) else np.asarray(given, np.float64)
        self._whole = np.floor(weights).astype(np.int64)
        self._drawn = _fractional_groups(weights - self._whole, seed)
        self.epoch_size = int(self._whole.sum()) + sum(count for _, count in self._drawn)
        if self.epoch_size == 0:
            raise DataError(
                f"an epoch has no samples ({len(weights)} samples, weights sum to {weights.sum():g})",
                fix="add samples or raise the weight of a source",
            )
        self._end = None if epochs is None else self._samples_in(epochs)
        self._cached: dict[int, NDArray[np.int64]] = {}

    def steps(self, epochs: float | None, max_steps: int | None) -> int:
        """Optimizer steps of `epochs` epochs, at most `max_steps`. If both are None, those of one epoch."""
        if epochs is None and max_steps is not None:
            return max_steps
        by_epochs = math.ceil(self._samples_in(1.0 if epochs is None else epochs) / self.batch_size)
        return by_epochs if max_steps is None else min(by_epochs, max_steps)

    def step(self, step: int) -> NDArray[np.int64]:
        """Sample indices of optimizer step `step`, counted from 1; empty after the last step."""
        start, stop = (step - 1) * self.batch_size, step * self.batch_size
        if self._end is not None:
            start, stop = min(start, self._end), min(stop, self._end)
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            epoch, offset = divmod(start, self.epoch_size)
            pieces.append(self.epoch(epoch)[offset : offset + stop - start])
            start += len(pieces[-1])
        found = np.concatenate(pieces)
        return np.stack([2 * found, 2 * found + 1], axis=1).ravel() if self.in_pairs else found

    def epoch_at(self, step: int) -> float:
        """Epochs completed after optimizer step `step`, such as 1.5."""
        position = step * self.batch_size
        return (position if self._end is None else min(position, self._end)) / self.epoch_size

    def ends_part(self, step: int, parts: int) -> bool:
        """Whether `step` takes the last sample of one of the `parts` equal parts of an epoch."""
        before, after = ((at * self.batch_size * parts) // self.epoch_size for at in (step - 1, step))
        return after > before

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Sample indices of epoch number `epoch` (counted from 0), in training order: int64[epoch_size]."""
        if epoch not in self._cached:
            while len(self._cached) >= CACHED_EPOCHS:
                self._cached.pop(min(self._cached))
            self._cached[epoch] = self._make_epoch(epoch)
        return self._cached[epoch]

    def _samples_in(self, epochs: float) -> int:
        return max(1, round(epochs * self.epoch_size))

    def _make_epoch(self, epoch: int) -> NDArray[np.int64]:
        counts = self._whole.copy()
        for members, count in self._drawn:
            # Take the next `count` of a shuffled, circular list: every member once before any a second time.
            window = (epoch * count + np.arange(count)) % len(members)
            counts[members[window]] += 1
        passes = [np.flatnonzero(counts > already) for already in range(int(counts.max()))]
        entries = np.concatenate(passes)
        return entries[_permutation(len(entries), self.seed, ORDER_KEY, epoch)] if self.shuffle else entries


class MixedOrder(SampleOrder):
    """An order in which the source of each sample of an epoch is drawn, in proportion to the weights of the sources. An
    epoch has one entry per sample; those of a source are taken in an order of this epoch, again from the start once all
    were taken."""

    def __init__(
        self, source_of: NDArray[np.integer], source_weights: Sequence[float], *, seed: int, batch_size: int,
        epochs: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(len(source_of), seed=seed, shuffle=True, batch_size=batch_size, epochs=epochs)
        self._members = [np.flatnonzero(source_of == source) for source in np.unique(source_of)]
        weights = np.asarray(source_weights, np.float64)[np.unique(source_of)]
        self._bounds = np.cumsum(weights / weights.sum())[:-1]

    def _make_epoch(self, epoch: int) -> NDArray[np.int64]:
        bits = np.random.Philox(np.random.SeedSequence((self.seed, MIX_KEY, epoch))).random_raw(self.epoch_size)
        drawn = np.searchsorted(self._bounds, (bits >> np.uint64(11)) * 2.0**-53, side="right")
        entries = np.empty(self.epoch_size, np.int64)
        for source, members in enumerate(self._members):
            places = np.flatnonzero(drawn == source)
            rounds = range(-(-len(places) // len(members)))
            taken = [members[_permutation(len(members), self.seed, MIX_KEY, epoch, source, turn)] for turn in rounds]
            entries[places] = np.concatenate([np.empty(0, np.int64), *taken])[: len(places)]
        return entries


def _fractional_groups(fractions: NDArray[np.float64], seed: int) -> list[tuple[NDArray[np.int64], int]]:
    """By fractional part of a weight: its samples, shuffled by `seed`, and how many of them each epoch draws."""
    groups = []
    for number, value in enumerate(np.unique(fractions[fractions > 0])):
        members = np.flatnonzero(fractions == value)
        exact = Fraction(float(value)).limit_denominator(MAX_DENOMINATOR) * len(members)
        members = members[_permutation(len(members), seed, DRAW_KEY, number)]
        groups.append((members, math.floor(exact + Fraction(1, 2))))
    return groups


def _permutation(count: int, *key: int) -> NDArray[np.int64]:
    """Determined by the integers `key`: sorted raw Philox output, which numpy keeps across versions, unlike
    `Generator.permutation` (NEP 19)."""
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(bits, kind="stable").astype(np.int64)


def hold_out(
    origins: NDArray[np.integer], sources: NDArray[np.integer], keys: Sequence[int], fraction: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the training and of the validation documents, in the order of the data. For each document, `origins`
    has its row and `sources` the number of its source; `keys` are 64 bits of each source and the seed.

    The draw depends on a document's key and row alone, so that other settings do not move samples between the parts.
    Raises DataError when no training documents would be left.
    """
    everything = np.arange(len(origins))
    if fraction == 0.0:
        return everything, everything[:0]
    held = max(1, round(fraction * len(origins)))
    draw = _mixed(origins.astype(np.uint64) + np.array(keys, np.uint64)[sources])
    # Documents of one conversation have the same number in `draw`, so all of them go to the same part.
    chosen = draw <= np.sort(draw)[held - 1]
    if chosen.all():
        raise DataError(
            f"data.valid_fraction = {fraction:g} of {len(origins)} samples leaves nothing to train on",
            fix="add samples, or add separate validation data with [[data.validation]]",
        )
    return everything[~chosen], everything[chosen]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each integer to 64 pseudo-random bits (the finaliser of SplitMix64; Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
