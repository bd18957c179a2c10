"""Every write is cut: each change of a file fails once, with each of four errors, and kills once; for processes that
are no runs it also stops them for a while, sets the clock, and takes the runs or the cache away.

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
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.journal.chats import list_chats, read_chat
from engine.journal.checkpoints_on_disk import damage, find_checkpoints
from engine.journal.directory import OLD_DRAFT_SECONDS, RunDirectory
from engine.journal.files import ABANDONED_SECONDS
from engine.journal.liveness import STALE_SECONDS, ProcessIdentity, identify, is_suspended, running_engine
from engine.journal.queue import Queue
from engine.journal.stages import stage_directories
from engine.journal.summary import summarise
from tests import fork_server
from tests.events import read_events
from tests.faults.every_request import cut_requests, environment
from tests.faults.failing_disk import KILL, MOVE, SET_CLOCK, STOP, CallSite, FailingDisk, preload
from tests.faults.scenarios import (
    SCENARIOS,
    TRACKED,
    Place,
    Scenario,
    evaluate,
    queue,
    stem,
    sweep,
    sync,
    train,
    write_programs,
)
from tests.handover.hub_server import serving
from tests.journal.waiting import until
from tests.torture_table import record
from tests.trackers.look_alikes import PACKAGES, records_of_tensorboard

FAULTS = {
    "ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS, "EACCES": errno.EACCES, "killed": KILL,
    "stopped": STOP, "clock set on": SET_CLOCK, "clock set back": SET_CLOCK, "runs moved": MOVE, "cache deleted": MOVE,
}  # fmt: skip
JUMP_SECONDS = 3 * 24 * 3600
BLOCKED_SECONDS = 2.0
"""After which a second command is taken to wait for the one that is stopped."""
ATTEMPTS = 3
"""To reach a call site: the n-th change is sometimes one of another."""

say = partial(print, flush=True)


@dataclass(frozen=True)
class Result:
    """What must be equal: losses of each step and weights of each run, by stage."""

    losses: dict[str, dict[int, float]]
    weights: dict[str, dict[str, torch.Tensor]]
    forwarded: dict[str, list[tuple[int, str]]]
    files: dict[str, str]
    """What a process that is no run wrote."""

    def differs(self, other: Result) -> list[str]:
        """In words; empty if both are equal to the bit."""
        wrong = [] if self.losses == other.losses else [f"losses {self.losses} are not {other.losses}"]
        if self.forwarded != other.forwarded:
            wrong.append(f"the tracker has {self.forwarded} and not {other.forwarded}")
        for name, tensors in other.weights.items():
            own = self.weights.get(name, {})
            same = own.keys() == tensors.keys() and all(torch.equal(own[key], tensors[key]) for key in tensors)
            wrong += [] if same else [f"the weights of {name} differ"]
        names = sorted(self.files.keys() | other.files.keys())
        different = [name for name in names if self.files.get(name) != other.files.get(name)]
        return wrong + [f"{name}: {self.files.get(name)}, not {other.files.get(name)}" for name in different]


def result_of(place: Place, scenario: Scenario) -> Result:
    """Read what a place has: the result of all runs, and what another process wrote."""
    parts = {
        f"{stem(run)}/{part.path.name if part is not run else ''}": part
        for run in place.found()
        for part in (stage_directories(run) or [run])
    }
    return Result({name: _losses(part) for name, part in parts.items()},
                  {name: _weights(part) for name, part in parts.items()},
                  {name: forwarded(part) for name, part in parts.items() if part.trackers.exists()},
                  scenario.files(place) if scenario.files else {})  # fmt: skip


def _weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    folder = run.adapter if run.adapter.is_dir() else run.model
    return {f"{file.stem}/{name}": tensor for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()}  # fmt: skip


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
    if scenario.files is not None:
        before = len(place.ended)
        scenario.disturbed(place)
        return [f"{each.words[0]} again ends with {each.code}: {each.err[-600:]}"
                for each in place.ended[before:] if each.code]  # fmt: skip
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


def complaints(
    place: Place, scenario: Scenario, fault: str, reference: Result, *, is_other: bool = False
) -> list[str]:  # fmt: skip
    """What is wrong after a fault, in words. `is_other`: the command wrote into a new runs folder, which is gone."""
    wrong = []
    for ended in place.ended:
        if "Traceback" in ended.err or "Traceback" in ended.out or "unexpected" in ended.err:
            wrong.append(f"{ended.words[0]} ends with {ended.code} and a defect's words: {ended.err[-900:]}")
        elif ended.code not in (0, -9, 130) and fault != "killed" and "fix:" not in ended.out + ended.err:
            wrong.append(f"{ended.words[0]} ends with {ended.code} and no fix: {(ended.out + ended.err)[-600:]!r}")
        elif ended.code and fault.startswith("clock"):
            wrong.append(f"{ended.words[0]} ends with {ended.code}: {ended.err[-600:]}")
    wrong += [] if is_other else untrue(place, scenario, fault, reference)
    for run in place.found():
        unsound = [each for each in find_checkpoints(run.checkpoints) if damage(each)]
        wrong += [f"{run.name}: {each.path.name} {damage(each)}" for each in unsound]
    stuck = finish(place, scenario)
    if not stuck:
        count = len({stem(run) for run in place.found()})
        stuck = [f"there are {count} runs"]
        stuck = stuck if count != scenario.runs else result_of(place, scenario).differs(reference)
    wrong += stuck
    return wrong + debris(place, scenario)


def untrue(place: Place, scenario: Scenario, fault: str, reference: Result) -> list[str]:
    """What a process that is no run has left that is not part of the right result, or has reported and is not there."""
    if scenario.files is None:
        return []
    found, right = scenario.files(place), reference.files
    wrong = [f"left {name}: {value}, not {right.get(name)}" for name, value in found.items()
             if right.get(name) != value]  # fmt: skip
    if scenario.whole and 0 < len(found) < len(right):
        wrong.append(f"left {len(found)} of {len(right)} parts")
    first = place.ended[0]
    reported = first.code == 0 and "fix:" not in first.err and fault != "cache deleted"
    missing = [name for name in right if name not in found] if reported else []
    return wrong + [f"ends with 0 without {name}" for name in missing]


def debris(place: Place, scenario: Scenario) -> list[str]:
    """Drafts that nothing will ever remove. Those of the queue go at its next change."""
    if (place.runs / ".queue").exists():
        Queue(place.runs).clear_worker()
    folder = place.runs if scenario.files is None else place.folder
    drafts = [*folder.rglob(".*"), *folder.rglob("*.part")]
    return [f"left behind: {path.relative_to(place.folder)}" for path in drafts
            if path.name not in (".trash", ".queue", ".chats") and not path.name.endswith(".lock")]  # fmt: skip


def main() -> int:
    """Cut every write of every scenario, print a table; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, help="faults of each scenario, instead of every one")
    parser.add_argument("--call-sites", action="store_true", help="of each call site and error one fault")
    parser.add_argument("--only", action="append", help="a scenario; may be repeated")
    parser.add_argument("--seed", type=int, default=20261124)
    asked = parser.parse_args()
    chosen = [scenario for scenario in SCENARIOS if asked.only is None or scenario.name in asked.only]
    with tempfile.TemporaryDirectory(prefix="tunedeck-writes-") as folder, serving() as hub:
        disk = preload(Path(folder))
        os.environ["PYTHONPATH"] = f"{PACKAGES}:{PACKAGES.with_name('harness')}:{fork_server.ROOT}"
        os.environ["PATH"] = f"{write_programs(Path(folder))}:{os.environ['PATH']}"
        os.environ.update(environment(hub), HF_HOME=str(Path(folder, "hub")))
        fork_server.install()
        wrong = sum(cut(scenario, disk, Path(folder), asked) for scenario in chosen)
        if asked.only is None or "push" in asked.only:
            wrong += cut_requests(hub, Path(folder), asked.seed, asked.sample)
        fork_server.close()
    return 1 if wrong else 0


