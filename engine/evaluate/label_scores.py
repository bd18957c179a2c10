"""Scores of answers that are labels: accuracy, and precision, recall and F1 of each class.

An answer is right if it is the reference's text, white space around both trimmed. Classes are the references' labels;
an answer that is none of them counts as wrong and as no class of its own.

Try: `tunedeck eval last`, with accuracy in evaluate.metrics
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

ACCURACY = "accuracy"
"""The name of this score in `evaluate.metrics`."""


def score_labels(
    answers: Sequence[str], references: Sequence[str]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return precision, recall, f1 and count (how many references have the label) of each class, in the order of the
    labels, and the means over classes: macro_precision, macro_recall, macro_f1.

    A precision or recall without a single case is 0, as in scikit-learn with `zero_division=0`.
    """
    given, wanted = Counter(answers), Counter(references)
    right = Counter(one for one, other in zip(answers, references, strict=True) if one == other)
    classes = {}
    for label in sorted(wanted):
        precision = right[label] / given[label] if given[label] else 0.0
        recall = right[label] / wanted[label]
        f1 = 2 * right[label] / (given[label] + wanted[label])
        classes[label] = {"precision": precision, "recall": recall, "f1": f1, "count": float(wanted[label])}
    means = {f"macro_{name}": sum(row[name] for row in classes.values()) / max(1, len(classes))
             for name in ("precision", "recall", "f1")}  # fmt: skip
    return classes, means
