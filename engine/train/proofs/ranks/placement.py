"""Proof: every rank has a card of its own, and ranks on other machines can reach it.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

import socket

import torch

from engine.device.base import Device
from engine.distributed.interface import VARIABLE, is_loopback, listening_address
from engine.errors import EnvironmentProblem
from engine.train.proofs.ranks.exchange import exchange
from engine.train.proofs.record import DisprovedError
from engine.train.setup import TrainingSetup


def prove(setup: TrainingSetup) -> str:
    """Compare the cards and addresses of all ranks. All ranks call this; it votes. Returns what was shown, in a few
    words. Raises DisprovedError on all ranks if two work on one card, or if there are ranks on several machines and
    one listens at an address that the others cannot reach."""
    ranks, device = setup.context.ranks, setup.context.device
    card = card_of(device) or f"rank {ranks.rank}"
    told = exchange(ranks, [card, socket.gethostname(), listening_address()])
    for rank, (card, _, _) in enumerate(told):
        first = next(other for other, (its, _, _) in enumerate(told) if its == card)
        if first != rank:
            raise DisprovedError(f"ranks {first} and {rank} both work on card {card}")
    machines = setup.spec.profile.nodes.count
    # Ranks on one host reach each other over loopback, also where the profile has several machines.
    apart = len({host for _, host, _ in told}) > 1
    for rank, (_, host, address) in enumerate(told) if machines > 1 and apart else ():
        if not address or is_loopback(address):
            raise DisprovedError(
                f"rank {rank} on {host} listens at {address or 'no address'}, which other machines cannot reach"
            )
    where = f"{machines} machine{'s' if machines > 1 else ''}"
    return f"{ranks.size} ranks on as many {device.kind} devices of {where}"


def fall_back(setup: TrainingSetup) -> str:
    """Raise EnvironmentProblem, which ends the run, because ranks on one card, or without each other, cannot train."""
    raise EnvironmentProblem(
        "two ranks work on one card, or a rank cannot be reached from other machines",
        expected="a card for each rank, and an address that every machine reaches",
        fix=f"choose cards with --devices; on several machines export {VARIABLE} and NCCL_SOCKET_IFNAME=eth0 or as "
        "`ip addr` names the interface",
    )


def card_of(device: Device) -> str:
    """The UUID of a CUDA card; an empty text for other devices."""
    return str(torch.cuda.get_device_properties(device.torch_device).uuid) if device.kind == "cuda" else ""
