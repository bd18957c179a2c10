"""Whole runs on two ranks: their losses are those of one process, also if ranks are killed or stopped, or if fewer
ranks resume the run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from engine.config.load import dump_run_spec
from tests.distributed.supervised import (
    SHARING,
    ask_to_stop,
    engine_ends,
    events,
    finish_alone,
    rank_process,
    restarts,
    wait_for_step,
    with_ranks,
)
from tests.train.run_helpers import new_run, of_kind

VOTE_SECONDS = 20.0
"""How long two ranks wait for each other here, where they start together and nothing but another worker's test runs
beside them. Votes take milliseconds; all of it is idle time once a rank is stopped."""


def test_a_killed_rank_restarts_the_run_a_stopped_one_too_many_ends_it_and_one_process_goes_on_with_it(
    folder: Path, curve: dict[int, float]
) -> None:
    place = new_run(folder / "lost", with_ranks(folder, 2, VOTE_SECONDS, restarts=1))

    def disturb() -> None:
        wait_for_step(place, 6)
        rank_process(place, 1).send_signal(signal.SIGKILL)
        wait_for_step(place, 11)
        rank_process(place, 1).send_signal(signal.SIGSTOP)

    assert engine_ends(place, meanwhile=disturb) == 1
    assert of_kind(events(place), "run_started")[0]["world_size"] == 2
    (restart,) = restarts(place)
    assert "rank 1 was killed" in restart and "restart 1 of 1" in restart
    end = events(place)[-1]
    assert (end["kind"], end["status"]) == ("run_finished", "failed")
    assert "rank 1 does not respond: it is suspended or stuck, after 1 restart" in end["error"]
    assert finish_alone(place, folder) == pytest.approx(curve, rel=1e-5)


@pytest.mark.torture
@pytest.mark.parametrize("sharing", SHARING)
def test_four_ranks_then_two_then_one_go_on_on_one_curve(sharing: str, folder: Path, curve: dict[int, float]) -> None:
    place = new_run(folder / f"fewer-{sharing}", with_ranks(folder, 4, sharing=sharing))
    for ranks, step in ((4, 8), (2, 16)):
        place.run_toml.write_text(dump_run_spec(with_ranks(folder, ranks, sharing=sharing)))

        def stop(step: int = step) -> None:
            wait_for_step(place, step)
            ask_to_stop(place)

        assert engine_ends(place, resume=ranks < 4, meanwhile=stop) == 130
    assert finish_alone(place, folder) == pytest.approx(curve, rel=1e-5)
