"""Graphs of the GPUs: bounded history, one line a card where there is little room, taller ones where there is more."""

from __future__ import annotations

from typing import Any

from tui.run.gpus import HISTORY, GpuHistory, bar_graph, gpu_lines


def reading(index: int, second: int, **other: Any) -> dict[str, Any]:
    values = {"used_bytes": 70 << 30, "utilisation_percent": 50, "temperature_celsius": 61, "power_watts": 300.0}
    time = f"2026-01-01T00:{second // 60:02}:{second % 60:02}Z"
    return {"kind": "gpu", "index": index, "time": time, "total_bytes": 140 << 30, **values, **other}


def history(cards: int, readings: int = 3) -> GpuHistory:
    found = GpuHistory()
    for number in range(readings):
        for card in range(cards):
            found.add(reading(card, 10 * number))
    return found


def plain(found: GpuHistory, width: int, height: int, **other: Any) -> list[str]:
    return [line.plain for line in gpu_lines(found, width, height, str, ascii_only=False, **other)]


def test_a_card_has_a_line_of_values_and_graphs_under_a_heading_with_scales_and_time() -> None:
    heading, line = plain(history(1, 13), 120, 2)
    assert heading.split()[:6] == ["gpus", "2", "min", "use", "to", "100"]
    assert "memory to 140.0 GiB" in heading
    assert all(text in line for text in ("GPU 0", "50 % ", "70.0 GiB", "61 °C", "300 W", "▄▄▄"))


def test_at_80_columns_all_four_values_and_graphs_fit() -> None:
    lines = plain(history(2), 80, 3)
    assert max(map(len, lines)) <= 80
    assert [line[:6] for line in lines[1:]] == [" GPU 0", " GPU 1"]
    assert all(text in lines[1] for text in ("50 %", "70.0 GiB", "61 °C", "300 W"))


def test_more_room_makes_graphs_taller_and_less_leaves_cards_out_and_counts_them() -> None:
    assert len(plain(history(2), 120, 9)) == 9
    few = plain(history(8), 120, 4)
    assert len(few) == 4
    assert "and 6 more" in few[-1]


def test_only_the_latest_readings_are_kept_and_a_new_engine_begins_anew() -> None:
    found = history(1, HISTORY + 40)
    assert len(found.cards[0]) == HISTORY
    assert found.cards[0][0].time == "2026-01-01T00:06:40Z"
    found.clear()
    assert plain(found, 120, 4) == []


def test_what_a_driver_does_not_report_is_a_gap_and_a_dash() -> None:
    found = history(1)
    found.add(reading(0, 40, power_watts=None, utilisation_percent="many", total_bytes=None))
    found.add({"kind": "gpu", "index": "x"})
    line = plain(found, 120, 2)[1]
    assert line.count("  - ") == 2
    assert "▄▄▄ " in line


def test_a_bar_of_two_lines_fills_the_lower_one_first() -> None:
    assert bar_graph([0.0, 25.0, 50.0, 100.0], 4, 2, 100.0, False) == ["   █", "▁▄██"]
    assert bar_graph([100.0, None, 0.0], 4, 1, 100.0, True) == [" # _"]
    assert bar_graph([0.0, 100.0, 50.0, 50.0], 2, 1, 100.0, False) == ["▄▄"]
