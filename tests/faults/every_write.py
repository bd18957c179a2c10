"""Every write is cut: each change of a file that a run makes fails once, with each of four errors, and kills once.

A scenario is a few commands in a folder of their own. After the fault nothing that looks complete may be damaged, no
command ends with a traceback, an error names a fix, and when the user has done what is said, losses and weights equal
those of the undisturbed scenario bit for bit.

Changes of one call site do the same again: the same call on the same file of a run, reached by the same lines of
Python. `--call-sites` tries one of each with each error, drawn by chance; without it every change fails in turn.

Not a test module. Try: `python -P -m tests.faults.every_write --sample 20`
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.journal.checkpoints_on_disk import damage, find_checkpoints
from engine.journal.directory import OLD_DRAFT_SECONDS, RunDirectory
from engine.journal.files import ABANDONED_SECONDS
from engine.journal.liveness import STALE_SECONDS
from engine.journal.queue import Queue
from engine.journal.stages import stage_directories
from engine.journal.summary import summarise
from engine.launch.process import ENTRY_FILE
from tests import fork_server
from tests.cli.small_recipes import write_profile, write_recipe
from tests.conftest import FOLDERS
from tests.events import read_events
from tests.faults.failing_disk import CallSite, FailingDisk, preload
from tests.torture_table import record
from tests.trackers.look_alikes import PACKAGES, records_of_tensorboard

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS, "EACCES": errno.EACCES, "killed": 0}
PATIENCE_SECONDS = 900.0
ATTEMPTS = 3
"""To reach a call site: the n-th change is sometimes one of another."""

say = partial(print, flush=True)

TRAINING = (("max_steps = 2", "max_steps = 4"), ("every_steps = 1", "every_steps = 2\nkeep = 1"),
            ("micro_batch = 2\n", "micro_batch = 2\nseed = 3\n"))  # fmt: skip
EVALUATION = '\n[eval]\nevery_steps = 2\nlimit = 2\n\n[[data.validation]]\nname = "held"\npath = "data.jsonl"\n'


@dataclass
class Ended:
    """How a command ended."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str


