"""Single answers that are desirable or not, for KTO: the rows that hold them, and the mismatched sequences from which
the divergence of policy and reference is estimated."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config.schema.recipe import Recipe
from engine.data.conversations import parsed
from engine.data.order import SampleOrder
from engine.data.records import Dropped
from engine.data.tokens import IGNORED, Example, TokenData
from engine.errors import DataError

NEEDS = (("completion", "label"), ("messages", "label"), ("conversations", "label"))
"""Columns of such rows, of which a source has one set."""

WORDS = {"true": True, "1": True, "false": False, "0": False}


def desirable_of(label: Any) -> bool | Dropped:
    """true and false, 1 and 0, or these as text."""
    if label is None:
        return Dropped("label is missing")
    found = WORDS.get(f"{label:g}" if isinstance(label, float) else str(label).strip().lower())
    return found if found is not None else Dropped("label is neither true nor false")


def answer_of(values: dict[str, Any]) -> dict[str, Any] | Dropped:
    """`values` with a prompt and a completion: of a conversation, its last turn is the completion."""
    turns = values.get("messages", values.get("conversations"))
    if values.get("prompt") is None and isinstance(values.get("completion"), list):
        turns = values["completion"]
    if turns is None:
        return values
    turns = parsed(turns) if isinstance(turns, str) else turns
    if isinstance(turns, Dropped):
        return turns
    if not isinstance(turns, list) or len(turns) < 2:
        return Dropped("the conversation has no prompt and answer")
    return {**values, "prompt": turns[:-1], "completion": turns[-1:]}


def first_partners(weights: NDArray[np.float64], *, seed: int, shuffle: bool, batch_size: int) -> NDArray[np.int64]:
    """For each sample the one whose answer it is mismatched with, int64[samples]: within each step of the first epoch,
    that of the sample before it, and for the first sample that of the last (as TRL's KTOTrainer within its batches).
    Pairs stay the same in later epochs, so that the reference's log-probabilities can be computed once."""
    drawn = SampleOrder(weights, seed=seed, shuffle=shuffle, batch_size=batch_size).epoch(0)
    order = list(dict.fromkeys([*drawn.tolist(), *range(len(weights))]))
    starts = list(range(0, len(order), batch_size))
    if len(starts) > 1 and len(order) - starts[-1] == 1:
        starts.pop()  # a sample alone would be matched with its own answer
    partners = np.empty(len(order), np.int64)
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        partners[order[start:stop]] = np.roll(order[start:stop], 1)
    return partners


class MismatchedData(TokenData):
    """Row i is the prompt of row i of `data`, and the answer of row `partners[i]`, cut to `max_length` tokens."""

    def __init__(self, data: TokenData, partners: NDArray[np.int64], max_length: int) -> None:
        """Raises DataError for a single sample."""
        if len(data) < 2:
            raise DataError(
                "KTO estimates how far the model is from its reference from prompts with the answers of other samples, "
                f"and of {data.source_names[0] if data.source_names else 'the data'} one sample is left",
                expected="two samples or more, in the training and in the held-out data",
            )
        super().__init__(
            data.columns,
            data.documents,
            source_names=data.source_names,
            source_fingerprints=data.source_fingerprints,
            images=data.pixels,  # those of the prompts: answers have none
        )
        self.partners = partners
        own = self.lengths
        self.answer_starts = np.fromiter((self._first_target(row) for row in range(len(own))), np.int32, len(own))
        """The number of tokens of each row's own prompt."""
        whole = self.answer_starts + (own - self.answer_starts)[partners]
        self.lengths = np.minimum(whole, max_length).astype(np.int32)
        self.target_counts = self.target_counts[partners]
        for row in np.flatnonzero(whole > max_length):
            self.target_counts[row] = np.count_nonzero(self[int(row)].labels != IGNORED)

    def __getitem__(self, row: int) -> Example:
        prompt, _ = self._document(int(self.documents[row]))
        partner = int(self.partners[row])
        ids, targets = self._document(int(self.documents[partner]))
        start, answer = int(self.answer_starts[row]), int(self.answer_starts[partner])
        cut = slice(int(self.lengths[row]))
        found = np.concatenate([prompt[:start], ids[answer:]])[cut]
        learned = np.concatenate([np.zeros(start, np.bool_), targets[answer:]])[cut]
        return Example(found, np.where(learned, found, np.int32(IGNORED)), None)

    def _first_target(self, row: int) -> int:
        _, targets = self._document(int(self.documents[row]))
        return int(targets.argmax())


def add_mismatched(data: TokenData, recipe: Recipe, *, in_steps: bool) -> None:
    """For KTO, set `data.mismatched`: with answers of the same step of the first epoch, or of all of `data`. Raises
    DataError for a single sample."""
    if not recipe.learns_preferences or recipe.learns_pairs:
        return
    shuffle, batch = recipe.data.shuffle and in_steps, recipe.train.batch_size if in_steps else len(data)
    partners = first_partners(data.weights, seed=recipe.train.seed, shuffle=shuffle, batch_size=batch)
    data.mismatched = MismatchedData(data, partners, recipe.data.max_length)


FEWEST, MOST = 1.0, 4 / 3
"""Between which the weighted desirable answers should be for each weighted undesirable one (Ethayarajh et al. 2024,
eq. 9)."""


def balance_notice(data: TokenData, recipe: Recipe) -> str | None:
    """What is said of labels that are unevenly weighted; None if they are not, or no labels are learned."""
    if data.mismatched is None:
        return None
    asked, good = recipe.preference, int(data.desirable.sum())
    bad = len(data) - good
    found = f"{good:,} answers are desirable and {bad:,} undesirable"
    if not good or not bad:
        return f"{found}: KTO learns from answers of both kinds"
    ratio = asked.desirable_weight * good / (asked.undesirable_weight * bad)
    if FEWEST <= ratio <= MOST:
        return None
    low, high = (bad * asked.undesirable_weight * bound / good for bound in (FEWEST, MOST))
    change = f"preference.desirable_weight between {low:.3g} and {high:.3g}"
    if ratio > MOST:
        low, high = (good * asked.desirable_weight / (bound * bad) for bound in (MOST, FEWEST))
        change = f"preference.undesirable_weight between {low:.3g} and {high:.3g}"
    return f"{found}, weighted {ratio:.3g} to 1, where 1 to {MOST:.3g} is advised: set {change}"
