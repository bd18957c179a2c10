"""Kills the conductor or the engine of a staged run at random moments, and resumes the run each time; stops and pauses
another run in each of its stages.

The chain is the one of the recipe expert-merge with a tiny model: two experts, an assembly with the base, a router,
everything. Disturbed anywhere, it must end with the weights of a run that nothing disturbed, bit for bit, and its
journal must tell every event of every stage exactly once.

Try: `python -m tests.stages.kill_anywhere --moments 30 --seed 20261122`
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch
from safetensors.torch import load_file

from engine.config.schema.run import RunSpec
from engine.journal.control import send_request
from engine.journal.directory import RunDirectory
from engine.journal.liveness import engine_process, is_alive
from engine.journal.stages import NOT_COPIED, find_stage, stage_directories, stage_name
from engine.journal.summary import summarise
from engine.launch.process import start_engine
from engine.launch.resume_run import prepare_resume
from tests.events import read_events
from tests.stages.staged_runs import (
    assert_equal,
    ends_of,
    kill,
    kill_engine,
    new_staged_run,
    staged_spec,
    wait_for,
    write_tiny_model,
)
from tests.torture_table import record

ONLY_EXPERT = {"kind": "full", "train_only": ["model.layers.*.mlp"]}
LEARNING_ROUTER = {"freeze_router": False}

MIXTURE: list[dict[str, Any]] = [
    {"name": "one", "method": ONLY_EXPERT, "train": {"seed": 1}},
    {"name": "mixture", "kind": "assemble", "from": ["one", "base"], "router": "hidden"},
    {"name": "full", "from": "mixture", "moe": LEARNING_ROUTER},
]
"""The shortest chain with every kind of stage."""

EXPERT_MERGE: list[dict[str, Any]] = [
    {"name": "one", "method": ONLY_EXPERT, "train": {"seed": 1}},
    {"name": "two", "method": ONLY_EXPERT, "train": {"seed": 2}},
    {"name": "mixture", "kind": "assemble", "from": ["one", "two", "base"], "router": "hidden"},
    {"name": "router", "from": "mixture", "method": {"train_only": ["**.mlp.gate"]}, "moe": LEARNING_ROUTER},
    {"name": "full", "from": "router", "moe": LEARNING_ROUTER},
]
"""The stages of the recipe expert-merge."""

PATIENCE_SECONDS = 900.0
"""For five processes one after another, on a machine that does other things."""

say = partial(print, flush=True)


def mixture_spec(folder: Path, stages: list[dict[str, Any]], *, steps: int = 2) -> RunSpec:
    """A run spec with these stages: a tiny Qwen2, `steps` steps a stage, a checkpoint at every second one."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {"id": str(write_tiny_model(folder / "base")), "init": "pretrained"}
    return staged_spec(folder, stages, train={"max_steps": steps}, model=model)


def weights_of_stages(run: RunDirectory) -> dict[str, torch.Tensor]:
    """The weights of all stages' results, each under "stage/tensor"."""
    return {
        f"{stage_name(stage)}/{name}": tensor
        for stage in stage_directories(run)
        for file in stage.model.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_story_told_once(run: RunDirectory) -> None:
    """Assert that the run's journal has every event of every stage exactly once, in order, and that each stage is done
    once."""
    events = list(read_events(run.events))
    for stage in stage_directories(run):
        own = [event["seq"] for event in read_events(stage.events) if event["kind"] not in NOT_COPIED]
        name = stage_name(stage)
        assert [event["stage_seq"] for event in events if event["stage"] == name and "stage_seq" in event] == own
    assert set(Counter(name for name, status, _ in ends_of(run) if status == "done").values()) <= {1}
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))


