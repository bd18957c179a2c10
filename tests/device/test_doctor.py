"""`tunedeck doctor` reports, and never fails, on machines in any state."""

from __future__ import annotations

import json
import socket
import threading
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from engine.commands import doctor
from engine.commands.doctor_gpus import _specs
from engine.device.base import GpuReading
from engine.errors import EnvironmentProblem, UsageError

RUNNER = CliRunner()
AMONG_RANKS = ["collectives", "bandwidth", "sharded_step", "lost_rank"]
"""Proofs on several devices without CUDA; those of one device come before the last."""
FOUR = """schema = 1
kind = "profile"
name = "four"
[device]
kind = "metered"
count = 4
memory_gib = 0.0625
[parallel]
strategy = "sharded"
"""


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command()(doctor.doctor)
    return app


def by_topic(app: typer.Typer, *arguments: str) -> dict[str, dict[str, str]]:
    result = RUNNER.invoke(app, ["doctor", "--json", *arguments])
    assert result.exit_code == 0
    return {finding["topic"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_the_report_names_versions_disk_and_driver(app: typer.Typer, tmp_path: Path) -> None:
    findings = by_topic(app, "--no-hub", "--runs", str(tmp_path / "runs" / "not-there-yet"))
    assert findings["torch"]["state"] == "ok"
    assert "GiB free" in findings["disk"]["text"]
    assert {"python", "driver", "tmux", "hub token"} <= findings.keys()
    assert findings["tunedeck"]["text"] == version("tunedeck")
    assert "hub" not in findings


def test_the_text_report_shows_a_word_and_a_fix(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    result = RUNNER.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "problem  http://127.0.0.1:9 is not reachable" in result.stdout
    assert "fix: use local folders" in result.stdout


def test_offline_mode_is_said_and_not_tried(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in by_topic(app)["hub"]["text"]


@pytest.mark.parametrize("endpoint", ["ftp://example.invalid", "http://[", "nonsense"])
def test_a_nonsense_endpoint_is_a_finding(app: typer.Typer, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert by_topic(app)["hub"]["state"] == "problem"


def test_a_hub_that_never_answers_is_given_up_in_time(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, says nothing
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        finding = doctor._hub_access()
        assert time.monotonic() - began < doctor.HUB_TIMEOUT_SECONDS + 1
    assert finding.state == "problem"


def test_a_question_without_an_answer_is_bounded() -> None:
    never = threading.Event()
    assert "no answer" in str(doctor.within(0.05, lambda: str(never.wait())))
    never.set()


def test_a_token_is_found_and_never_shown(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    result = RUNNER.invoke(app, ["doctor", "--no-hub"])
    assert "set in the environment" in result.stdout
    assert "hf_secret" not in result.stdout


def test_an_unwritable_folder_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda *arguments: False)
    assert doctor._disk(tmp_path).state == "problem"


def test_gpus_proves_what_a_run_relies_on_on_a_profile_s_device(app: typer.Typer) -> None:
    result = RUNNER.invoke(app, ["doctor", "--gpus", "-p", "demo", "-r", "demo", "--json"])
    assert result.exit_code == 0, result.output
    findings = json.loads(result.stdout)["findings"]
    assert {finding["topic"] for finding in findings} == {"metered 0, demo"}
    assert {"ok"} == {finding["state"] for finding in findings}
    proofs = [finding["text"].partition(":")[0] for finding in findings]
    assert proofs == [
        "allocator",
        "oom_in_backward",
        "attention",
        "loss",
        "optimizer",
        "copies",
        "host_syncs",
        "tiled_mlp",
    ]


def test_gpus_proves_what_four_ranks_rely_on(app: typer.Typer, tmp_path: Path) -> None:
    profile = tmp_path / "four.toml"
    profile.write_text(FOUR)
    result = RUNNER.invoke(app, ["doctor", "--gpus", "-p", str(profile), "-r", "demo", "--json"])
    assert result.exit_code == 0, result.output
    together = [one for one in json.loads(result.stdout)["findings"] if one["topic"].startswith("4 metered devices")]
    assert {one["topic"] for one in together} == {"4 metered devices, sharded, demo"}
    assert {"ok"} == {one["state"] for one in together}
    proofs = [one["text"].partition(":")[0] for one in together]
    assert [*proofs[:3], proofs[-1]] == AMONG_RANKS
    assert together[0]["text"].startswith("collectives: five kinds of collectives between 4 ranks are exact")


def test_several_gpus_are_proved_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    used = (0, 2**30)
    cards = [
        GpuReading(index, "H100", f"GPU-{index}", 80 * 2**30, held, 0, 30, 70.0, ()) for index, held in enumerate(used)
    ]
    monkeypatch.setattr("engine.device.nvml.read_gpus", lambda: cards)
    named = {name: spec.profile for name, spec in _specs(None, None)}
    assert list(named) == [
        "gpu 0, full", "gpu 1, full", "2 cuda devices, sharded, full",
        "gpu 0, LoRA", "gpu 1, LoRA", "2 cuda devices, sharded, LoRA",
    ]  # fmt: skip
    together = named["2 cuda devices, sharded, LoRA"].device
    assert together.count == 2
    assert together.memory_gib == pytest.approx(0.9 * 79)


def test_a_run_that_cannot_be_set_up_is_a_problem_of_the_machine(app: typer.Typer) -> None:
    result = RUNNER.invoke(app, ["doctor", "--gpus", "-p", "demo", "-r", "lora", "--json"])
    assert result.exit_code == 6
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["state"] == "problem" and "could not be checked" in finding["text"]


def test_without_a_gpu_or_a_profile_nothing_can_be_proved(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.nvml.read_gpus", list)
    refused = RUNNER.invoke(app, ["doctor", "--gpus"])
    assert isinstance(refused.exception, EnvironmentProblem) and refused.exception.exit_code == 6
    assert "no NVIDIA GPU" in str(refused.exception)
    assert isinstance(RUNNER.invoke(app, ["doctor", "-p", "demo"]).exception, UsageError)
