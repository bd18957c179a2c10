"""A small engine process for the tests of following, stopping and killing: real events, a real claim, no model.

Run as `python child_engine.py DIR MODE`. MODE finish writes five steps and ends with 0; late does the same and is
killed before its process ends; fail ends with 5; vanish ends with 3 and records no end. MODE obey writes a step every
hundredth of a second until a pause or stop is requested; any other MODE does the same, and ignores requests.
"""

import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.journal.control import ControlInbox
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, heartbeats
from engine.journal.liveness import claim
from tests.journal.event_fields import step_fields


def main(path: str, mode: str) -> int:
    directory = RunDirectory(Path(path))
    with claim(directory), EventWriter(directory) as writer, heartbeats(writer):
        writer.write("run_started", run=directory.name, pid=os.getpid(), world_size=1, versions={})
        writer.write("stage_started", max_steps=5)
        if mode in ("finish", "late"):
            for step in range(1, 6):
                writer.write("step", **step_fields(step))
            writer.write("run_finished", status="done", exit_code=0, result="adapter", samples_lost=0)
            if mode == "late":
                os.kill(os.getpid(), signal.SIGKILL)
            return 0
        if mode == "fail":
            writer.write("run_finished", status="failed", exit_code=5, result=None, error="nothing to train on")
            return 5
        if mode == "vanish":
            sys.stderr.write("the last thing it said\n")
            return 3
        return until_told(directory, writer, obey=mode == "obey")


def until_told(directory: RunDirectory, writer: EventWriter, *, obey: bool) -> int:
    inbox, pause = ControlInbox(directory), threading.Event()
    step = 0
    while True:
        step += 1
        writer.write("step", **step_fields(step))
        for asked in inbox.poll():
            writer.write("control", request=asked.name, accepted=True, reason="")
            if obey and asked.name != "checkpoint":
                status = {"stop": "stopped", "pause": "paused"}[asked.name]
                writer.write("run_finished", status=status, exit_code=130, result=None)
                return 130
        pause.wait(0.01)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