@dataclass(frozen=True)
class Point:
    """A fault, and the change that it happens to. With a call site, it counts for that alone."""

    number: int
    fault: str
    site: CallSite | None = None


def points(
    scenario: Scenario, sites: dict[int, CallSite], asked: argparse.Namespace, draw: random.Random
) -> list[Point]:  # fmt: skip
    """Which faults are tried: all, a sample, or of each call site and fault one, drawn by chance."""
    if asked.call_sites:
        numbers = {site: [number for number, each in sites.items() if each == site] for site in sites.values()}
        return [Point(draw.choice(those), each, site) for site, those in numbers.items() for each in scenario.faults]
    every = [Point(number, each) for number in sites for each in scenario.faults]
    return every if asked.sample is None else draw.sample(every, min(asked.sample, len(every)))


def cut(scenario: Scenario, disk: FailingDisk, folder: Path, asked: argparse.Namespace) -> int:
    """Cut the writes of one scenario; returns how often something was wrong."""
    prepared = folder / "prepared"  # put where it was made each time: its files name that place
    first = scenario.place(folder / "place")
    scenario.before(first)
    assert not any(ended.code for ended in first.ended), first.ended
    (folder / "place").rename(prepared)
    whole = scenario.place(Path(shutil.copytree(prepared, folder / "place")))
    with disk.failing(whole.folder / scenario.root, 0, 0):
        scenario.disturbed(whole)
    bad = [ended for ended in whole.ended if ended.code]
    assert not bad, bad
    reference, sites = result_of(whole, scenario), disk.call_sites()
    assert len(sites) == disk.count
    assert scenario.files is None or reference.files, whole.ended
    shutil.rmtree(whole.folder)
    draw = random.Random(f"{asked.seed} {scenario.name}")
    chosen = points(scenario, sites, asked, draw)
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    reached: set[tuple[CallSite | None, str]] = set()
    began = time.monotonic()
    for point in chosen:
        for number in again(point, sites, draw):
            if point.site is not None and (point.site, point.fault) in reached:
                break
            place = scenario.place(Path(shutil.copytree(prepared, folder / "place")))
            found = complaints_at(place, scenario, disk, Point(number, point.fault), reference)
            reached.add((disk.call_sites().get(number), point.fault))
            tried[point.fault] += 1
            lost[point.fault] += bool(found)
            for text in found:
                say(f"  {scenario.name}, {point.fault} at change {number} ({disk.what}): {text}")
            shutil.rmtree(place.folder, ignore_errors=True)
        if sum(tried.values()) % 50 == 0:
            say(f"  {scenario.name}: {sum(tried.values())} faults, {time.monotonic() - began:.0f} s")
    shutil.rmtree(prepared)
    for fault, times in sorted(tried.items()):
        record("writes", f"{scenario.name}: {fault}", times, lost[fault])
    words = ", ".join(f"{fault} {times}" for fault, times in sorted(tried.items()))
    verdict = f"{lost.total()} WRONG" if lost.total() else "nothing lost"
    say(f"{scenario.name:<16} {tried.total():>6} of {len(sites) * len(scenario.faults)} faults ({words})   {verdict}   "
        f"{time.monotonic() - began:.0f} s")  # fmt: skip
    if asked.call_sites:
        met = sum((point.site, point.fault) in reached for point in chosen)
        say(f"{'':<16} {met:>6} of {len(chosen)} call sites and faults")
    return lost.total()


