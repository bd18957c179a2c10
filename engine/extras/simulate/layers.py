"""The layers of a model's decoder, of which some stand for others: of layers that are alike, one is simulated, or two,
and what is recorded of it stands for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from engine.extras.simulate.recorders import EMBEDDING, LOSS, Segment, decoder_layers

NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "idx")
"""Attributes in which a layer keeps its own number."""


class StackError(Exception):
    """Raised if what the layers that are run record does not add up to what all layers hold."""


STRANGE_ERRORS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError)
"""What a model whose layers were taken out may raise: its own code may count on all of them."""


class Held(NamedTuple):
    """What all layers hold between two passes beyond those that are run, in bytes: everything, and gradients."""

    level: int
    gradients: int


class LayerStack:
    """The decoder layers of a model, of which some stand for others: all of them, until `choose` is called."""

    def __init__(self, base: PreTrainedModel) -> None:
        self._layers, self._text = decoder_layers(base), base.config.get_text_config()
        self._every = list(self._layers)
        self._stands_for = list(range(len(self._every)))
        """By layer, the number of the one that is run in its place."""
        self.left_out: dict[int, int] = {}
        """How many layers are left out, by the number of one of them that stands for those of its kind."""
        self.gradient_bytes = 0
        """What the gradients of everything that is trained take."""
        self.without_gradient: list[nn.Parameter] = []
        """What is trained and gets no gradient, such as an indexer's adapters: it only chooses tokens to attend to."""
        self.period = max(
            map(_chunk_of, {type(each): each for layer in self._every for each in layer.modules()}.values())
        )
        """To a multiple of how many tokens a kernel of the layers pads a sequence; 1 if none does."""

    def choose(self, of_each_kind: int = 1) -> None:
        """Leave out layers like another one: the first of a kind stands for them. The first and the last layer are run
        in any case: they free or keep tensors of the embedding and of the output head. With 2 `of_each_kind`, so is the
        last one of each kind: where layers share keys and values, the one that comes first in the backward pass makes
        the gradients to which the others add."""
        self._stands_for = list(range(len(self._every)))
        first: dict[tuple[Any, ...], int] = {}
        left_out: dict[int, list[int]] = {}
        last = {self._kind(number): number for number in range(1, len(self._every) - 1)} if of_each_kind > 1 else {}
        for number in range(1, len(self._every) - 1):
            kind = self._kind(number)
            self._stands_for[number] = chosen = number if last.get(kind) == number else first.setdefault(kind, number)
            if chosen != number:
                left_out.setdefault(chosen, []).append(number)
        self.left_out = {numbers[0]: len(numbers) for numbers in left_out.values()}

    def _kind(self, number: int) -> tuple[Any, ...]:
        return (*_outline(self._every[number]), *(str(values[number]) for values in self._by_layer().values()))

    @property
    def is_whole(self) -> bool:
        return not self.left_out

    def _by_layer(self) -> dict[str, list[Any]]:
        """The lists in the model's config that have an entry for each layer."""
        table = vars(self._text).items()
        return {key: value for key, value in table if isinstance(value, list) and len(value) == len(self._every)}

    @contextmanager
    def only_chosen(self, more: int | None = None) -> Iterator[None]:
        """Inside the block, the model has the layers that are run alone, and one more (`more`), numbered without
        gaps."""
        numbers = sorted({*self._stands_for, *([] if more is None else [more])})
        lists, renumbered = self._by_layer(), []
        for place, number in enumerate(numbers):
            for module in self._every[number].modules():
                renumbered += [(module, key, place, number) for key in NUMBERS if vars(module).get(key) == number]
        try:
            self._set([self._every[number] for number in numbers])
            for key, values in lists.items():
                setattr(self._text, key, [values[number] for number in numbers])
            for module, key, place, _ in renumbered:
                setattr(module, key, place)
            yield
        finally:
            self._set(self._every)
            for key, values in lists.items():
                setattr(self._text, key, values)
            for module, key, _, number in renumbered:
                setattr(module, key, number)

    def _set(self, layers: list[nn.Module]) -> None:
        del self._layers[:]
        self._layers.extend(layers)

    def find_without_gradient(self, trained: Iterable[tuple[str, nn.Parameter]]) -> None:
        """After a pass through the layers that are run, find `without_gradient`."""
        of_run = [dict(self._every[number].named_parameters()) for number in self._stands_for]
        self.without_gradient = [
            parameter
            for layer, run in zip(self._every, of_run, strict=True)
            for name, parameter in layer.named_parameters()
            if parameter.requires_grad and run[name].grad is None
        ]
        inside = {id(parameter) for layer in self._every for parameter in layer.parameters()}
        self.without_gradient += [each for _, each in trained if each.grad is None and id(each) not in inside]

    def spliced(self, found: list[Segment], more: Held, gradients_after: int) -> tuple[list[Segment], Held]:
        """Return what running all layers would have recorded, and what these hold afterwards. `found` was recorded of
        those that are run; `more` is what all layers held before.

        Raises StackError if something was allocated between two phases, or if layers ran in another order.
        """
        if self.is_whole:
            return found, Held(0, 0)
        if [each.phase for each in found] != _phases(found, sorted(set(self._stands_for))):
            raise StackError("the layers ran in a different order than in the model")
        if any(other.log[0] != sum(each.log) for each, other in pairwise(found)):
            raise StackError("something was allocated between two layers")
        ends = [*(each.gradient_bytes for each in found[1:]), gradients_after]
        recorded = {
            each.phase: (each.log[1:], end - each.gradient_bytes) for each, end in zip(found, ends, strict=True)
        }
        level, gradients = found[0].log[0] + more.level, found[0].gradient_bytes + more.gradients
        segments = []
        for phase in _phases(found, range(len(self._every))):
            changes, made_bytes = recorded[self._source(phase)]
            segments.append(Segment(phase, gradients, [level, *changes]))
            level, gradients = level + sum(changes), gradients + made_bytes
        return segments, Held(level - sum(found[-1].log), gradients - gradients_after)

    def _source(self, phase: str) -> str:
        """The phase whose record stands for `phase`."""
        kind, _, number = phase.partition(" ")
        return f"{kind} {self._stands_for[int(number)]}" if _of_layer(phase) else phase


