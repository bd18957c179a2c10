"""Fixes of runs that were killed, ended, or could not finish what their recipe asks: the printed command is typed."""

from __future__ import annotations

import os
import shlex
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.commands.train import finish_run
from engine.config.load import dump_run_spec, load_run_spec
from engine.config.schema.finish import Finish
from engine.errors import EnvironmentProblem, UsageError
from engine.journal.directory import RunDirectory
from engine.journal.events import EventTail, EventWriter
from engine.journal.liveness import claim, engine_process, identify, is_alive, record_engine
from engine.journal.queue import Queue
from engine.journal.summary import summarise
from engine.launch import process
from engine.launch.destinations import allow_typed
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import make_run, write_profile, write_recipe
from tests.cli.test_fixes import HELD_OUT, suggested
from tests.fixes.conftest import Given
from tests.fixes.rows import text_of, was_given
from tests.handover.hub_server import TOKEN, Hub
from tests.handover.test_push import finished, hub, made
from tests.journal.waiting import until

__all__ = ["finished", "hub", "made"]

STAGES = '\n[[stages]]\nname = "one"\n\n[[stages]]\nname = "two"\nfrom = "one"\n'

WALKED = (
    "commands/runs:wait", "launch/process:engine_died", "launch/process:_require_on_this_machine",
    "launch/process:_kill", "launch/process:_wait_until_gone", "commands/train:_merge", "commands/train:_push",
    "extras/handover/merge:_require_space: close other", "launch/resume_run:_refuse_if_done",
    "launch/resume_run:_refuse_other_runs_option: repeat a stage",
    "launch/resume_run:refuse_stage: {again}", "launch/resume_run:refuse_stage: {further}",
    "launch/resume_run:_stages_done_again", "model/reference:refuse_removed", "journal/queue:add: add it to",
    "journal/queue:add: continue it with", "journal/queue:_load: remove it", "journal/index:_not_found: {f",
)  # fmt: skip
"""The fix texts that the tests below execute."""


def test_a_killed_engine_is_resumed_by_the_command_of_wait(
    tunedeck: Tunedeck, started: tuple[RunDirectory, int], given: Given
) -> None:
    run, pid = started
    os.kill(pid, signal.SIGKILL)
    until(lambda: summarise(run).status == "stale")
    refused = tunedeck("wait", run.name)
    assert was_given(text_of("commands/runs:wait"), given)
    command = shlex.split(refused.err.partition("continue with: tunedeck ")[2])
    step = summarise(run).step
    assert tunedeck(*command, "--detach").code == 0
    until(lambda: summarise(run).step > step)
    assert tunedeck("stop", run.name).code == 0
    assert tunedeck("wait", run.name).code == 130


def test_an_engine_that_dies_under_its_command_is_resumed_by_what_it_says(
    tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ("train.max_steps=100000", "checkpoint.every_steps=100000")
    sleep = process._sleep_until_signal_or_end
    monkeypatch.setattr(process, "_sleep_until_signal_or_end", killed_once_it_trains(sleep))
    files = ("-p", write_profile(tmp_path), "-r", write_recipe(tmp_path))
    refused = tunedeck("train", *files, *(word for each in long for word in ("--set", each)))
    assert refused.code == 137
    assert was_given(text_of("launch/process:engine_died"), given), given
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNEDECK_RUNS", str(tmp_path / "runs"))
    answer = tunedeck(*suggested("", refused.err), "--max-hours", "0.0003")
    assert answer.code == 130 and "stopped" in answer.out, answer.err


def killed_once_it_trains(sleep: Any) -> Any:
    """As the kernel does without free memory, from beside the command that follows the engine."""

    def doing(child: Any, received: Any) -> None:
        (run,) = map(RunDirectory, Path(os.environ["TUNEDECK_RUNS"]).iterdir())
        if summarise(run).step > 0:
            os.kill(child.pid, signal.SIGKILL)
        sleep(child, received)

    return doing


def test_a_stop_by_force_is_for_the_machine_and_the_user_of_the_engine(
    tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, write_recipe(tmp_path))
    with claim(run) as own:
        record_engine(run, replace(own, host="elsewhere"))
        with pytest.raises(EnvironmentProblem, match="only that machine"):
            process.force_stop(run)
        assert was_given(text_of("launch/process:_require_on_this_machine"), given)
        assert given[-1][1] == "run the same command on elsewhere"
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], dict(os.environ))
    identity = identify(child)
    assert identity is not None
    record_engine(run, identity)

    def forbidden(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", forbidden)
        patched.setattr(os, "kill", forbidden)
        with pytest.raises(EnvironmentProblem, match="another user"):
            process.force_stop(run)
    assert was_given(text_of("launch/process:_kill"), given)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", iter(range(0, 10_000, 20)).__next__)
        patched.setattr(process, "is_alive", lambda found: True)
        with pytest.raises(EnvironmentProblem, match="has not ended"):
            process._kill(identity)
    assert was_given(text_of("launch/process:_wait_until_gone"), given)
    os.waitpid(child, 0)
    assert not is_alive(identity)
    process.force_stop(run)  # its owner has ended it
    assert summarise(run).status == "stopped" and engine_process(run) is None


def test_what_a_run_could_not_do_at_its_end_is_done_by_the_commands_of_its_warnings(
    tunedeck: Tunedeck, hub: Hub, finished: RunDirectory, monkeypatch: pytest.MonkeyPatch, given: Given
) -> None:
    spec = load_run_spec(finished.run_toml, own=True)
    finish = Finish(merge=True, push="me/it")
    finished.run_toml.write_text(
        dump_run_spec(spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"finish": finish})}))
    )
    allow_typed(finish, ["finish.push=me/it"])
    with monkeypatch.context() as full:
        full.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 10))
        full.delenv("HF_TOKEN")
        finish_run(finished.path)
    assert was_given(text_of("extras/handover/merge:_require_space: close other"), given)
    told = [event for event in EventTail(finished.events).poll() if event["kind"] == "warning"]
    assert [event["code"] for event in told[-2:]] == ["merge", "push"]
    for event in told[-2:]:
        command = shlex.split(event["fix"])
        assert command[0] == "tunedeck"
        answer = tunedeck(*command[1:])
        assert answer.code == 0, answer.err
    assert finished.merged.is_dir()
    assert "model.safetensors" in hub.repositories["me/it"].files and TOKEN