def again(point: Point, sites: dict[int, CallSite], draw: random.Random) -> Iterator[int]:
    """The change of a point; for a call site others of it, too: how processes take turns moves the numbers a little."""
    yield point.number
    if point.site is not None:
        others = [number for number, each in sites.items() if each == point.site]
        yield from (draw.choice(others) for _ in range(ATTEMPTS - 1))


def complaints_at(place: Place, scenario: Scenario, disk: FailingDisk, point: Point, reference: Result) -> list[str]:
    """What is wrong after one fault, in words."""
    moved = {"runs moved": (place.runs, place.folder / "elsewhere"),
             "cache deleted": (place.cache, place.folder / "deleted")}.get(point.fault)  # fmt: skip
    jump = -JUMP_SECONDS if point.fault == "clock set back" else JUMP_SECONDS
    watching: AbstractContextManager[list[str]] = nullcontext([])
    if point.fault == "stopped":
        watching = continued(place, scenario, disk)
    root = (place.folder / scenario.root).resolve()
    with disk.failing(root, point.number, FAULTS[point.fault], jump_seconds=jump, moved=moved), watching as seen:
        scenario.disturbed(place)
    wrong, is_other = list(seen), False
    if moved is not None and moved[1].exists():
        is_other = point.fault == "runs moved" and disk.what == f"mkdir {place.runs}"
        wrong += incomplete(place, scenario, reference) if is_other else []
        wrong += put_back(place, *moved, is_other=is_other)
    if not scenario.profile:  # a launcher of ranks needs its time to start them again
        let_time_pass(place)
    let_drafts_age(place)
    return wrong + complaints(place, scenario, point.fault, reference, is_other=is_other)


