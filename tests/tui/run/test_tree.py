"""The tree of the Runs screen: what a staged run and a sweep open to, and what a sweep's row says."""

from __future__ import annotations

from pathlib import Path

from tests.tui.recorded_runs import make_run
from tests.tui.recorded_stages import NAMES, make_staged_run
from tui.run.listing import RunList
from tui.run.table import state_of
from tui.run.tree import RunTree

SWEEP = '\n[provenance.sweep]\nid = "20261123T020000Z-demo"\n[provenance.sweep.point]\n"train.seed" = {}\n'


def make_sweep(runs: Path, *statuses: str) -> None:
    """Write the runs of one sweep, one with each of these statuses."""
    for number, status in enumerate(statuses):
        run = make_run(runs, f"demo-seed={number}", status=status, steps=10 * (number + 1))
        run.run_toml.write_text(run.run_toml.read_text() + SWEEP.format(number))


def read_tree(runs: Path) -> RunTree:
    tree = RunTree(RunList.of_folder(runs))
    tree.refresh(seconds=60.0)
    return tree


def test_a_staged_run_opens_to_its_stages(tmp_path: Path) -> None:
    run = make_staged_run(tmp_path, done=2, skipped=("full",))
    tree = read_tree(tmp_path)
    (closed,) = tree.rows()
    assert (closed.is_open, closed.directory, closed.depth) == (False, run, 0)
    tree.set_open(closed.key, is_open=True)
    tree.refresh(seconds=60.0)
    opened, *stages = tree.rows()
    assert opened.is_open and [row.name for row in stages] == list(NAMES)
    states = [state_of(row.summary) if row.summary is not None else row.state for row in stages]
    assert states[:2] == ["done", "done"] and states[3:] == ["pending", "skipped"]
    assert [row.depth for row in stages] == [1] * 5 and {row.parent for row in stages} == {closed.key}
    tree.set_open(closed.key, is_open=False)
    assert len(tree.rows()) == 1


def test_a_sweep_is_one_row_with_the_best_of_its_runs(tmp_path: Path) -> None:
    make_sweep(tmp_path, "done", "failed", "done")
    make_run(tmp_path, "other")
    tree = read_tree(tmp_path)
    rows = {row.name: row for row in tree.rows()}
    sweep = rows.pop("sweep:20261123T020000Z-demo (3)")
    assert len(rows) == 1 and sweep.is_sweep and sweep.directory is None
    assert sweep.summary is not None
    assert (sweep.summary.status, sweep.summary.step, sweep.summary.max_steps) == ("failed", 60, 300)
    tree.set_open(sweep.key, is_open=True)
    shown = [row for row in tree.rows() if row.parent == sweep.key]
    assert [row.name for row in shown] == ["demo-seed=0", "demo-seed=1", "demo-seed=2"]


def test_runs_of_one_name_are_told_apart_by_what_was_changed(tmp_path: Path) -> None:
    """Regression: at 120 columns two runs of a recipe looked alike."""
    make_run(tmp_path, "other")
    first, second = (make_run(tmp_path, "demo") for _ in range(2))
    first.run_toml.write_text(first.run_toml.read_text().replace('set = ["train.max_steps=100"]', "set = []"))
    second.path.rename(tmp_path / "20261123T020000Z-demo")
    assert sorted(row.name for row in read_tree(tmp_path).rows()) == ["demo", "demo max_steps=100", "other"]


def test_a_filter_shows_runs_without_the_tree(tmp_path: Path) -> None:
    make_sweep(tmp_path, "done", "failed")
    make_staged_run(tmp_path)
    tree = read_tree(tmp_path)
    found = tree.rows(lambda entry: entry.summary is not None and entry.summary.status == "failed")
    assert [(row.depth, row.is_open, row.is_sweep) for row in found] == [(0, None, False)]
