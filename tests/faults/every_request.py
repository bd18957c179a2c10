"""Every request of `tunedeck push` fails once: the hub drops the connection, hangs, redirects, sends half an answer,
garbage or an error of its own, or its answer is lost after it did what it was asked for, from this request on; or the
command is killed or stopped there.

Then the repository has the whole result or nothing of it, and the same command again makes it whole. `every_write.py`
runs this with the others, as the scenario "push".
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

from tests.faults.scenarios import Place, train
from tests.handover.hub_server import FAULTS, TOKEN, Fault, Hub
from tests.torture_table import record

STOPPED_SECONDS = 0.3
SIGNALS = ("killed", "stopped")
REPOSITORY = "me/capitals"

say = partial(print, flush=True)


def environment(hub: Hub) -> dict[str, str]:
    """Variables that send a process's pushes to this hub. It reads them when it starts."""
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


def cut_requests(hub: Hub, folder: Path, seed: int, sample: int | None) -> int:
    """Let every request of a push fail in every way, or a sample; returns how often something was wrong."""
    prepared, began = Place(folder / "place"), time.monotonic()
    train(prepared)
    hub.requests = 0
    push(prepared)
    assert not any(ended.code for ended in prepared.ended), prepared.ended
    whole = dict(hub.repositories.pop(REPOSITORY).files)
    every = [(number, kind) for number in range(1, hub.requests + 1) for kind in (*FAULTS, *SIGNALS)]
    draw = random.Random(f"{seed} push")
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for number, kind in every if sample is None else draw.sample(every, min(sample, len(every))):
        hub.repositories.clear()
        hub.large.clear()
        found = complaints(hub, prepared, number, kind, whole)
        tried[kind] += 1
        lost[kind] += bool(found)
        for text in found:
            say(f"  push, {kind} at request {number}: {text}")
    for kind, times in sorted(tried.items()):
        record("writes", f"push: {kind}", times, lost[kind])
    words = ", ".join(f"{kind} {times}" for kind, times in sorted(tried.items()))
    verdict = f"{lost.total()} WRONG" if lost.total() else "nothing lost"
    seconds = time.monotonic() - began
    say(f"{'push':<16} {tried.total():>6} of {len(every)} faults ({words})   {verdict}   {seconds:.0f} s")
    shutil.rmtree(prepared.folder)
    return lost.total()


IMPATIENT = ("-m", "tests.faults.impatient")
"""Tunedeck with limits of seconds: a hub that hangs costs ten minutes of a user's time."""


def push(place: Place) -> None:
    place.call("push", "last", REPOSITORY, "--yes")


def complaints(hub: Hub, place: Place, number: int, kind: str, whole: dict[str, bytes]) -> list[str]:
    """What is wrong after one fault, in words."""
    fault = Fault(kind if kind in FAULTS else "", number)
    if kind == "killed":
        fault.call = lambda: os.kill(place.running.pid, signal.SIGKILL)
    elif kind == "stopped":
        fault.call = lambda: stop_for_a_while(place.running.pid)
    place.ended, hub.requests, hub.fault, hub.strangers = [], 0, fault, []
    try:
        place.call("push", "last", REPOSITORY, "--yes", program=IMPATIENT)
    finally:
        hub.fault = None
        fault.over.set()
    first, wrong = place.ended[0], []
    if "Traceback" in first.err or "unexpected" in first.err:
        wrong.append(f"it ends with a defect's words: {first.err[-700:]}")
    elif first.code and kind != "killed" and "fix:" not in first.err:
        wrong.append(f"it ends with {first.code} and no fix: {first.err[-500:]}")
    if hub.strangers:
        wrong.append("the token was sent where the redirect led")
    there = dict(hub.repositories[REPOSITORY].files) if REPOSITORY in hub.repositories else {}
    if there not in ({}, whole):
        wrong.append(f"the repository has {sorted(there)}")
    if first.code == 0 and there != whole:
        wrong.append("it ends with 0, and the result is not there")
    push(place)
    if place.ended[-1].code:
        wrong.append(f"again it ends with {place.ended[-1].code}: {place.ended[-1].err[-500:]}")
    elif hub.repositories[REPOSITORY].files != whole:
        wrong.append("again it sends something else")
    return wrong


def stop_for_a_while(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(STOPPED_SECONDS, lambda: os.kill(pid, signal.SIGCONT))
    timer.daemon = True
    timer.start()