class Killer:
    """Kills processes of one run at random moments until `moments` kills are done."""

    def __init__(self, spec: RunSpec, folder: Path, seed: int, report: Callable[[str], None]) -> None:
        self._spec, self._folder, self._report = spec, folder, report
        self._drawn = random.Random(seed)
        self.kills: Counter[str] = Counter()
        """How often the process of each kind was killed, by "conductor" or "engine"."""

    def run_once(self, moments: int, longest_wait: float) -> RunDirectory:
        """A run to its end, killed up to `moments` times, each time after up to `longest_wait` seconds."""
        run = new_staged_run(self._folder, self._spec)
        process, left = start_engine(run), moments
        while not self._ended(process, self._drawn.uniform(0, longest_wait) if left else PATIENCE_SECONDS):
            assert left, f"{run.path} does not end"
            left -= self._kill(run, process, self._drawn.choice(("conductor", "engine")))
            if process.poll() is None:
                continue  # the engine to be killed was not there
            if summarise(run).status == "done":
                break  # killed after the last word
            prepare_resume(run, [], {})
            process = start_engine(run, resume=True)
        assert summarise(run).status == "done", run.log.read_text()
        return run

    def _ended(self, process: Popen[bytes], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        return process.poll() is not None

    def _kill(self, run: RunDirectory, conductor: Popen[bytes], which: str) -> int:
        """Kill the conductor, or the engine of the running stage; returns the number of processes killed."""
        stage = next((stage for stage in reversed(stage_directories(run)) if _lives(stage)), None)
        if which == "engine" and stage is None:
            return 0
        if which == "conductor":
            kill(conductor)
        elif stage is not None:
            kill_engine(stage)
            conductor.wait(PATIENCE_SECONDS)
        self.kills[which] += 1
        self._report(f"killed the {which} in {stage_name(stage) if stage else 'no stage'}")
        return 1


def stopped_in_every_stage(spec: RunSpec, folder: Path, report: Callable[[str], None]) -> RunDirectory:
    """A run to its end that is stopped, resumed, paused and resumed in each of its stages."""
    run = new_staged_run(folder, spec)
    process = start_engine(run)
    for stage in spec.recipe.stages:
        for request in ("stop", "pause"):
            begun = _times_started(run, stage.name) if request == "pause" else 0
            wait_for(partial(_started_again, run, stage.name, begun), process)
            send_request(run, request)
            process.wait(PATIENCE_SECONDS)
            report(f"{request} in {stage.name}: {summarise(run).status}")
            prepare_resume(run, [], {})
            process = start_engine(run, resume=True)
    assert process.wait(PATIENCE_SECONDS) == 0, run.log.read_text()
    return run


def _started_again(run: RunDirectory, stage: str, begun: int) -> bool:
    return _times_started(run, stage) > begun


def _times_started(run: RunDirectory, stage: str) -> int:
    events = read_events(run.events)
    return sum(event["kind"] == "stage_started" and event.get("name") == stage for event in events)


def _lives(stage: RunDirectory) -> bool:
    engine = engine_process(stage)
    return engine is not None and is_alive(engine)


def check(run: RunDirectory, undisturbed: RunDirectory) -> None:
    """Assert that both runs have the same weights, bit for bit, and that the journal of `run` has every event once."""
    assert_equal(weights_of_stages(run), weights_of_stages(undisturbed))
    assert_story_told_once(run)
    for stage in stage_directories(undisturbed):
        assert find_stage(run, stage_name(stage)) is not None


def main() -> None:
    """Kill as often as the command line says, over as many runs as that takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--seed", type=int, default=20261122)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tunedeck-kills-"))
    spec = mixture_spec(folder, EXPERT_MERGE, steps=6)
    began = time.monotonic()
    undisturbed = new_staged_run(folder, spec)
    assert start_engine(undisturbed).wait(PATIENCE_SECONDS) == 0, undisturbed.log.read_text()
    seconds = time.monotonic() - began
    say(f"undisturbed: {seconds:.0f} s")
    check(stopped_in_every_stage(spec, folder, lambda text: say(f"  {text}")), undisturbed)
    say("stopped and paused in every stage: weights equal, every event once")
    killer = Killer(spec, folder, options.seed, lambda text: say(f"  {text}"))
    while (left := options.moments - killer.kills.total()) > 0:
        check(killer.run_once(left, seconds / 3), undisturbed)
        say(f"run done and equal; {killer.kills.total()} kills so far")
    say(f"{dict(killer.kills)}: weights equal, every event once")
    record("kills", "staged runs, at random moments", killer.kills.total(), 0)


if __name__ == "__main__":
    main()
