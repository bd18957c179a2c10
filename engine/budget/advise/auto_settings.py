"""Chooses what "auto" leaves open: how many layers recompute their activations, and with which micro-batch. Of all
settings that fit, the fastest by the model of time (`engine.budget.predict.step_time`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.budget.predict.prediction import Predictor, in_whole_samples
from engine.budget.predict.step_time import StepTime

SPARE_SHARE = 0.01
"""Share of the predicted bytes that must be left over for a layer to keep its activations: by so much a peak may exceed
its prediction, and a step that is repeated costs more than one layer gains."""


class Choice(NamedTuple):
    """A micro-batch with the fewest layers that recompute for it."""

    rows: int
    layers: int
    """How many layers recompute."""
    seconds: float
    """Predicted duration of an optimizer step; without the profile's speed, in an arbitrary unit."""
    device_bytes: int


def choose(predictor: Predictor, length: int, largest: int, *, fixed_rows: bool, every: bool = False) -> list[Choice]:
    """The settings considered for sequences of `length` tokens, the best first; never empty. `largest`: sequences of a
    micro-batch that fit if all layers recompute, the only number considered with `fixed_rows`. Without `every`, those
    that cannot be the fastest are left out."""
    time = StepTime.of(predictor)
    if fixed_rows:
        return [_choice(predictor, time, largest, length)]
    found: list[Choice] = []
    for rows in _micro_batches(predictor, length, largest, every=every):
        # A larger micro-batch needs no fewer layers than a smaller one: with those it takes at least this long.
        fewest = max(1, *(choice.layers for choice in found)) if found else 0
        if every or not found or time.step(rows, length, fewest) < min(choice.seconds for choice in found):
            found.append(_choice(predictor, time, rows, length))
    return sorted(found, key=lambda choice: choice.seconds)


def numbers_of_layers(predictor: Predictor, length: int, rows: int) -> list[Choice]:
    """None, all, quarters of the layers, and the fewest that fit, for micro-batches of `rows` sequences."""
    layers = predictor.arch.layers
    fewest = _fewest_layers(predictor, rows, length)
    numbers = {0, fewest, layers, *(quarter * layers // 4 for quarter in (1, 2, 3))}
    return [choice_of(predictor, length, rows, number) for number in sorted(numbers)]


def choice_of(predictor: Predictor, length: int, rows: int, layers: int) -> Choice:
    """The choice of these numbers, whether or not it fits."""
    needed_bytes = predictor.recomputing(layers).predict(rows, length).device_bytes
    return Choice(rows, layers, StepTime.of(predictor).step(rows, length, layers), needed_bytes)


def _choice(predictor: Predictor, time: StepTime, rows: int, length: int) -> Choice:
    fewest = _fewest_layers(predictor, rows, length)
    needed_bytes = predictor.recomputing(fewest).predict(rows, length).device_bytes
    return Choice(rows, fewest, time.step(rows, length, fewest), needed_bytes)


def _micro_batches(predictor: Predictor, length: int, largest: int, *, every: bool) -> list[int]:
    """Sizes that divide the batch evenly, each at least a quarter larger than the one before, up to the `largest`;
    unless `every` is asked for, from the largest on that fits without recomputing anything."""
    sizes = [largest]
    while sizes[0] > 1:
        passes = -(-predictor.batch // sizes[0])
        rows = -(-predictor.batch // max(passes + 1, passes * 5 // 4))
        sizes.insert(0, in_whole_samples(predictor.recipe, min(rows, sizes[0] - 1)))
    if every:
        return sizes
    roomy = 0
    while roomy + 1 < len(sizes) and _has_room(predictor, sizes[roomy + 1], length, 0):
        roomy += 1
    return sizes[roomy:]


def _fewest_layers(predictor: Predictor, rows: int, length: int) -> int:
    """The smallest number of layers that must recompute for a micro-batch to fit; all, if it does not fit even so."""
    return _first(lambda count: _has_room(predictor, rows, length, count), predictor.arch.layers)


def _has_room(predictor: Predictor, rows: int, length: int, count: int) -> bool:
    """Whether a micro-batch fits with room to spare if `count` layers recompute."""
    changed = predictor.recomputing(count)
    needed_bytes = (1 + SPARE_SHARE) * changed.predict(rows, length).device_bytes
    return needed_bytes <= predictor.capacity_bytes and changed.host_fits(rows, length)


def _first(holds: Callable[[int], bool], last: int) -> int:
    """The smallest number from 0 to `last` that `holds`, if all above it do; `last` is not asked."""
    if holds(0):
        return 0
    low, high = 1, last
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
