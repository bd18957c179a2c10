"""Two "machines" on one: network namespaces joined by a cable, each with a host name that resolves to 127.0.1.1.

Not a test module. Needs the rights of root and the programs of iproute2 and util-linux; where they are missing,
`machines` skips the test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Machine:
    """One of the two: `holder` is the process that keeps its namespaces."""

    name: str
    address: str
    holder: int

    def command(self, *words: str) -> list[str]:
        """`words` as a command that runs on this machine."""
        return ["nsenter", "-t", str(self.holder), "-n", "-m", "-u", *words]

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on this machine."""
        return subprocess.Popen(self.command(*words), text=True, **options)

    def processes(self) -> list[int]:
        """The ids of all processes on this machine, oldest first, except for the holder."""
        here = os.readlink(f"/proc/{self.holder}/ns/net")
        found = []
        for pid in psutil.pids():
            with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
                if pid != self.holder and os.readlink(f"/proc/{pid}/ns/net") == here:
                    found.append(pid)
        return sorted(found)

    def kill_processes(self) -> None:
        """Send SIGKILL to all processes on this machine, parents first, and wait until they are gone. The machine
        itself stays reachable."""
        found = self.processes()
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while set(found) & set(self.processes()):
            time.sleep(0.01)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """While the block runs, nothing that this machine sends reaches the other one, and the reverse."""
        subprocess.run(self.command("ip", "link", "set", "cable", "down"), check=True)
        try:
            yield
        finally:
            subprocess.run(self.command("ip", "link", "set", "cable", "up"), check=True)


@contextmanager
def machines(folder: Path) -> Iterator[list[Machine]]:
    """Two machines that reach each other at ADDRESSES; their files are shared, except for /etc/hosts. On the first, its
    own name resolves to 127.0.1.1, on the second the first one's name resolves to its address."""
    holders: list[subprocess.Popen[str]] = []
    try:
        for number in range(2):
            hosts = folder / f"hosts-{number}"
            hosts.write_text(_hosts(number))
            script = f"hostname node-{number} && mount --bind {hosts} /etc/hosts && echo up && exec sleep 600"
            holder = subprocess.Popen(
                ["unshare", "--net", "--mount", "--uts", "sh", "-c", script],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            holders.append(holder)
            if holder.stdout is None or holder.stdout.readline() != "up\n":
                pytest.skip("no network namespaces here")
        pair = [Machine(f"node-{n}", ADDRESSES[n], holders[n].pid) for n in range(2)]
        _join(pair)
        try:
            yield pair
        finally:
            # Twice: the first machine may have started something on the second one meanwhile.
            for machine in (*pair, *pair):
                machine.kill_processes()
    except FileNotFoundError as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for holder in holders:
            with suppress(ProcessLookupError):
                holder.kill()
            holder.wait()


def _hosts(number: int) -> str:
    other = 1 - number
    return f"127.0.0.1 localhost\n127.0.1.1 node-{number}\n{ADDRESSES[other]} node-{other}\n"


def _join(pair: Sequence[Machine]) -> None:
    one, other = pair
    cable = ["ip", "link", "add", "cable", "netns", str(one.holder), "type", "veth"]
    if subprocess.run([*cable, "peer", "name", "cable", "netns", str(other.holder)], check=False).returncode:
        pytest.skip("no network namespaces here")
    for machine in pair:
        for words in (f"addr add {machine.address}/24 dev cable", "link set cable up", "link set lo up"):
            subprocess.run(machine.command("ip", *words.split()), check=True)