class Place:
    """A folder with a recipe, a profile, runs and the user's own folders."""

    def __init__(self, folder: Path, more: str = "", profile: str = "") -> None:
        self.folder = folder.resolve()
        self.runs = self.folder / "runs"
        for each in ("input", "runs", *(name.lower() for name in FOLDERS)):
            (self.folder / each).mkdir(parents=True, exist_ok=True)
        self.recipe = write_recipe(self.folder / "input", *TRAINING, more=EVALUATION + more)
        self.profile = write_profile(self.folder / "input", ("memory_gib = 8.0", "memory_gib = 8.0\n" + profile))
        # Read late: with another HF_HOME than the fork server has, every command would start an interpreter.
        self.environment = {name: str(self.folder / name.lower()) for name in FOLDERS if name.startswith("TUNEDECK_")}
        self.environment["TUNEDECK_RUNS"] = str(self.runs)
        self.ended: list[Ended] = []

    def call(self, *words: object) -> Ended:
        """Run one command to its end."""
        command = [sys.executable, "-P", str(ENTRY_FILE), *map(str, words)]
        done = subprocess.run(
            command, cwd=self.folder / "input", env={**os.environ, **self.environment}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        self.ended.append(Ended(tuple(map(str, words)), done.returncode, done.stdout, done.stderr))
        return self.ended[-1]

    def found(self) -> list[RunDirectory]:
        """The runs that are there."""
        return [RunDirectory(path) for path in sorted(self.runs.glob("[!.]*")) if (path / "run.toml").is_file()]


def train(place: Place) -> None:
    place.call("train", "-p", place.profile, "-r", place.recipe)


def queue(place: Place) -> None:
    for name in {"one", "two"} - {stem(run) for run in place.found()}:
        place.call("queue", "add", "-p", place.profile, "-r", place.recipe, "--name", name)
    place.call("queue", "start")


def sweep(place: Place) -> None:
    place.call("train", "-p", place.profile, "-r", place.recipe, "--set", 'sweep."train.seed"=[3, 4]')


def evaluate(place: Place) -> None:
    place.call("eval", "last", "--limit", "2")


def sync(place: Place) -> None:
    place.call("sync", "last", "--to", "tensorboard")


@dataclass(frozen=True)
class Scenario:
    """What is disturbed, in which kind of place, and how many runs it must leave."""

    name: str
    disturbed: Callable[[Place], None]
    before: Callable[[Place], None] = lambda place: None
    runs: int = 1
    more: str = ""
    profile: str = ""

    def place(self, folder: Path) -> Place:
        return Place(folder, self.more, self.profile)


def stem(run: RunDirectory) -> str:
    """The run's name without its time, and without the number of a second one."""
    return re.sub(r"-2$", "", run.name.partition("-")[2])


STAGES = '\n[[stages]]\nname = "one"\n\n[[stages]]\nname = "two"\nfrom = "one"\n'
TRACKED = '\n[trackers]\nuse = ["tensorboard"]\n'
SCENARIOS = (
    Scenario("single run", train),
    Scenario("two ranks", train, profile="count = 2\n"),
    Scenario("staged run", train, more=STAGES),
    Scenario("queue", queue, runs=2),
    Scenario("sweep", sweep, runs=2),
    Scenario("evaluation", evaluate, before=train),
    Scenario("tracked run", train, more=TRACKED),
    Scenario("sync", sync, before=train),
)


@dataclass(frozen=True)
class Result:
    """What must be equal: losses of each step and weights of each run, by stage."""

    losses: dict[str, dict[int, float]]
    weights: dict[str, dict[str, torch.Tensor]]
    forwarded: dict[str, list[tuple[int, str]]]

    def differs(self, other: Result) -> list[str]:
        """In words; empty if both are equal to the bit."""
        wrong = [] if self.losses == other.losses else [f"losses {self.losses} are not {other.losses}"]
        if self.forwarded != other.forwarded:
            wrong.append(f"the tracker has {self.forwarded} and not {other.forwarded}")
        for name, tensors in other.weights.items():
            own = self.weights.get(name, {})
            same = own.keys() == tensors.keys() and all(torch.equal(own[key], tensors[key]) for key in tensors)
            wrong += [] if same else [f"the weights of {name} differ"]
        return wrong


def result_of(place: Place) -> Result:
    """Read the result of all runs of a place."""
    parts = {
        f"{stem(run)}/{part.path.name if part is not run else ''}": part
        for run in place.found()
        for part in (stage_directories(run) or [run])
    }
    return Result({name: _losses(part) for name, part in parts.items()},
                  {name: load_file(part.model / "model.safetensors") for name, part in parts.items()},
                  {name: forwarded(part) for name, part in parts.items() if part.trackers.exists()})  # fmt: skip


def forwarded(run: RunDirectory) -> list[tuple[int, str]]:
    """Step and name of each loss that TensorBoard shows, in order: a restart drops those from its step on."""
    shown: list[tuple[int, str]] = []
    for each in records_of_tensorboard(run):
        if "session_log" in each:
            shown = [point for point in shown if point[0] < each["step"]]
        names = [value["tag"] for value in each.get("summary", {}).get("value", [])]
        shown += [(each["step"], name) for name in names if name in ("train/loss", "eval/loss")]
    return sorted(shown)


def _losses(run: RunDirectory) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_events(run.events) if event["kind"] == "step"}


