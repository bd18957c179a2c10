"""Random pairs of answers and references, and the F1 that scikit-learn computes for them. Not a test module.

The values are recorded, in scikit_learn_f1.json: where scikit-learn is installed, its scipy is too, and then
transformers imports scipy.optimize in every process, 0.3 s of each of the hundreds of engines that the tests start.

Try, where scikit-learn is installed: `python -m tests.evaluate.scikit_learn_f1` writes the file again.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from importlib import import_module
from pathlib import Path

RECORDED = Path(__file__).with_suffix(".json")
PAIRS = 2000
WORDS = ["the", "cat", "cat,", "sat", "on", "Mat", "née", "( w / want-01 )", "3.5"]
LABELS = ["yes", "no", "maybe", "unclear"]


def drawn_texts() -> list[tuple[str, str]]:
    """Pairs of an answer and a reference of up to 12 words; either may be empty, but not both."""
    drawn = random.Random(3)
    pairs = [(" ".join(drawn.choices(WORDS, k=drawn.randint(0, 12))),
              " ".join(drawn.choices(WORDS, k=drawn.randint(1, 12)))) for _ in range(PAIRS)]  # fmt: skip
    return [pair if drawn.random() < 0.5 else pair[::-1] for pair in pairs]


def drawn_labels() -> list[tuple[list[str], list[str]]]:
    """Pairs of up to 20 answers and as many references, which are labels; some answers are no reference's label."""
    drawn = random.Random(4)
    counts = [drawn.randint(1, 20) for _ in range(PAIRS)]
    return [(drawn.choices([*LABELS, "I do not know"], k=count), drawn.choices(LABELS, k=count)) for count in counts]


def of_words(answer: str, reference: str) -> float:
    """scikit-learn's F1 of an answer's words, each word counted as often as it occurs."""
    given, wanted = Counter(answer.split()), Counter(reference.split())
    places = [(word, place) for word, count in (given | wanted).items() for place in range(count)]
    score = import_module("sklearn.metrics").f1_score
    found = score(*([place < words[word] for word, place in places] for words in (wanted, given)), zero_division=0)
    return float(found)


def of_labels(answers: list[str], references: list[str]) -> list[float]:
    """scikit-learn's macro precision, recall and F1 over the references' labels."""
    score = import_module("sklearn.metrics").precision_recall_fscore_support
    labels = sorted(set(references))
    return [float(value) for value in score(references, answers, labels=labels, average="macro", zero_division=0)[:3]]


def main() -> None:
    """Write the file with the values of all pairs, rounded to 1e-6."""
    found = {
        "version": import_module("sklearn").__version__,
        "token_f1": [round(of_words(*pair), 6) for pair in drawn_texts()],
        "labels": [[round(value, 6) for value in of_labels(*pair)] for pair in drawn_labels()],
    }
    RECORDED.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
