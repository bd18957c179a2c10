"""Chooses the network interface over which ranks on several machines connect (gloo).

gloo listens at the address that the machine's own name resolves to, and tells it to the other ranks. On Debian and
Ubuntu that is 127.0.1.1, which no other machine can reach. So the ranks tell each other the addresses from which they
reach rank 0's machine, and each names the interface of its own address to gloo. A rank on rank 0's machine, which may
reach it over loopback, takes the interface that leads to another machine.

Try: `pytest tests/distributed/test_interface.py`
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

import psutil
from torch._C._distributed_c10d import Store

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of gloo's interface; if the user has set it, it stays as it is."""

ANY_PORT = 9
"""No packet is sent to it: connecting a datagram socket only chooses the route."""


def settle_interface(store: Store, rank: int, size: int, master: str) -> None:
    """Set the environment variable GLOO_SOCKET_IFNAME for this rank, unless it is set or all ranks are on one machine.
    All ranks call this. `size` is the number of ranks, `master` the host of rank 0. Raises RuntimeError if a rank does
    not call it within the store's time limit."""
    store.set(f"address/{rank}", source_address(master))
    addresses = [store.get(f"address/{each}").decode() for each in range(size)]
    name = choose_interface(addresses, rank)
    if name is not None:
        os.environ.setdefault(VARIABLE, name)


def choose_interface(addresses: Sequence[str], rank: int) -> str | None:
    """The interface for `rank`, given the addresses from which all ranks reach rank 0's machine; None if all are on one
    machine, or none is known."""
    reachable = [address for address in addresses if address and not is_loopback(address)]
    if len(set(addresses)) == 1 or not reachable:
        return None
    own = addresses[rank]
    if not own or is_loopback(own):
        own = source_address(reachable[0])
    return interface_of(own)


def source_address(host: str) -> str:
    """The IP address of this machine from which it reaches `host`; empty if it does not reach it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def listening_address() -> str:
    """The IP address of this machine at which gloo listens: that of its interface if one is named, else what the
    machine's own name resolves to; empty if there is none."""
    if name := os.environ.get(VARIABLE):
        held = psutil.net_if_addrs().get(name, [])
        return next((str(each.address) for each in held if each.family == socket.AF_INET), "")
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def interface_of(address: str) -> str | None:
    """The name of the network interface of this machine that has the IP address `address`; None if none has it."""
    for name, held in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in held):
            return str(name)
    return None


def is_loopback(address: str) -> bool:
    """Whether the IP address `address` can be reached from this machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