def _chunk_of(module: nn.Module) -> int:
    """Tokens in a chunk, for a layer that works through a sequence in chunks: its own setting, or the default of a
    function that it calls; else 1."""
    forward = inspect.unwrap(type(module).forward)
    called = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    defaults = [inspect.signature(each).parameters.get("chunk_size") for each in called if inspect.isfunction(each)]
    sizes = [vars(module).get("chunk_size"), *(each.default for each in defaults if each is not None)]
    return max([size for size in sizes if isinstance(size, int)], default=1)


def _phases(found: list[Segment], numbers: Sequence[int]) -> list[str]:
    """The phases of a pass through the layers `numbers` of the decoder, of those kinds that are in `found`, and around
    them those of `found` itself."""
    names = [each.phase for each in found]
    first = names.index(LOSS)
    ahead = [name for name in names[:first] if not _of_layer(name)]
    behind = [name for name in names[first + 1 :] if not _of_layer(name)]
    backward = [f"backward {number}" for number in reversed(numbers)] if len(names) - first - 1 > len(behind) else []
    return [*ahead, *(f"forward {number}" for number in numbers), LOSS, *backward, *behind]


def _of_layer(phase: str) -> bool:
    """Whether a phase is that of one layer of the decoder."""
    return phase.startswith(("forward ", "backward ")) and phase != EMBEDDING


def _outline(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple for each module of a layer: its name, class, settings, and the shapes of its parameters and whether
    each is trained. Two layers are alike if they yield the same tuples."""
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str, bool, type(None))) and key not in NUMBERS
        }
        own = module.named_parameters(recurse=False)
        shapes = tuple((key, tuple(tensor.shape), tensor.requires_grad) for key, tensor in own)
        yield name, type(module).__name__, tuple(sorted(settings.items(), key=str)), shapes
