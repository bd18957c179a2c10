"""What a run leaves on disk: nothing of the environment's secrets, and files as the umask says."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from engine.launch.process import ENTRY_FILE
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe
from tests.trackers import look_alikes

SECRET = "hf_thisIsNoTokenButASecretOfATest"
NAMES = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")


def test_a_run_keeps_no_secret_and_only_its_user_can_read_it_under_a_strict_umask(
    tmp_path: Path, tunedeck: Tunedeck, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, SECRET)
    earlier = os.umask(0o077)
    try:
        recipe = write_recipe(tmp_path)
        ended = tunedeck("train", "-p", write_profile(tmp_path), "-r", recipe)
    finally:
        os.umask(earlier)
    assert ended.code == 0, ended.err
    assert SECRET not in ended.out + ended.err
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    places = [path for path in written if path.is_relative_to(tmp_path / "runs")]
    assert len(places) > 10
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert [path for path in places if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_no_secret_is_in_an_argument_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_alikes.install(monkeypatch, tmp_path)
    for name in NAMES:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("HOOK", f"http://localhost:9/{SECRET}")
    recipe = write_recipe(tmp_path, more='\n[trackers]\nuse = ["wandb"]\n')
    asked: list[str | Path] = [
        "-p",
        write_profile(tmp_path),
        "-r",
        recipe,
        "--runs",
        tmp_path / "runs",
        "--set",
        "finish.webhook=$HOOK",
    ]
    process = subprocess.Popen([sys.executable, "-P", ENTRY_FILE, "train", *asked], stdout=subprocess.DEVNULL)
    seen: set[bytes] = set()
    while process.poll() is None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                seen.add(path.read_bytes())
    started = b"".join(words for words in seen if bytes(tmp_path) in words)
    assert process.returncode == 0
    assert all(word in started for word in (b"_engine", b"_forward", b"_tell")), started
    assert not [words for words in seen if SECRET.encode() in words]
