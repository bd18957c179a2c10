"""Which launcher rank an environment gives a process, as torchrun, srun and plain variables write it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.schema.run import RunSpec
from engine.errors import UsageError
from engine.launch.environment import find_launcher_rank, first_host, require_rank_per_device
from tests.distributed.rank_workbench import spec_of

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "night", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[01-02]",
}  # fmt: skip


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN])
def test_rank_size_and_meeting_place_are_read(environment: dict[str, str]) -> None:
    seat = find_launcher_rank(environment)
    assert seat is not None
    assert (seat.rank, seat.size, seat.local_rank, seat.master_address) == (5, 8, 1, "gpu01")
    assert not seat.is_rank0 and not seat.may_resume


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
    ],
    ids=["alone", "in a batch script", "in an interactive allocation", "one of one"],
)
def test_a_process_that_was_started_alone_has_no_seat(environment: dict[str, str]) -> None:
    assert find_launcher_rank(environment) is None


def test_all_ranks_of_a_slurm_step_meet_at_one_port_and_other_steps_at_another() -> None:
    found = [find_launcher_rank(SRUN | change) for change in ({}, {"SLURM_PROCID": "0"}, {"SLURM_STEP_ID": "1"})]
    ports = [rank.master_port for rank in found if rank is not None]
    assert len(ports) == 3
    assert ports[0] == ports[1] != ports[2]
    assert all(1024 < port < 32768 for port in ports)


@pytest.mark.parametrize(
    ("environment", "restarts"),
    [(TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}), (SRUN, {"SLURM_RESTART_COUNT": "1"})],
)
def test_a_restarted_job_is_the_same_job_again(environment: dict[str, str], restarts: dict[str, str]) -> None:
    before, after = find_launcher_rank(environment), find_launcher_rank(environment | restarts)
    assert before is not None and after is not None
    assert before.job == after.job != "" and (before.may_resume, after.may_resume) == (False, True)


def test_torchruns_default_run_id_does_not_make_two_jobs_one() -> None:
    seat = find_launcher_rank(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"})
    assert seat is not None and "none" not in seat.job and seat.job


def test_a_script_names_its_job_for_every_launcher() -> None:
    seats = [find_launcher_rank(environment | {"TUNEDECK_JOB": "mine"}) for environment in (TORCHRUN, SRUN)]
    assert [(seat.job, seat.may_resume) for seat in seats if seat] == [("mine", True)] * 2


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[03-06,9],big1", "gpu03"), ("a1,a2", "a1"), ("rack[1-2]n[07-09]", "rack1n07"), ("one", "one"), ("", "")],
)
def test_the_first_machine_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("change", "words"),
    [({"MASTER_ADDR": ""}, "MASTER_ADDR"), ({"RANK": "first"}, "RANK='first'"), ({"WORLD_SIZE": "-2"}, "WORLD_SIZE")],
)
def test_an_environment_that_is_incomplete_is_refused(change: dict[str, str], words: str) -> None:
    plain = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    with pytest.raises(UsageError, match=words):
        find_launcher_rank(plain | change)


def two_devices(tmp_path: Any) -> RunSpec:
    return spec_of(tmp_path, 2, {})


def test_as_many_processes_as_devices_are_demanded(tmp_path: Any) -> None:
    seat = find_launcher_rank(TORCHRUN)
    assert seat is not None
    with pytest.raises(UsageError, match=r"8 processes.* 2 devices"):
        require_rank_per_device(two_devices(tmp_path), seat)
    fitting = find_launcher_rank(TORCHRUN | {"WORLD_SIZE": "2", "RANK": "1"})
    assert fitting is not None
    require_rank_per_device(two_devices(tmp_path), fitting)
