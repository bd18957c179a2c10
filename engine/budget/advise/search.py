"""Searches the sets of levers with which a run fits, cheapest first.

A best-first search. A partial set decides for each lever, the most expensive first, whether the lever is included; the
cheapest partial set is extended next. A partial set is dropped if the run does not fit even with the strongest of all
undecided levers. So sets are found in the order of their cost: those with the fewest changes of what is learned first,
and at equal cost those with fewer levers.

Try: `tunedeck fit -p 24gb -r full --set model.id=Qwen/Qwen2.5-7B`
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count, product

from engine.budget.advise.changes import breaks_a_rule, with_changes
from engine.budget.advise.levers import Lever
from engine.budget.architecture.lookup import find_architecture
from engine.budget.predict.prediction import Predictor
from engine.spec.schema.run import RunSpec

Levers = tuple[Lever, ...]

DOUBTFUL_KEYS = (
    ("train.optimizer", "train.state_dtype"), ("train.optimizer_offload",), ("train.activation_offload",),
    ("parallel.sequence",), ("parallel.strategy",), ("method.adapter_dtype",), ("model.quantize",),
)  # fmt: skip
"""Groups of keys whose strongest lever may be refused together with other levers, or needs more memory in some phase.
When a partial set is completed with the strongest undecided levers, it is tried with and without each of them."""
MOST_TRIED = 20_000
"""The largest number of partial sets that are examined."""


class Trial:
    """Tells whether a run fits with a set of levers; remembers the answer for each set."""

    def __init__(self, spec: RunSpec, longest: int | None) -> None:
        self._spec, self._longest = spec, longest
        self._known: dict[frozenset[Lever], bool] = {}

    def fits(self, chosen: Levers) -> bool:
        """Whether the rules allow these levers together, and with them one sequence fits on device and host (or
        train.micro_batch sequences, if that is a number)."""
        key = frozenset(chosen)
        if key not in self._known:
            self._known[key] = self._fits(chosen)
        return self._known[key]

    def _fits(self, chosen: Levers) -> bool:
        spec = with_changes(self._spec, {key: value for lever in chosen for key, value in lever.changes})
        if breaks_a_rule(spec):
            return False
        predictor, asked = Predictor(find_architecture(spec), spec), spec.recipe.train.micro_batch
        length = min(self._longest or spec.recipe.data.max_length, spec.recipe.data.max_length)
        rows = (predictor.batch, 1) if asked == "auto" else (min(asked, predictor.batch),)
        return any(predictor.fits(each, length) and predictor.host_fits(each, length) for each in rows)


def fitting_sets(levers: Sequence[Lever], trial: Trial, offered: Callable[[Levers], bool]) -> Iterator[Levers]:
    """Yield the sets of levers with which the run fits by `trial` and for which `offered` returns True, in the order of
    their cost. Sets that contain a set yielded before are left out."""
    dearest_first = sorted(levers, key=lambda lever: -lever.cost)
    order, found = count(), list[frozenset[Lever]]()
    waiting: list[tuple[float, int, int, int, Levers]] = []
    if _can_fit((), dearest_first, trial):
        waiting.append((0.0, 0, next(order), 0, ()))
    for _ in range(MOST_TRIED):
        if not waiting:
            return
        cost, size, _, decided, chosen = heapq.heappop(waiting)
        if any(earlier <= set(chosen) for earlier in found):
            continue
        if decided == len(dearest_first):
            if chosen and trial.fits(chosen) and offered(chosen):
                found.append(frozenset(chosen))
                yield chosen
            continue
        lever, rest = dearest_first[decided], dearest_first[decided + 1 :]
        if _can_fit(chosen, rest, trial):
            heapq.heappush(waiting, (cost, size, next(order), decided + 1, chosen))
        if not any(lever.keys & other.keys for other in chosen):
            heapq.heappush(waiting, (cost + lever.cost, size + 1, next(order), decided + 1, (*chosen, lever)))


def _can_fit(chosen: Levers, undecided: Sequence[Lever], trial: Trial) -> bool:
    """Whether the run fits with the chosen levers plus, for each key, the undecided lever that saves most memory."""
    strongest: dict[frozenset[str], Lever] = {}
    for lever in sorted(undecided, key=lambda lever: lever.cost):
        if not any(lever.keys & other.keys for other in chosen):
            strongest[lever.keys] = lever
    options: list[list[Lever | None]] = [
        [*(lever for keys, lever in strongest.items() if keys & set(group)), None] for group in DOUBTFUL_KEYS
    ]
    sure = [lever for keys, lever in strongest.items() if not any(keys & set(group) for group in DOUBTFUL_KEYS)]
    return any(
        trial.fits((*chosen, *sure, *[lever for lever in picked if lever is not None])) for picked in product(*options)
    )