def test_stages_that_are_done_are_done_again_as_each_refusal_says(
    tunedeck: Tunedeck, tmp_path: Path, given: Given
) -> None:
    files = ("-p", write_profile(tmp_path), "-r", write_recipe(tmp_path, more=STAGES))
    done = tunedeck("train", *files)
    assert done.code == 0, done.err
    (run,) = (tmp_path / "runs").iterdir()
    for words, key in (
        ((), "launch/resume_run:_refuse_if_done"),
        (("--from", "1"), "launch/resume_run:_refuse_other_runs_option: repeat a stage"),
    ):
        refused = tunedeck("resume", run.name, *words)
        assert was_given(text_of(key), given)
        given.clear()
        command = suggested("", refused.err)
        assert command == ["resume", run.name, "--from-stage", "two"]
    assert tunedeck(*command).code == 0
    refused = tunedeck("resume", f"{run.name}/one", "--set", "train.max_steps=4")
    assert was_given(text_of("launch/resume_run:refuse_stage: {again}"), given), refused.err
    assert suggested("", refused.err) == ["resume", run.name, "--from-stage", "one"]
    assert tunedeck(*suggested("", refused.err)).code == 0
    refused = tunedeck(*command, "--set", "stages.two.enabled=false")
    assert was_given(text_of("launch/resume_run:_stages_done_again"), given)
    option = shlex.split(refused.err.partition("fix: ")[2])
    refused = tunedeck("chat", f"{run.name}/two@1", "--prompt", "x")
    assert was_given(text_of("model/reference:refuse_removed"), given)
    keep = shlex.split(refused.err.partition("checkpoints next time: ")[2])
    assert tunedeck(*command, *option, *keep).code == 0
    assert tunedeck("chat", f"{run.name}/two@1", "--prompt", "x", "--plain").code == 0


def test_a_stage_that_was_stopped_goes_on_with_its_run(tunedeck: Tunedeck, tmp_path: Path, given: Given) -> None:
    """Regression: with `--set` its name, RUN/STAGE, was refused as one that a run may not have."""
    files = ("-p", write_profile(tmp_path), "-r", write_recipe(tmp_path, more=STAGES))
    assert tunedeck("train", *files, "--max-hours", "0.00001").code == 130
    (run,) = (tmp_path / "runs").iterdir()
    assert tunedeck("resume", f"{run.name}/one", "--set", "train.learning_rate=1e-4").code == 2
    assert was_given(text_of("launch/resume_run:refuse_stage: {further}"), given), given
    command = shlex.split(given[-1][1].partition(";")[0])[1:]
    answer = tunedeck(*command, "--set", "stages.one.train.learning_rate=1e-4", "--max-hours", "1")
    assert answer.code == 0, answer.err


def test_the_queue_says_where_a_run_belongs_and_what_goes_on_with_it(
    tunedeck: Tunedeck, tmp_path: Path, given: Given
) -> None:
    run = make_run(tmp_path, write_recipe(tmp_path, more=HELD_OUT))
    with pytest.raises(UsageError):
        Queue(tmp_path / "others").add(run)
    assert was_given(text_of("journal/queue:add: add it to"), given)
    Queue(run.path.parent).add(run)
    Queue(run.path.parent).remove(run.name)
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        writer.write("run_finished", status="stopped", exit_code=130, result=None)
    with pytest.raises(UsageError) as caught:
        Queue(run.path.parent).add(run)
    assert was_given(text_of("journal/queue:add: continue it with"), given)
    assert tunedeck(*shlex.split(caught.value.fix.partition("tunedeck ")[2])).code == 0
    order = Queue(run.path.parent).folder / "order.json"
    order.write_text("{")
    refused = tunedeck("queue", "list")
    assert was_given(text_of("journal/queue:_load: remove it"), given), refused.err
    order.unlink()
    assert tunedeck("queue", "list").code == 0
    given.clear()
    tunedeck("show", "mine", "--runs", tmp_path / "others")
    assert was_given(text_of("journal/index:_not_found: {f"), given), given
    assert given[-1][1].startswith("leave out --runs")
    assert tunedeck("show", given[-1][1].partition("give its full name: ")[2]).code == 0
