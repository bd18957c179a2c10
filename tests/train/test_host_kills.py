"""An engine that the kernel kills at a container's memory limit, in a real control group (version 1, as root)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.files.cgroups import _groups

TUNEDECK = Path(__file__).parents[2] / "tunedeck.py"
LIMIT = 800 * 2**20


@pytest.fixture
def group() -> Iterator[Path]:
    """A group with a memory limit below this process's own."""
    own = next((folder for version, folder in _groups(Path("/proc/self")) if version == 1), None)
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("needs a writable memory controller of cgroup version 1")
    made = own / f"tunedeck-test-{os.getpid()}"
    made.mkdir()
    try:
        (made / "memory.limit_in_bytes").write_text(str(LIMIT))
        yield made
    finally:
        made.rmdir()


@pytest.fixture
def inside(
    group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def tunedeck(*words: str) -> subprocess.CompletedProcess[str]:
        shell = f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"'
        command = ["sh", "-c", shell, sys.executable, "-P", str(TUNEDECK), *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return tunedeck


def test_a_new_profile_has_the_memory_of_its_container(inside: Callable[..., Any], tmp_path: Path) -> None:
    made = inside("profiles", "new", "here", "--detect")
    text = next(tmp_path.rglob("here.toml")).read_text() if made.returncode == 0 else made.stderr
    assert "memory_gib = 0.78" in text, made


def test_an_attempt_after_a_kill_begins_smaller(inside: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('schema = 1\nkind = "profile"\n[device]\nkind = "cpu"\nmemory_gib = 23.5\n')
    rows = "".join(json.dumps({"text": f"{number} " * 380}) + "\n" for number in range(1000, 1012))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "r.toml").write_text(
        'schema = 1\nkind = "recipe"\n[model]\nid = "builtin:tiny"\n[data]\nmax_length = 2048\n'
        '[[data.sources]]\nname = "s"\npath = "rows.jsonl"\n'
        "[train]\nbatch_size = 12\nmicro_batch = 12\nmax_steps = 1\n"
    )
    died = inside("train", "-p", "./p.toml", "-r", "./r.toml", "--force")
    assert died.returncode == 137 and "killed by the kernel because host memory ran out" in died.stderr, died
    budgets = []
    for _ in range(9):
        ended = inside("resume", "last")
        budgets += [
            event["text"]
            for event in map(json.loads, next(tmp_path.glob("runs/*/events.jsonl")).read_text().splitlines())
            if event["kind"] == "warning" and "start at half" in event["text"]
        ][-1:]
        if ended.returncode == 0:
            break
    assert ended.returncode == 0, ended
    assert len(set(budgets)) == len(budgets) >= 1
