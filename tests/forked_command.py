"""A `tunedeck` for the shells of tests whose process is forked by the test's own fork server: the command is a small
Python that imports nothing, passes its words and streams to the test over a socket, and ends with the exit code.

As a program (`python forked_command.py SOCKET WORDS...`) it is that command.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

MESSAGE_BYTES = 2**18


def write_command(folder: Path) -> Path:
    """Write an executable `tunedeck` into `folder`; returns the folder, for $PATH. Of a shell's variables only those of
    Tunedeck reach the process: others that differ from the test's own would start a new interpreter."""
    import threading

    here = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.bind(str(folder / "socket"))
    here.listen()
    threading.Thread(target=_answer, args=(here,), daemon=True).start()
    command = folder / "tunedeck"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" "{folder / "socket"}" "$@"\n')
    command.chmod(0o755)
    return folder


def _answer(here: socket.socket) -> None:
    """Run the commands that connect, one after another."""
    import subprocess

    from tests.fork_server import SCRIPT

    while True:
        asking, _ = here.accept()
        with asking:
            message, files, _, _ = socket.recv_fds(asking, MESSAGE_BYTES, 3)
            words, folder, own = json.loads(message)
            done = subprocess.run(
                [sys.executable, "-P", SCRIPT, *words], cwd=folder, env={**os.environ, **own},
                stdin=files[0], stdout=files[1], stderr=files[2], check=False,
            )  # fmt: skip
            for file in files:
                os.close(file)
            asking.send(str(done.returncode).encode())


def main() -> int:
    """Ask the test for a process; returns its exit code, as a shell gives it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(sys.argv[1])
        own = {name: value for name, value in os.environ.items() if name.startswith("TUNEDECK_")}
        socket.send_fds(asking, [json.dumps([sys.argv[2:], os.getcwd(), own]).encode()], [0, 1, 2])
        code = int(asking.recv(MESSAGE_BYTES) or 1)
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
