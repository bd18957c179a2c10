"""The tables of proofs among ranks: those that a run makes at its start, and those that `tunedeck doctor --gpus` makes.

A run makes what is cheap, and what would otherwise go wrong without a word: cards that two ranks share, inexact
collectives, where weights are sharded a step of two layers, and where sequences are shared attention over them. The
rest takes more time, memory or disk.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

import torch

from engine.budget.predict.shards import SHARDS_SINCE
from engine.spec.installed import older
from engine.train.proofs import collectives
from engine.train.proofs.ranks import (
    bandwidth,
    communicators,
    placement,
    saving,
    sequence,
    sharded_oom,
    sharded_step,
    transfers,
    votes,
)
from engine.train.proofs.record import Proof
from engine.train.setup import TrainingSetup

several = collectives.applies


def shards_here(setup: TrainingSetup) -> bool:
    """Whether there are several ranks, and torch can spread weights over them."""
    return several(setup) and not older(torch.__version__, SHARDS_SINCE)


def recovers_here(setup: TrainingSetup) -> bool:
    """Whether there are several ranks that can recover sharded weights, on devices with a cap."""
    return several(setup) and sharded_oom.applies(setup)


def is_sharded(setup: TrainingSetup) -> bool:
    """Whether this run spreads weights over its ranks."""
    return several(setup) and setup.spec.profile.parallel.strategy == "sharded"


def shares_sequences(setup: TrainingSetup) -> bool:
    """Whether ranks of this run share sequences."""
    return several(setup) and setup.spec.profile.parallel.sequence > 1


PLACEMENT = Proof("placement", placement.prove, placement.fall_back, several, votes=True)
COLLECTIVES = Proof("collectives", collectives.prove, collectives.fall_back, several)
COMMUNICATORS = Proof("communicators", communicators.prove, communicators.fall_back, communicators.applies, votes=True)
SEQUENCE = Proof("sequence", sequence.prove, sequence.fall_back, several, votes=True)

AT_START: tuple[Proof, ...] = (
    PLACEMENT,
    COLLECTIVES,
    COMMUNICATORS,
    Proof("sharded_step", sharded_step.prove_in_brief, sharded_step.fall_back, is_sharded, votes=True),
    SEQUENCE._replace(applies=shares_sequences),
)
BY_DOCTOR: tuple[Proof, ...] = (
    PLACEMENT,
    Proof("transfers", transfers.prove, transfers.fall_back, transfers.applies, votes=True),
    COLLECTIVES,
    Proof("bandwidth", bandwidth.prove, collectives.fall_back, several, votes=True),
    COMMUNICATORS,
    Proof("votes", votes.prove, votes.fall_back, several, votes=True),
    Proof("sharded_step", sharded_step.prove, sharded_step.fall_back, shards_here, votes=True),
    Proof("sharded_oom", sharded_oom.prove, sharded_oom.fall_back, recovers_here, votes=True),
    SEQUENCE,
    Proof("saving", saving.prove, saving.fall_back, several, votes=True),
)
