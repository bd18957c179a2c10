"""How ranks find each other: the network interface between machines, and a rendezvous over the launcher's store."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import PrefixStore, Store

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of gloo's interface; if the user has set it, it stays as it is."""

ANY_PORT = 9
"""No packet is sent to it: connecting a datagram socket only chooses the route."""


def settle_interface(store: Store, rank: int, size: int, master: str) -> None:
    """Set GLOO_SOCKET_IFNAME, unless it is set or all ranks are on one machine; `master` is rank 0's host. All ranks
    call this. RuntimeError: one does not within the store's time limit. gloo listens at the address that the machine's
    own name resolves to: on Debian and Ubuntu 127.0.1.1, which no other machine can reach. So each rank names the
    interface of the address from which it reaches rank 0's machine."""
    store.set(f"address/{rank}", source_address(master))
    addresses = [store.get(f"address/{each}").decode() for each in range(size)]
    name = choose_interface(addresses, rank)
    if name is not None:
        os.environ.setdefault(VARIABLE, name)


def choose_interface(addresses: Sequence[str], rank: int) -> str | None:
    """The interface on the way to rank 0, given all ranks' addresses; None on one machine, or if none is known."""
    reachable = [address for address in addresses if address and not is_loopback(address)]
    if len(set(addresses)) == 1 or not reachable:
        return None
    own = addresses[rank]
    # A rank on rank 0's machine may reach it over loopback: it takes the interface that leads to another machine.
    if not own or is_loopback(own):
        own = source_address(reachable[0])
    return interface_of(own)


def source_address(host: str) -> str:
    """The IP address of this machine from which it reaches `host`; empty if it does not."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str | None:
    """The network interface of this machine with this IP address; None if none has it."""
    for name, held in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in held):
            return str(name)
    return None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


POLL_SECONDS = 0.02


def rendezvous_store(store: Store, rank: int, size: int, limit: timedelta) -> Store:
    """A part of `store` under a prefix that only the ranks of this start know. All `size` ranks call this.
    RuntimeError: not all came in time, or the store is gone. A launcher that restarts its ranks may keep the store of
    the first start, and gloo would connect to the ended processes in it (torch 2.13, torchrun's static rendezvous). The
    number of restarts cannot be the prefix: on several machines each agent counts its own. Requests of ended processes
    are answered, too, which does no harm."""
    name = _publish_name(store, size, limit) if rank == 0 else _ask(store, rank, limit)
    return PrefixStore(name, store)


def _ask(store: Store, rank: int, limit: timedelta) -> str:
    word = secrets.token_hex(8)
    store.set(f"asks/{rank}", word)
    store.wait([f"answer/{word}"], limit)
    name: str = store.get(f"answer/{word}").decode()
    store.add(f"{name}/came", 1)
    return name


def _publish_name(store: Store, size: int, limit: timedelta) -> str:
    name = f"start-{secrets.token_hex(8)}"
    answered: set[bytes] = set()
    deadline = time.monotonic() + limit.total_seconds()
    while store.add(f"{name}/came", 0) < size - 1:
        for rank in range(1, size):
            if store.check([f"asks/{rank}"]) and (word := store.get(f"asks/{rank}")) not in answered:
                store.set(f"answer/{word.decode()}", name)
                answered.add(word)
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all {size} ranks joined within {limit.total_seconds():.0f} s")
        time.sleep(POLL_SECONDS)
    return name
