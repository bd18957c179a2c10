"""The memory bar of Launch and Run: one scale, the limit, what goes beyond it, and what carries it without colours."""

from __future__ import annotations

import pytest

from tui.widgets.memory_bar import (
    HELD,
    LABEL_WIDTH,
    Look,
    bar_cells,
    bar_line,
    held_bar,
    legend_lines,
    predicted_bar,
    scale_line,
)
from tui.widgets.memory_phases import PlannedMemory, phase_lines, phase_table
from tui.widgets.memory_words import moves_sentence, peak_sentence

GIB = 2**30
LETTERS = Look(letters=True)
SMALL = {"weights": 3 * GIB, "activations": 5 * GIB}
LARGE = {"weights": 3 * GIB, "activations": 40 * GIB, "a new one": 2 * GIB}


@pytest.mark.parametrize("width", [40, 58, 80, 120, 200])
def test_the_limit_stands_in_the_same_place_whatever_is_drawn(width: int) -> None:
    bars = [predicted_bar("predicted", SMALL, 16 * GIB), predicted_bar("as written", LARGE, 16 * GIB)]
    lines = [bar_line(bar, width, LETTERS).plain for bar in [*bars, held_bar("measured", 1, 2, 3, 16 * GIB)]]
    assert {line.index("┃") for line in lines} == {LABEL_WIDTH + bar_cells(width)[0]}
    assert scale_line(16 * GIB, width, "").plain.index("16 GiB") == lines[0].index("┃")


def test_what_goes_beyond_is_hatched_and_cut_where_there_is_no_room() -> None:
    slightly = bar_line(predicted_bar("", {"weights": 17 * GIB}, 16 * GIB), 100, LETTERS).plain
    far = bar_line(predicted_bar("", LARGE, 16 * GIB), 100, LETTERS).plain
    assert "w┃╱╱╱╱ 17.00 GiB, 106 %" in slightly
    assert far.endswith("▶ 45.00 GiB, 281 %") and len(far) <= 100
    assert "╱" not in bar_line(predicted_bar("", SMALL, 16 * GIB), 100, LETTERS).plain


def test_without_colours_letters_and_patterns_tell_the_parts_apart() -> None:
    bar = bar_line(predicted_bar("", SMALL, 16 * GIB), 100, Look(letters=True, ascii_only=True)).plain
    assert set(bar[LABEL_WIDTH : bar.index("|")]) == {"w", "a", "-"}
    held = held_bar("", 2 * GIB, 8 * GIB, 12 * GIB, 16 * GIB)
    assert set(HELD.values()) <= set(bar_line(held, 100, LETTERS).plain)
    assert bar_line(held, 100, Look(ascii_only=True)).plain.isascii()
    assert "reserved by torch 4.00 GiB" in legend_lines(held, 100, 2, LETTERS)[-1].plain


def test_the_smallest_parts_leave_the_legend_first() -> None:
    (line,) = legend_lines(predicted_bar("", {**SMALL, "loss": 5 << 20}, 16 * GIB), 50, 1, LETTERS)
    assert "activations 5.00 GiB" in line.plain and "loss" not in line.plain


def test_words_say_where_the_peak_lies_and_what_lowers_its_largest_part() -> None:
    assert peak_sentence("layer_first", SMALL) == "the peak is in the backward pass; largest part: activations, 62 %"
    assert moves_sentence("layer_first", SMALL).endswith(
        "gradient checkpointing, or offloading activations to the host"
    )
    assert peak_sentence("forward", {"context": GIB}) == moves_sentence("forward", {"context": GIB}) == ""


def test_gradient_checkpointing_is_not_named_where_nothing_is_kept_for_a_backward_pass() -> None:
    assert "generate.max_new_tokens" in moves_sentence("generate", SMALL)
    for phase in ("evaluate", "generate"):
        assert "checkpointing" not in moves_sentence(phase, SMALL)
    assert "sharding" in moves_sentence("generate", {"weights": GIB})


def test_every_phase_has_its_bar_and_its_row() -> None:
    phases = {"load": {"weights": 3 * GIB}, "forward": SMALL, "a new phase": {"weights": GIB}}
    lines = phase_lines(PlannedMemory("a run", "as written", phases, SMALL, "forward", 16 * GIB), 80, LETTERS)
    text = "\n".join(line.plain for line in lines)
    assert "loading: weights are loaded" in text and text.count("┃") == len(phases)
    assert "forward pass 3.00 5.00 8.00 the peak" in " ".join(text.split())
    assert max(line.cell_length for line in lines) <= 90


@pytest.mark.parametrize("width", [78, 118])
def test_headings_of_the_table_of_phases_are_abbreviated_with_a_mark(width: int) -> None:
    names = ("weights", "gradients", "optimizer", "activations", "loss", "buffers")
    phases = {"backward": dict.fromkeys(names, GIB)}
    head = next(line for line in phase_table(PlannedMemory("", "", phases, {}, "backward", 16 * GIB), width))
    words = head.plain.split()[1:]
    assert [word.rstrip(".") for word in words if not word.endswith(".")] == [
        w for w in words if w in {*names, "total"}
    ]
    assert all(name.startswith(word.rstrip(".")) for name, word in zip((*names, "total"), words, strict=True))
