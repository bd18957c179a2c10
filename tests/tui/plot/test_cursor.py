"""The cursor of a plot, the points as text, and the picture: what is read off is what is in the series."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tui.files.new_file import write_new
from tui.plot.braille import PlotCurve, YRange, draw_curves
from tui.plot.cursor import PlotCursor, XScale, value_text, where_text
from tui.plot.loss_plot import PlotOptions
from tui.plot.points_text import points_text
from tui.plot.series import BoundedSeries, PlotColumn, Reading
from tui.plot.svg import PlotRange, SvgCurve, svg_plot


def series_of(steps: range, limit: int = 4096) -> BoundedSeries:
    series = BoundedSeries(limit)
    series.extend(steps, [1000.0 - step for step in steps])
    return series


def place(cursor: PlotCursor, scale: XScale, series: BoundedSeries) -> Reading:
    (reading,) = cursor.readings(scale, [series])
    assert reading is not None
    return reading


def test_the_cursor_begins_at_the_newest_point_and_goes_through_each_step_of_a_short_run() -> None:
    series, scale, cursor = series_of(range(1, 31)), XScale(1, 30, 70), PlotCursor()
    assert cursor.readings(scale, [series]) == [None]
    seen = []
    for _ in range(31):
        cursor.move(-1, scale, [series])
        seen.append(where_text("steps", place(cursor, scale, series)))
    assert seen == [f"step {step}" for step in range(30, 0, -1)] + ["step 1"]
    cursor.move(10**6, scale, [series])
    assert value_text(place(cursor, scale, series)) == "970"


def test_of_a_long_run_a_cell_gives_mean_least_and_greatest() -> None:
    series, scale, cursor = series_of(range(1, 1001)), XScale(1, 1000, 100), PlotCursor()
    for _ in range(2):
        cursor.move(-1, scale, [series])
    reading = place(cursor, scale, series)
    assert where_text("steps", reading) == "steps 981 to 990"
    assert value_text(reading) == "14.5 (10 to 19)"


def test_a_cell_between_the_points_of_a_curve_is_skipped_and_other_curves_may_have_none_there() -> None:
    some, other, scale, cursor = BoundedSeries(), BoundedSeries(), XScale(0, 100, 50), PlotCursor()
    some.extend([0, 100], [1.0, 2.0])
    other.extend([40], [3.0])
    found = []
    for _ in range(3):
        cursor.move(-1, scale, [some, other])
        found.append([reading and reading.mean for reading in cursor.readings(scale, [some, other])])
    assert found == [[2.0, None], [None, 3.0], [1.0, None]]


def test_the_cursor_stays_at_its_step_while_the_run_goes_on() -> None:
    series, cursor = series_of(range(1, 31)), PlotCursor()
    for _ in range(10):
        cursor.move(-1, XScale(1, 30, 70), [series])
    for end in range(31, 200):
        series.extend([end], [0.0])
        reading = place(cursor, XScale(1, end, 70), series)
        assert reading.first <= 21 <= reading.last


def test_points_are_copied_with_tabs_each_once() -> None:
    series = series_of(range(1, 4))
    text = points_text("steps", ["loss"], [series], XScale(1, 3, 40))
    assert text.splitlines() == ["steps\tloss\tleast\tgreatest", *(f"{n}\t{v}\t{v}\t{v}" for n, v in
                                 ((1, 999), (2, 998), (3, 997)))]  # fmt: skip
    two = points_text("steps", ["a", "b"], [series, BoundedSeries()], XScale(1, 3, 40))
    assert two.splitlines()[:2] == ["steps\ta\tb", "1\t999\t"]


def test_the_picture_is_xml_with_a_line_and_a_name_for_each_run() -> None:
    curves = [SvgCurve("<a> & b", series_of(range(1, 50))), SvgCurve("empty", BoundedSeries())]
    for log in (False, True):
        root = ElementTree.fromstring(svg_plot("loss", "steps", curves, PlotRange(1, 49), log=log, smooth=True))
        lines = [each.attrib["points"] for each in root.iter("{http://www.w3.org/2000/svg}polyline")]
        assert len(lines) == 2
        assert len(lines[0].split()) > 40
        assert "<a> & b" in "".join(root.itertext())


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    names = [write_new(tmp_path, "plot-loss", ".svg", str(number)).name for number in range(3)]
    assert names == ["plot-loss.svg", "plot-loss-2.svg", "plot-loss-3.svg"]
    assert (tmp_path / "plot-loss.svg").read_text() == "0"
    with pytest.raises(OSError, match="No such file"):
        write_new(tmp_path / "nowhere", "plot", ".svg", "")


def test_a_thick_line_has_two_dots_a_column_where_a_thin_one_has_one() -> None:
    columns = [PlotColumn(level, level, level) for level in (0.0, 0.0, 1.0, 1.0)]
    thin, thick = (
        draw_curves([PlotCurve(columns, "x", thick=thick)], 2, 2, YRange(0.0, 1.0), ascii_only=False)
        for thick in (False, True)
    )
    assert thin[1][0].letter == "⣀"
    assert thick[1][0].letter == "⣤"


def test_the_key_for_the_line_goes_from_plain_to_smoothed_to_thick_and_back() -> None:
    options, words = PlotOptions(), []
    for _ in range(3):
        options = options.next_line()
        words.append(options.words)
    assert words == [["smoothed"], ["thick"], []]
