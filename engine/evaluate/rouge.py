"""ROUGE-1, ROUGE-2 and ROUGE-L as F1, equal to the package rouge_score 0.1.2 without its stemmer.

Words are runs of the letters a to z and digits, in lower case: other letters are lost, as in that package.

Source: Lin 2004, "ROUGE: a package for automatic evaluation of summaries". Try: `tunedeck eval last`, with rouge in
evaluate.metrics.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

WORD = re.compile(r"[a-z0-9]+")

MOST_LOST = 0.2
"""Share of a reference's letters from which on ROUGE says little about it."""


def rouge(answer: str, reference: str) -> dict[str, float]:
    """Return "rouge1", "rouge2" and "rougeL": F1 of an answer against its reference, from 0 to 1."""
    answered, wanted = WORD.findall(answer.lower()), WORD.findall(reference.lower())
    return {
        "rouge1": _of_runs(answered, wanted, 1),
        "rouge2": _of_runs(answered, wanted, 2),
        "rougeL": _f1(_longest_common(answered, wanted), len(answered), len(wanted)),
    }


def lost_letters(texts: Sequence[str]) -> float:
    """The share (0 to 1) of the letters and digits of `texts` that ROUGE ignores, because it knows only a to z and 0 to
    9."""
    letters = sum(character.isalnum() for text in texts for character in text)
    seen = sum(len(word) for text in texts for word in WORD.findall(text.lower()))
    return 1.0 - min(seen, letters) / letters if letters else 0.0


def _of_runs(answered: list[str], wanted: list[str], length: int) -> float:
    """ROUGE-N as F1: the n-grams, of `length` words each, that the two lists of words have in common."""
    mine, theirs = (
        Counter(tuple(words[place : place + length]) for place in range(len(words) - length + 1))
        for words in (answered, wanted)
    )
    return _f1((mine & theirs).total(), mine.total(), theirs.total())


def _f1(shared: int, answered: int, wanted: int) -> float:
    if not shared:
        return 0.0
    precision, recall = shared / answered, shared / wanted
    return 2 * precision * recall / (precision + recall)


def _longest_common(one: list[str], other: list[str]) -> int:
    """Length in words of the longest common subsequence."""
    above = [0] * (len(other) + 1)
    for word in one:
        row = [0]
        for place, theirs in enumerate(other):
            row.append(above[place] + 1 if word == theirs else max(row[place], above[place + 1]))
        above = row
    return above[-1]
