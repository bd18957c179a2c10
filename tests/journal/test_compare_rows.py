"""The rows of a comparison: settings that differ first, then scores, then what training cost; in words, with units."""

from __future__ import annotations

from engine.journal.compare import Comparison, comparison_rows, format_cell, format_setting, score_label
from engine.journal.score_groups import ScoreGroup

GROUP = ScoreGroup(
    data="x", count=500, sources=["dates"], steps=[1200, None],
    metrics={"exact_match": [0.996, None], "loss": [0.1, None]},
    best={}, checkpoints=[{0: {"exact_match": 0.0}, 1200: {"exact_match": 0.996}}, {}],
)  # fmt: skip
FOUND = Comparison(
    runs=["a", "b"], statuses=["done", "done"],
    scores={"best_loss": [0.25, 0.5], "loss": [0.3, 0.5], "train_loss": [0.2, None], "seconds": [3700.0, 65.0],
            "peak_bytes": [6 << 20, 20 << 30], "step": [10, 10]},
    settings={"train.learning_rate": [1e-05, 0.001], "train.seed": [123456, None]},
    best={"best_loss": ["a"]}, warnings=[], groups=[GROUP],
)  # fmt: skip


def test_settings_come_first_then_scores_then_the_figures_of_training() -> None:
    rows = [(row.label, [*row.cells]) for row in comparison_rows(FOUND)]
    assert rows == [
        ("settings that differ", []),
        ("train.learning_rate", ["1e-05", "0.001"]),
        ("train.seed", ["123456", "-"]),
        ("scored on dates (500 samples)", []),
        ("checkpoint", ["step 1,200", "-"]),
        ("exact match", ["99.6 %", "-"]),
        ("loss", ["0.1", "-"]),
        ("evaluation while training", []),
        ("best evaluation loss", ["0.25", "0.5"]),
        ("evaluation loss", ["0.3", "0.5"]),
        ("training", []),
        ("training loss", ["0.2", "-"]),
        ("total time of all starts", ["1:01:40", "1:05"]),
        ("peak memory", ["6 MiB", "20.0 GiB"]),
        ("steps", ["10", "10"]),
    ]
    assert [row.best for row in comparison_rows(FOUND) if row.best] == [[True, False]]


def test_a_metric_of_each_checkpoint_follows_its_samples() -> None:
    labels = [(row.label, [*row.cells]) for row in comparison_rows(FOUND, "exact_match")]
    assert labels[7:9] == [("exact match, base", ["0.0 %", "-"]), ("exact match, step 1,200", ["99.6 %", "-"])]


def test_words_and_values() -> None:
    assert [score_label(key) for key in ("backoffs", "best_exact_match", "mean_iou")] == [
        "out-of-memory events", "best exact match", "mean iou",
    ]  # fmt: skip
    assert (format_cell("mean_iou", 0.5), format_cell("loss", None)) == ("0.5", "-")
    assert (format_cell("tokens_per_second", 5073.4), format_cell("tokens_per_second", 17.25)) == ("5,073", "17.25")
    assert [format_setting(value) for value in ("auto", None, True, [1, 2])] == ["auto", "-", "true", "[1, 2]"]
