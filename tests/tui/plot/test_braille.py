"""Curves drawn as text, in braille and in ASCII."""

from __future__ import annotations

import pytest

from tui.plot.braille import PlotCurve, YRange, draw_curves, fit_y_range, plot_lines, ticks, x_axis_line
from tui.plot.series import PlotColumn


def flat(*values: float | None) -> list[PlotColumn | None]:
    return [None if value is None else PlotColumn(value, value, value) for value in values]


def drawn(trace: PlotCurve, width: int, height: int, frame: YRange, *, ascii_only: bool = True) -> list[str]:
    cells = draw_curves([trace], width, height, frame, ascii_only=ascii_only)
    return ["".join(cell.letter for cell in row) for row in cells]


def test_a_falling_curve_falls() -> None:
    trace = PlotCurve(flat(3, 3, 2, 2, 1, 1), "x")
    assert drawn(trace, 3, 3, YRange(1, 3)) == ["** ", " **", "  *"]


def test_a_gap_between_two_points_is_drawn_through() -> None:
    trace = PlotCurve(flat(1, None, None, None, None, 1), "x")
    assert drawn(trace, 3, 1, YRange(0, 2)) == ["***"]


def test_the_band_reaches_from_the_least_to_the_greatest() -> None:
    trace = PlotCurve([PlotColumn(2, 1, 3)] * 2, "line", band="band")
    cells = draw_curves([trace], 1, 5, YRange(1, 3), ascii_only=True)
    assert [row[0].style for row in cells] == ["band", "band", "line", "band", "band"]


def test_without_ascii_the_cells_are_braille() -> None:
    text = "".join(drawn(PlotCurve(flat(1, 2, 3, 4), "x"), 2, 2, YRange(1, 4), ascii_only=False))
    assert all(letter == " " or 0x2800 <= ord(letter) <= 0x28FF for letter in text)
    assert text.strip()


def test_one_bad_step_does_not_press_the_curve_flat() -> None:
    columns = [PlotColumn(1.0, 0.9, 1.1)] * 20 + [PlotColumn(2.0, 1.0, 5000.0)]
    frame = fit_y_range([PlotCurve(columns, "x", band="y")])
    assert frame is not None
    assert frame.high < 3


def test_a_log_axis_leaves_out_what_it_cannot_show() -> None:
    assert fit_y_range([PlotCurve(flat(0.0, -1.0), "x")], log=True) is None
    frame = fit_y_range([PlotCurve(flat(0.0, 0.01, 10.0), "x")], log=True)
    assert frame is not None
    assert 0 < frame.low < 0.01


def test_labels_are_round_numbers_in_their_place() -> None:
    assert set(ticks(YRange(0, 4.2), 9).values()) == {"0", "2", "4"}
    assert list(ticks(YRange(0.001, 1000, log=True), 24).values()) == [f"{10.0**e:.4g}" for e in range(-3, 4)]


def test_a_constant_curve_has_a_frame_around_it() -> None:
    frame = fit_y_range([PlotCurve(flat(2.0, 2.0), "x")])
    assert frame is not None
    assert frame.low < 2.0 < frame.high


def test_labels_that_would_overlap_are_left_out() -> None:
    assert x_axis_line(["1", "500,000", "1,000,000"], 40).plain.split() == ["1", "500,000", "1,000,000"]
    assert x_axis_line(["1", "500,000", "1,000,000"], 16).plain.split() == ["1", "1,000,000"]


def test_an_axis_of_one_step_has_one_label() -> None:
    assert x_axis_line(["1", "1", "1"], 40).plain.split() == ["1"]
    assert x_axis_line(["1", "2", "2"], 40).plain.split() == ["1", "2"]


def test_every_line_is_as_wide_as_the_plot() -> None:
    cells = draw_curves([PlotCurve(flat(1, 2), "x")], 10, 4, YRange(1, 2), ascii_only=False)
    assert {line.cell_length for line in plot_lines(cells, {0: "2"})} == {18}


@pytest.mark.parametrize("height", [5, 14, 15, 16, 30])
def test_a_label_stands_in_the_row_of_the_dots_of_its_value(height: int) -> None:
    """Regression: a curve that ended at 0 was drawn in the row below the label 0."""
    frame = fit_y_range([PlotCurve(flat(5.6, 0.0), "x")])
    assert frame is not None
    for row, text in ticks(frame, height).items():
        lines = drawn(PlotCurve(flat(float(text), float(text)), "x"), 1, height, frame)
        assert lines.index("*") == row
