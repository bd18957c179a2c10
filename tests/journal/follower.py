"""A process that starts a child engine and follows it, as `tunedeck train` does: signals need a process of their own.

Run as `python follower.py DIR MODE`. Prints the pid of the child, then the kind of each event; exits with the code that
`follow_engine` returns.
"""

import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.launch.process import follow_engine


def write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(path: str, mode: str) -> int:
    # Tests that a shell runs in the background ignore it, and so would this process; `follow_engine` leaves it at that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup, which a long test run may be started with
    directory = RunDirectory(Path(path))
    child_file = Path(__file__).with_name("child_engine.py")
    with directory.log.open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, str(child_file), path, mode],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    write_line(str(child.pid))
    try:
        return follow_engine(directory, child, on_event=lambda event: write_line(event["kind"]), on_notice=write_line)
    except TunedeckError as error:
        sys.stderr.write(error.render())
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