def finish(place: Place, scenario: Scenario) -> list[str]:
    """Do what a user would: wait for engines that live, resume what has ended early, start again what was never made.
    Returns what stands in the way."""
    for _ in range(2):
        for run in place.found():
            if summarise(run).status == "queued" and scenario.disturbed is not queue:
                place.call("queue", "start")  # of a killed command: its runs wait in the queue, or were never queued
            if summarise(run).status != "queued":
                place.call("wait", run.path.name)
            if summarise(run).status != "done" and (scenario.disturbed is not queue or not waits(place, run)):
                ended = place.call("resume", run.path.name)
                if ended.code != 0:
                    return [f"resume ends with {ended.code}: {ended.err[-600:]}"]
        if len(place.found()) >= scenario.runs and all(summarise(run).status == "done" for run in place.found()):
            break
        (scenario.disturbed if scenario.disturbed in (queue, sweep) else train)(place)
    if scenario.more == TRACKED:
        sync(place)
    if scenario.disturbed in (evaluate, sync):
        scenario.disturbed(place)
        if place.ended[-1].code != 0:
            return [f"{place.ended[-1].words[0]} again ends with {place.ended[-1].code}: {place.ended[-1].err[-600:]}"]
    return [f"{run.name} is {summarise(run).status}" for run in place.found() if summarise(run).status != "done"]


def let_time_pass(place: Place) -> None:
    """Date back the files by which a run whose engine was killed counts as running for a quarter of a minute, and run
    directories in the making, which are removed after a day."""
    for name in ("events.jsonl", "engine.json"):
        for file in place.runs.rglob(name):
            with suppress(FileNotFoundError):
                os.utime(file, (long_ago := time.time() - 2 * STALE_SECONDS, long_ago))
    for draft in place.runs.glob(".new-*"):
        os.utime(draft, (long_ago := time.time() - 2 * OLD_DRAFT_SECONDS, long_ago))


def let_drafts_age(place: Place) -> None:
    """Date back what a killed process was writing: the next engine of a run removes it after a minute."""
    for draft in place.runs.rglob(".*.tmp"):
        with suppress(FileNotFoundError):
            os.utime(draft, (long_ago := time.time() - 2 * ABANDONED_SECONDS, long_ago))


def waits(place: Place, run: RunDirectory) -> bool:
    """Whether a run waits in the queue."""
    return run.name in Queue(place.runs).read().waiting


def complaints(place: Place, scenario: Scenario, error: str, reference: Result) -> list[str]:
    """What is wrong after a fault, in words."""
    wrong = []
    for ended in place.ended:
        if "Traceback" in ended.err or "Traceback" in ended.out or "unexpected" in ended.err:
            wrong.append(f"{ended.words[0]} ends with {ended.code} and a defect's words: {ended.err[-900:]}")
        elif ended.code not in (0, -9, 130) and error != "killed" and "fix:" not in ended.out + ended.err:
            wrong.append(f"{ended.words[0]} ends with {ended.code} and no fix: {(ended.out + ended.err)[-600:]!r}")
    for run in place.found():
        unsound = [each for each in find_checkpoints(run.checkpoints) if damage(each)]
        wrong += [f"{run.name}: {each.path.name} {damage(each)}" for each in unsound]
    stuck = finish(place, scenario)
    if not stuck:
        count = len({stem(run) for run in place.found()})
        stuck = result_of(place).differs(reference) if count == scenario.runs else [f"there are {count} runs"]
    wrong += stuck
    return wrong + debris(place)


def debris(place: Place) -> list[str]:
    """Drafts that nothing will ever remove. Those of the queue go at its next change."""
    if (place.runs / ".queue").exists():
        Queue(place.runs).clear_worker()
    return [f"left behind: {path.relative_to(place.folder)}" for path in place.runs.rglob(".*")
            if path.name not in (".trash", ".queue") and not path.name.endswith(".lock")]  # fmt: skip


