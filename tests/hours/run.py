"""Uses a chat, a follower and the console for as many events as in hours, and prints the memory after each tenth.

A chat of 2,000 turns is shown and continued; a follower forwards 20,000 events a second of a run; the console lists
both and shows the run. Nothing waits: an hour takes a minute or two. Memory may grow until half of the events, and
must be flat after that.

Run: `python -P -m tests.hours.run`; `--share 0.1` takes a tenth of the events.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import FOLDERS
from tests.journal.event_fields import step_fields
from tests.torture_table import record

TURNS, TOKENS = 2_000, 120
SECONDS, EVENTS_PER_SECOND = 100, 20_000
"""Two million events: all that may be kept of them is of the newest thousands."""

MOST_GROWTH_BYTES = 24 << 20
"""Of the second half: for freed memory that the allocator keeps."""

TENTHS = 10

say = partial(print, flush=True)


def chat(folder: Path, share: float) -> Iterator[None]:
    """The state of a chat in its own process and in the console, from the events that an answer has."""
    from engine.journal.chats import ChatState, conversations

    ours, shown = ChatState(), ChatState()
    for state in (ours, shown):
        state.add([{"kind": "chat_ready", "models": ["a"], "settings": {}}])
    words = [f" word{number}" for number in range(TOKENS)]
    pieces, text = [[word, 0.5] for word in words], "".join(words)
    turns = round(TURNS * share)
    for turn in range(turns):
        prompt = "x" * min(16_000, 400 * turn)  # cut to what fits the model
        events: list[dict[str, Any]] = [
            {"kind": "chat_question", "text": f"question {turn}"},
            {"kind": "chat_prompt", "model": "a", "text": prompt},
            {"kind": "chat_tokens", "model": "a", "text": text, "pieces": pieces},
            {"kind": "chat_answer", "model": "a", "text": text, "stopped_by": "end", "seconds": 1.0, "count": TOKENS},
            {"kind": "chat_answered"},
        ]
        for state in (ours, shown):
            state.add(json.loads(json.dumps(events)))
        if (turn + 1) % max(1, turns // TENTHS) == 0:
            assert len(list(conversations(shown))) == 1
            yield


def follower(folder: Path, share: float) -> Iterator[None]:
    """A follower and the console's view of a run that writes 20,000 events a second."""
    from engine.extras.trackers import follow
    from engine.journal.directory import RunDirectory
    from engine.journal.forwarding import Record, write_record
    from tests.hours.sink import Sink
    from tests.journal.run_directories import new_run
    from tui.run.listing import RunList
    from tui.run.watch import RunWatch

    directory: RunDirectory = new_run(folder / "runs", "fast")
    directory.trackers.mkdir()
    write_record(directory, "sink", Record())
    tail = follow._Follower(directory, "sink", Record(), Sink(), refers=False)
    watch, runs = RunWatch(directory), RunList.of_folder(folder / "runs")
    seconds, seq, step = round(SECONDS * share), 0, 0
    with directory.events.open("ab", buffering=1 << 20) as file:
        for second in range(seconds):
            for _ in range(EVENTS_PER_SECOND):
                seq, step = seq + 1, step + 1
                file.write(_line(seq, step))
            file.flush()
            tail._forward_new(0)
            watch.read_more(seconds=60.0)
            runs.refresh(seconds=60.0)
            if (second + 1) % max(1, seconds // TENTHS) == 0:
                assert watch.step > step - 200 and tail._seq == seq
                yield


def _line(seq: int, step: int) -> bytes:
    head = b'{"seq":%d,"time":"2026-11-20T20:58:00Z","kind":' % seq
    if step % 2_000 == 0:
        samples = b'[{"prompt":"%s","answer":"b"}]' % (b"a" * 400)
        return head + b'"eval","stage":"","rank":0,"step":%d,"metrics":{"loss":0.5},"samples":%s}\n' % (step, samples)
    if step % 150 == 0:
        return head + b'"warning","stage":"","rank":0,"code":"gradient_spike","text":"t","fix":"f","step":%d}\n' % step
    return head + _STEP.replace(b'"step":1,', b'"step":%d,' % step, 1) + b"\n"


_STEP = json.dumps(
    {"kind": "step", "stage": "", "rank": 0, **step_fields(1, loss=2.5)}, separators=(",", ":")
).encode().removeprefix(b'{"kind":')  # fmt: skip


def grown(name: str, use: Callable[[Path, float], Iterator[None]], share: float) -> int:
    """Use it in a folder of its own; returns by how many bytes memory grew in the second half."""
    process = psutil.Process()
    seen: list[int] = []
    with tempfile.TemporaryDirectory(prefix="tunedeck-hours-") as folder:
        for _ in use(Path(folder), share):
            seen.append(process.memory_info().rss)
            say(f"{name:<30}{len(seen):>3} of {TENTHS}{seen[-1] / 2**20:>10.1f} MiB")
    return seen[-1] - seen[len(seen) // 2 - 1]


def main() -> int:
    """Use everything; 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--share", type=float, default=1.0, help="of the events")
    share, lost = parser.parse_args().share, 0
    with tempfile.TemporaryDirectory(prefix="tunedeck-hours-home-") as home:
        os.environ.update({name: str(Path(home, name.lower())) for name in FOLDERS}, HF_HUB_OFFLINE="1")
        for name, use in (("a chat of 2,000 turns", chat), ("follower and console", follower)):
            more = grown(name, use, share)
            beyond = more > MOST_GROWTH_BYTES
            lost += beyond
            record("hours of use", name, 1, int(beyond))
            say(f"{name:<30}grew by {more / 2**20:.1f} MiB in the second half: {'TOO MUCH' if beyond else 'flat'}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
