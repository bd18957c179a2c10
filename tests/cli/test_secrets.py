"""What a run leaves on disk: nothing of the environment's secrets, and files as the umask says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe

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
