"""The report of an out-of-memory error: which components and tensors held the memory, by name, and which settings would
have avoided the error. Writing it never makes a run fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.load import load_run_spec
from engine.device.oom import OutOfMemory
from engine.device.open import open_device
from engine.journal.directory import RunDirectory
from engine.journal.oom_text import read_report, report_lines
from engine.train.run.oom_report import MOST_REPORTS, OomReports
from engine.train.step.failures import RankOom, RecoveredOom
from engine.train.step.memory_breakdown import LARGEST, memory_breakdown
from tests.train.run_helpers import Workshop, make_spec, new_run, of_kind, train, write_samples

Survived = tuple[RunDirectory, list[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    """A short LoRA run whose probe does not fit, its events, and its first report."""
    samples = write_samples(tmp_path_factory.mktemp("data") / "samples.jsonl")
    train_table = {"micro_batch": 8, "gradient_checkpointing": False, "max_steps": 2}
    spec = make_spec(samples, memory_gib=0.012, method={"kind": "lora"}, train=train_table)
    place = new_run(tmp_path_factory.mktemp("runs"), spec)
    code, events = train(place)
    assert code == 0
    report = read_report(place.path / of_kind(events, "oom_report")[0]["path"])
    assert report is not None
    return place, events, report


def test_every_failure_has_one_report_beside_its_event(survived: Survived) -> None:
    place, events, _ = survived
    failures, reports = of_kind(events, "backoff"), of_kind(events, "oom_report")
    assert len(failures) == len(reports) == len(list(place.oom.glob("*.json"))) > 0


def test_components_add_up_to_what_was_allocated(survived: Survived) -> None:
    _, _, report = survived
    held = report["held"]
    assert sum(held.values()) == report["allocated_bytes"]
    assert held["weights"] > held["optimizer"] > 0 and held["adapters"] > 0 and held["activations"] > 0


def test_tensors_that_are_known_by_name_are_named(survived: Survived, tmp_path: Path) -> None:
    spec = load_run_spec(survived[0].run_toml, own=True)
    with Workshop(spec, tmp_path) as setup:
        found = memory_breakdown(setup.context.loaded, setup.context.guard, setup.context.device)
    sizes = [tensor["size_bytes"] for tensor in found.largest]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == LARGEST
    assert all(tensor["name"] for tensor in found.largest)


def test_what_would_have_avoided_it_fits_by_the_plan(survived: Survived) -> None:
    _, _, report = survived
    assert report["plan"]["peak_bytes"] > report["capacity_bytes"]
    assert report["avoided_by"]
    assert all(way["peak_bytes"] <= report["capacity_bytes"] for way in report["avoided_by"])


def test_the_page_says_all_of_it_and_obeys_no_escape_code(survived: Survived) -> None:
    _, _, report = survived
    lines = report_lines(report | {"device": "\x1b[31mred", "text": "a\nb"})
    text = "\n".join(lines)
    for words in ("out of memory in", "memory by component", "activations", "remedy: ", "would have avoided it"):
        assert words in text
    assert "\x1b" not in text and not any("\n" in line for line in lines)
    probed = "\n".join(
        report_lines(report | {"phase": "probe_forward", "remedy": "cut", "before": 8 << 20, "after": 4 << 20})
    )
    assert ("remedy: the memory test is redone in smaller pieces (micro-batches of up to 8 MiB -> 4 MiB)") in probed


def test_a_folder_that_cannot_be_written_costs_the_report_and_nothing_else(survived: Survived, tmp_path: Path) -> None:
    place, _, _ = survived
    spec = load_run_spec(place.run_toml, own=True)
    fresh = new_run(tmp_path, spec)
    fresh.oom.write_text("in the way", "utf-8")
    code, events = train(fresh)
    assert code == 0
    assert of_kind(events, "backoff") and not of_kind(events, "oom_report")


def test_a_report_is_kept_small_in_number(survived: Survived, tmp_path: Path) -> None:
    spec = load_run_spec(survived[0].run_toml, own=True)
    reports = OomReports(new_run(tmp_path, spec), open_device(spec), lambda: spec)
    failure = OutOfMemory("device", 512, "full", "forward", 1024, 1024)
    recovered = RecoveredOom(1, RankOom(failure), "retry", 1)
    paths = [reports.write(recovered) for _ in range(MOST_REPORTS + 2)]
    assert len(set(paths[:MOST_REPORTS])) == MOST_REPORTS and paths[MOST_REPORTS:] == [None, None]