def incomplete(place: Place, scenario: Scenario, reference: Result) -> list[str]:
    """What is wrong with a runs folder that was made anew: moved before the command first looked for it, the folder is
    one that never was, and what the command was asked for is in the new one, whole, or nothing is."""
    found = scenario.files(place) if scenario.files else {}
    succeeded = place.ended[0].code == 0
    if found != (reference.files if succeeded else {}):
        return [f"ends with {place.ended[0].code}, and a new runs folder has {sorted(found)}"]
    return []


def put_back(place: Place, here: Path, there: Path, *, is_other: bool = False) -> list[str]:
    """Move the runs back to where they were; a deleted cache is gone. Returns what was made in their old place, unless
    the command made another folder there."""
    if here == place.cache:
        shutil.rmtree(there)
        return []
    made = [str(path.relative_to(place.folder)) for path in here.rglob("*")] if here.exists() else []
    shutil.rmtree(here, ignore_errors=True)
    there.rename(here)
    return [f"made where the runs were before: {', '.join(made)}"] if made and not is_other else []


@contextmanager
def continued(place: Place, scenario: Scenario, disk: FailingDisk) -> Iterator[list[str]]:
    """Once the fault has stopped a process: look at the place from outside, as if hours had passed, begin the same
    again beside it, and let the stopped process go on. Yields what was wrong, known after the block."""
    wrong: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not disk.pid and not over.wait(0.01):
            pass
        stopped = identify(disk.pid) if disk.pid else None
        if stopped is None:
            return
        until(lambda: is_suspended(stopped))
        try:
            let_time_pass(place)
            let_drafts_age(place)
            wrong.extend(called_dead(place, stopped))
            for words in (["runs"], ["chat", "--list"], ["queue", "list"]):
                if (ended := place.call(*words)).code:
                    wrong.append(f"{words} ends with {ended.code}: {ended.err}")
            second = threading.Thread(target=scenario.beside, args=(place,))
            second.start()
            second.join(BLOCKED_SECONDS)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        second.join()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield wrong
    finally:
        over.set()
        thread.join()


def called_dead(place: Place, stopped: ProcessIdentity) -> list[str]:
    """Runs and chats that count as ended though their process is stopped alone."""
    runs = [run for run in place.found() if running_engine(run) == stopped]
    chats = [chat for chat in list_chats(place.runs) if running_engine(chat) == stopped]
    return [f"{run.name} is {summarise(run).status}" for run in runs if summarise(run).status != "running"] + [
        f"chat {chat.name} is ended" for chat in chats if read_chat(chat).status == "ended"
    ]


if __name__ == "__main__":
    sys.exit(main())
