"""Ranks on several machines connect over the interface that leads there, whatever the machines' names resolve to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.distributed.rendezvous import choose_interface, interface_of, source_address
from tests.distributed.namespaces import ADDRESSES, machines

LIMIT_SECONDS = 240.0

VOTE = """
import os, socket
from engine.distributed.ranks import process_group

with process_group(60.0, "cpu") as ranks:
    print(ranks.all_gather_object(socket.gethostname()), os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
"""


@pytest.mark.torture  # `tests/distributed/test_two_machines.py` has whole runs of such machines
@pytest.mark.parametrize("master", [ADDRESSES[0], "node-0"])
def test_machines_whose_names_resolve_to_loopback_vote(master: str, tmp_path: Path) -> None:
    with machines(tmp_path) as pair:
        ranks = []
        for number, machine in enumerate(pair):
            place = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": "29511"}
            environment = {**os.environ, **place}
            ranks.append(
                machine.start(
                    sys.executable, "-c", VOTE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )
        for rank in ranks:
            out, complaint = rank.communicate(timeout=LIMIT_SECONDS)
            assert rank.returncode == 0, complaint[-2000:]
            assert out == "['node-0', 'node-1'] cable\n"


def test_one_machine_keeps_what_gloo_chooses() -> None:
    assert choose_interface(["127.0.0.1", "127.0.0.1"], 1) is None
    assert choose_interface(["10.1.2.3", "10.1.2.3"], 0) is None
    assert choose_interface(["", "127.0.0.1"], 0) is None


def test_addresses_and_their_interfaces() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("no-such-host.invalid") == ""
    assert interface_of("127.0.0.1") is not None and interface_of("192.0.2.77") is None
