"""Finds the memory of every shape of a micro-batch from the simulations of a few (`engine.extras.simulate.curves`).

A level is the number of allocated bytes after one allocation of a step: a linear combination of the terms in `UNITS`,
which depend on the shape. The size of nearly every tensor is a multiple of one term, or of two that often come
together, so three shapes show which; what is of three terms takes four. Where these do not do, more shapes give each
level by linear equations. Where operations differ between shapes (a vision encoder may treat image by image), a phase
is recorded as its peak and what it leaves.

The loss of every simulated shape has two chunks, and the coefficients of both are found apart. A tensor for all targets
has the same coefficient in both; what exists for one chunk at a time is in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.budget.calibration import round_to_blocks
from engine.budget.predict.simulated import UNITS, units_of
from engine.extras.simulate.batch import StepShape
from engine.extras.simulate.recorders import FORWARD, LOSS, VISION_BACKWARD, Segment

Sizes = NDArray[np.float64]
"""Coefficients of levels, shape (levels, units). Before `_of_any_chunks`, the last two units are the targets in the
first and in the last of two chunks."""

CHUNK, LAST_CHUNK = 256, 128
"""Targets in the two chunks of a simulated loss. The first is always the larger one, so that it has the peak."""
FEW_SHAPES, MORE_SHAPES = 3, 4
"""With so many shapes, the terms of each tensor are tried; with all of them, each level is solved for."""
TERMS = (*UNITS, "last chunk")
PAIRS = (
    ("rows", "tokens"), ("length", "length^2"), ("tokens", "rows x length^2"), ("one", "rows"), ("one", "length"),
    ("one", "tokens"), ("one", "length^2"), ("one", "images"), ("images", "images^2"), ("tokens", "images"),
    ("length", "images"),
)  # fmt: skip
"""Terms of one tensor, as in rows × (length + 3)."""
TRIPLES = (
    ("one", "rows", "tokens"), ("rows", "tokens", "rows x length^2"), ("one", "images", "images^2"),
    ("one", "tokens", "images"), ("tokens", "images", "images^2"),
)  # fmt: skip
"""Terms of what is allocated together, as for images and text; tried with MORE_SHAPES."""
BLOCK_BYTES = round_to_blocks(1)
BLOCK_LEVELS = 1024
"""Levels that are compared at once, which bounds the memory that it takes."""


def shapes_of(sizes: tuple[list[int], list[int]], *, with_images: bool = False) -> list[StepShape]:
    """Return the shapes to simulate, for `sizes` = (two numbers of rows, three lengths): the first FEW_SHAPES differ in
    every term, and all of them determine as many coefficients. With images there are two terms and two shapes more.

    There may be more targets than tokens: no tensor has values.
    """
    (few, many), (short, middle, long) = sizes
    chunks = [(CHUNK, LAST_CHUNK), (2 * CHUNK, 3 * LAST_CHUNK), (CHUNK + LAST_CHUNK, LAST_CHUNK), (CHUNK, LAST_CHUNK)]
    places = [(few, short, 1), (many, middle, many - 1), (few, long, few), (many, short, few)]
    shapes = list(zip(places, chunks, strict=True))
    shapes += [(place, chunks[0]) for place in ((few, middle, 1), (many, long, many))]
    shapes += [(places[0], chunk) for chunk in chunks[1:FEW_SHAPES]]
    if with_images:
        shapes += [(place, chunks[0]) for place in ((few, short, few), (many, short, many))]
    return [
        StepShape(rows, length, chunk + last, chunk, images if with_images else 0)
        for (rows, length, images), (chunk, last) in shapes
    ]


def curves_of(found: Sequence[list[Segment]], shapes: list[StepShape]) -> dict[str, Any] | None:
    """Fit the allocated bytes of each phase of a plan as a function of a micro-batch's shape. `found` has what was
    recorded for each of `shapes`.

    Returns {phase: {"gradients": bytes of gradients when it begins, "sizes": Sizes}}; None if so many shapes are too
    few.
    """
    found, few = _alike(found), len(shapes) <= MORE_SHAPES
    tried = _tried_sizes(found, shapes) if few else {}
    if tried is None:
        return None
    curves: dict[str, Any] = {}
    for name, phases in _phases([each.phase for each in found[0]]):
        there = [each for each in found[0] if each.phase in phases]
        sizes = np.vstack([tried[phase] if few else _solved_sizes(found, shapes, phase) for phase in phases])
        gradients = next(each.gradient_bytes for each in there if each.phase == phases[-1])
        curves[name] = {"gradients": gradients, "sizes": _of_any_chunks(sizes)}
    return curves


def _alike(found: Sequence[list[Segment]]) -> list[list[Segment]]:
    """Return what was recorded for each shape with as many entries in each phase for all: a phase in which operations
    differ between shapes has the entries up to its peak as one allocation, and those behind it as one release."""
    if len({tuple(each.phase for each in run) for run in found}) > 1:
        return list(found)
    differing = [len({len(run[place].log) for run in found}) > 1 for place in range(len(found[0]))]
    return [
        [_peak_of(each) if differs else each for each, differs in zip(run, differing, strict=True)] for run in found
    ]


def _peak_of(segment: Segment) -> Segment:
    start, end, peak = segment.log[0], sum(segment.log), max(segment.levels)
    return segment._replace(log=[start, peak - start, end - peak])


def _tried_sizes(found: Sequence[list[Segment]], shapes: list[StepShape]) -> dict[str, Sizes] | None:
    """Return the coefficients of all levels by phase, or None if the operations differ between shapes, or if a tensor's
    size is that of no term."""
    if len({tuple((each.phase, len(each.log)) for each in run) for run in found}) > 1:
        return None
    starts = [[each.log[0] for each in run] for run in found]
    ends = [[sum(each.log) for each in run] for run in found]
    if any(start[1:] != end[:-1] for start, end in zip(starts, ends, strict=True)):
        return None  # something was allocated between two phases
    changes = np.array([[run[0].log[0], *(size for each in run for size in each.log[1:])] for run in found], float).T
    terms = _terms_of(changes, shapes)
    if terms is None:
        return None
    targets = terms[:, UNITS.index("targets")]
    terms = np.column_stack([terms[:, :-3], targets + terms[:, -2], targets + terms[:, -1]])
    levels, after = np.cumsum(terms, axis=0), changes[:, 0] >= 0
    sizes: dict[str, list[Sizes]] = {}
    place = 0
    for each in found[0]:
        end = place + len(each.log)  # the last level before the phase is its first
        part = slice(place, end)
        kept = after[part].copy()
        kept[0] = True
        sizes.setdefault(each.phase, []).append(levels[part][kept])
        place = end - 1
    return {phase: np.vstack(parts) for phase, parts in sizes.items()}


def _terms_of(changes: NDArray[np.float64], shapes: list[StepShape]) -> NDArray[np.float64] | None:
    """Return the coefficients [changes, TERMS] of allocations and releases whose bytes are `changes` [changes, shapes],
    each of one term or of one of PAIRS or TRIPLES; None if one is not. Bytes are rounded up to blocks."""
    values = np.array([(*units_of(*each), each.targets - each.chunk) for each in shapes], float)
    result = np.zeros((len(changes), len(TERMS)))
    left = np.arange(len(changes))
    triples = TRIPLES if len(shapes) == MORE_SHAPES else ()
    for trials in (
        [[number] for number in range(len(TERMS))],
        [[TERMS.index(name) for name in pair] for pair in PAIRS],
        [[TERMS.index(name) for name in triple] for triple in triples],
    ):
        if not trials:
            break
        fits = [np.linalg.lstsq(values[:, trial], changes[left].T, rcond=None)[0] for trial in trials]
        errors = [
            np.abs(values[:, trial] @ fit - changes[left].T).max(axis=0)
            for trial, fit in zip(trials, fits, strict=True)
        ]
        best = np.argmin(errors, axis=0)
        for number, trial in enumerate(trials):
            here = (best == number) & (errors[number] < BLOCK_BYTES)
            result[np.ix_(left[here], trial)] = fits[number][:, here].T
        left = left[np.min(errors, axis=0) >= BLOCK_BYTES]
        if not len(left):
            return result
    return None


def _solved_sizes(found: Sequence[list[Segment]], shapes: list[StepShape], phase: str) -> Sizes:
    """Return the coefficients of the levels of `phase`, or of its peak if the operations differ between shapes."""
    series = [[level for each in run if each.phase == phase for level in each.levels] for run in found]
    if len({len(each) for each in series}) > 1:
        series = [[max(each)] for each in series]
    units = np.array(
        [units_of(each.rows, each.length, each.chunk, each.targets - each.chunk, each.images) for each in shapes], float
    )
    solved, kept = np.zeros((len(series[0]), len(UNITS))), units.any(axis=0)
    solved[:, kept] = np.linalg.solve(units[:, kept], np.array(series, float)).T
    return solved


def _of_any_chunks(sizes: Sizes) -> Sizes:
    """The coefficients of all targets and of a full chunk, from those of the first and the last of two chunks."""
    # What both have in common exists for all targets. What only the last one has is counted as for a full one.
    first, last = sizes[:, -2], sizes[:, -1]
    return np.column_stack([sizes[:, :-2], np.minimum(first, last), np.abs(first - last)])


def _phases(recorded: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each phase of a plan with the recorded phases that it consists of, in the order in which they ran."""
    parts: dict[str, Callable[[str], bool]] = {
        "forward": lambda phase: phase.startswith(FORWARD),
        LOSS: lambda phase: phase == LOSS,
        "layer_first": lambda phase: phase.startswith("backward ") and phase != "backward 0",
        "layer_last": lambda phase: phase == "backward 0",
        "embedding_backward": lambda phase: phase.startswith(("embedding_backward", VISION_BACKWARD)),
    }
    for name, belongs in parts.items():
        there = list(dict.fromkeys(filter(belongs, recorded)))
        if there:
            yield name, there


def deciding_levels(sizes: Sizes) -> Sizes:
    """Return those levels of a phase that can be its peak: the ones that are highest for at least one shape of a grid
    of micro-batches."""
    lengths = [2**power for power in range(3, 19)]
    with_images = sizes[:, UNITS.index("images") : UNITS.index("images^2") + 1].any()
    grid = [
        units_of(rows, length, targets, min(targets, chunk), share * rows)
        for rows in (1, 2, 3, 4, 8, 16, 32, 64, 256, 1024)
        for length in lengths
        for targets in (max(1, int(part * rows * length)) for part in (0.02, 0.2, 0.6, 1.0))
        for chunk in (128, 4096, 1 << 40)
        for share in ((0.0, 0.5, 1.0) if with_images else (0.0,))
    ]
    values = np.array(grid, dtype=float)
    best: list[Sizes] = []  # of each block of levels, then of those
    for start in range(0, len(sizes), BLOCK_LEVELS):
        part = sizes[start : start + BLOCK_LEVELS]
        best.append(part[np.unique((values @ part.T).argmax(axis=1))])
    left = np.vstack(best)
    chosen: Sizes = left[np.unique((values @ left.T).argmax(axis=1))]
    return chosen
