"""Memory limits of control groups, read from folders made as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.files.cgroups import free_memory_bytes, host_memory_bytes, memory_limit_bytes, oom_kills
from engine.journal.directory import RunDirectory
from engine.journal.liveness import Attempt, killed_attempt, note_attempt

MIB = 2**20


class Groups:
    """A made /proc/self and a mounted hierarchy of one version."""

    def __init__(self, folder: Path, version: int, name: str, root: str = "/") -> None:
        self.proc, self.mount = folder / "proc", folder / "mount with space"
        self.proc.mkdir()
        self.mount.mkdir()
        lines = {1: f"5:cpu:/other\n4:memory:{name}\n0::/\n", 2: f"0::{name}\n"}
        (self.proc / "cgroup").write_text(lines[version])
        kind = {1: "cgroup cgroup rw,memory", 2: "cgroup2 cgroup2 rw"}[version]
        place = str(self.mount).replace(" ", r"\040")
        (self.proc / "mountinfo").write_text(f"35 31 0:32 {root} {place} rw shared:9 - {kind}\n")

    def write(self, name: str, **files: str | int) -> None:
        group = self.mount / name.strip("/")
        group.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (group / file.replace("memory_", "memory.")).write_text(f"{text}\n")


def test_version_2_limits_of_all_parents_count(tmp_path: Path) -> None:
    groups = Groups(tmp_path, 2, "/job/step")
    groups.write("/job", memory_max=900 * MIB, memory_high="max", memory_current=300 * MIB)
    groups.write("/job/step", memory_max="max", memory_high="max", memory_current=200 * MIB)
    assert memory_limit_bytes(groups.proc) == host_memory_bytes(groups.proc) == 900 * MIB
    (groups.mount / "job" / "memory.stat").write_text(f"anon 1\ninactive_file {50 * MIB}\n")
    assert free_memory_bytes(groups.proc) == 650 * MIB


def test_version_2_high_counts_as_a_limit(tmp_path: Path) -> None:
    groups = Groups(tmp_path, 2, "/job")
    groups.write("/job", memory_max=900 * MIB, memory_high=700 * MIB)
    assert memory_limit_bytes(groups.proc) == 700 * MIB


def test_version_1_limits_of_all_parents_count(tmp_path: Path) -> None:
    groups = Groups(tmp_path, 1, "/job/step")
    groups.write("/", memory_limit_in_bytes=9223372036854771712)
    groups.write("/job", memory_limit_in_bytes=512 * MIB)
    groups.write("/job/step", memory_limit_in_bytes=9223372036854771712)
    assert memory_limit_bytes(groups.proc) == 512 * MIB


def test_a_container_sees_its_own_group_as_the_mount(tmp_path: Path) -> None:
    groups = Groups(tmp_path, 1, "/docker/abc", root="/docker/abc")
    groups.write("/", memory_limit_in_bytes=900 * MIB)
    assert memory_limit_bytes(groups.proc) == 900 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_no_limit_is_the_memory_of_the_machine(tmp_path: Path, version: int) -> None:
    groups = Groups(tmp_path, version, "/job")
    groups.write("/job", memory_limit_in_bytes=9223372036854771712, memory_max="max")
    assert memory_limit_bytes(groups.proc) is None and free_memory_bytes(groups.proc) is None
    assert host_memory_bytes(groups.proc) == host_memory_bytes(tmp_path / "no linux") > 2**30


@pytest.mark.parametrize(("version", "file"), [(1, "memory_oom_control"), (2, "memory_events")])
def test_an_attempt_was_killed_when_its_group_counts_more_kills(tmp_path: Path, version: int, file: str) -> None:
    groups, run = Groups(tmp_path, version, "/job"), RunDirectory(tmp_path)
    groups.write("/job", **{file: "under_oom 0\noom_kill 3"})
    attempt = Attempt(oom_kills(groups.proc), 1000)
    note_attempt(run, attempt)
    assert killed_attempt(run, groups.proc) is None
    groups.write("/job", **{file: "under_oom 0\noom_kill 4"})
    assert killed_attempt(run, groups.proc) == attempt


@pytest.mark.parametrize("text", ["[1]", "{}", '{"kills": 1}', '{"kills": {"x": "y"}}', "", "{"])
def test_a_note_of_another_shape_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "host_memory.json").write_text(text)
    assert killed_attempt(RunDirectory(tmp_path), tmp_path) is None