def main() -> int:
    """Cut every write of every scenario, print a table; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, help="faults of each scenario, instead of every one")
    parser.add_argument("--call-sites", action="store_true", help="of each call site and error one fault")
    parser.add_argument("--only", help="one scenario")
    parser.add_argument("--seed", type=int, default=20261124)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tunedeck-writes-") as folder:
        disk = preload(Path(folder))
        os.environ["PYTHONPATH"] = str(PACKAGES)  # a look-alike of tensorboard
        os.environ.update(HF_HOME=str(Path(folder, "hub")), HF_HUB_OFFLINE="1")
        fork_server.install()
        wrong = 0
        for scenario in SCENARIOS:
            if asked.only in (None, scenario.name):
                wrong += cut(scenario, disk, Path(folder), asked)
        fork_server.close()
    return 1 if wrong else 0


@dataclass(frozen=True)
class Point:
    """A fault: the change that it happens to, and its error. With a call site, it counts for that alone."""

    number: int
    error: str
    site: CallSite | None = None


def points(sites: dict[int, CallSite], asked: argparse.Namespace, draw: random.Random) -> list[Point]:
    """Which faults are tried: all, a sample, or of each call site and error one, drawn by chance."""
    if asked.call_sites:
        numbers = {site: [number for number, each in sites.items() if each == site] for site in sites.values()}
        return [Point(draw.choice(those), error, site) for site, those in numbers.items() for error in ERRORS]
    every = [Point(number, error) for number in sites for error in ERRORS]
    return every if asked.sample is None else draw.sample(every, min(asked.sample, len(every)))


def cut(scenario: Scenario, disk: FailingDisk, folder: Path, asked: argparse.Namespace) -> int:
    """Cut the writes of one scenario; returns how often something was wrong."""
    prepared = folder / "prepared"  # put where it was made each time: its files name that place
    scenario.before(scenario.place(folder / "place"))
    (folder / "place").rename(prepared)
    whole = scenario.place(Path(shutil.copytree(prepared, folder / "place")))
    with disk.failing(whole.runs, 0, 0):
        scenario.disturbed(whole)
    bad = [ended for ended in whole.ended if ended.code]
    assert not bad, bad
    reference, sites = result_of(whole), disk.call_sites()
    assert len(sites) == disk.count
    shutil.rmtree(whole.folder)
    draw = random.Random(f"{asked.seed} {scenario.name}")
    chosen = points(sites, asked, draw)
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    reached: set[tuple[CallSite | None, str]] = set()
    began = time.monotonic()
    for point in chosen:
        for number in again(point, sites, draw):
            if point.site is not None and (point.site, point.error) in reached:
                break
            place = scenario.place(Path(shutil.copytree(prepared, folder / "place")))
            found = complaints_at(place, scenario, disk, Point(number, point.error), reference)
            reached.add((disk.call_sites().get(number), point.error))
            tried[point.error] += 1
            lost[point.error] += bool(found)
            for text in found:
                say(f"  {scenario.name}, {point.error} at change {number} ({disk.what}): {text}")
            shutil.rmtree(place.folder, ignore_errors=True)
        if sum(tried.values()) % 50 == 0:
            say(f"  {scenario.name}: {sum(tried.values())} faults, {time.monotonic() - began:.0f} s")
    shutil.rmtree(prepared)
    for error, times in sorted(tried.items()):
        record("writes", f"{scenario.name}: {error}", times, lost[error])
    words = ", ".join(f"{error} {times}" for error, times in sorted(tried.items()))
    verdict = f"{lost.total()} WRONG" if lost.total() else "nothing lost"
    say(f"{scenario.name:<16} {tried.total():>6} of {len(sites) * len(ERRORS)} faults ({words})   {verdict}   "
        f"{time.monotonic() - began:.0f} s")  # fmt: skip
    if asked.call_sites:
        met = sum((point.site, point.error) in reached for point in chosen)
        say(f"{'':<16} {met:>6} of {len(chosen)} call sites and errors")
    return lost.total()


def again(point: Point, sites: dict[int, CallSite], draw: random.Random) -> Iterator[int]:
    """The change of a point; for a call site others of it, too: how processes take turns moves the numbers a little."""
    yield point.number
    if point.site is not None:
        others = [number for number, each in sites.items() if each == point.site]
        yield from (draw.choice(others) for _ in range(ATTEMPTS - 1))


def complaints_at(place: Place, scenario: Scenario, disk: FailingDisk, point: Point, reference: Result) -> list[str]:
    """What is wrong after one fault, in words."""
    with disk.failing(place.runs, point.number, ERRORS[point.error]):
        scenario.disturbed(place)
    if not scenario.profile:  # a launcher of ranks needs its time to start them again
        let_time_pass(place)
    let_drafts_age(place)
    return complaints(place, scenario, point.error, reference)


if __name__ == "__main__":
    sys.exit(main())
