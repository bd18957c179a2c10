"""Fixtures: the command line for the tests of launchers, the samples of all runs, and the losses of a run on one
process, with which runs on several ranks are compared."""

from pathlib import Path

import pytest

from tests.cli.conftest import tunedeck
from tests.distributed.rank_workbench import SAMPLES
from tests.distributed.supervised import with_ranks
from tests.train.run_helpers import losses, new_run, train, write_samples

__all__ = ["tunedeck"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the samples of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    write_samples(folder / SAMPLES)
    return folder


@pytest.fixture(scope="module")
def curve(folder: Path) -> dict[int, float]:
    """Losses of the run on one process, by step."""
    code, told = train(new_run(folder / "alone", with_ranks(folder, 1)))
    assert code == 0
    return losses(told)
