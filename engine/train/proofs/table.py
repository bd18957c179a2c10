"""The table of all proofs, in the order in which they are run.

Try: `tunedeck doctor --gpus -p demo`
"""

from __future__ import annotations

from engine.train.proofs import (
    adapter,
    attention,
    compiled,
    copies,
    determinism,
    dropout,
    loss,
    memory,
    nf4,
    optimizer,
    syncs,
)
from engine.train.proofs.ranks.table import AT_START, BY_DOCTOR
from engine.train.proofs.record import Proof

ON_A_DEVICE: tuple[Proof, ...] = (
    Proof("allocator", memory.prove_allocator, memory.fall_back, memory.applies),
    Proof("oom_in_backward", memory.prove_backward, memory.fall_back, memory.applies),
    Proof("attention", attention.prove, attention.fall_back, attention.applies, attention.facts),
    Proof("loss", loss.prove, loss.fall_back, loss.applies, loss.facts),
    Proof("adapter", adapter.prove, adapter.fall_back, adapter.applies, adapter.facts),
    Proof("dropout", dropout.prove, dropout.fall_back, dropout.applies, dropout.facts),
    Proof("nf4", nf4.prove, nf4.fall_back, nf4.applies, nf4.facts),
    Proof("optimizer", optimizer.prove, optimizer.fall_back, facts=optimizer.facts),
    Proof("copies", copies.prove, copies.fall_back, facts=copies.facts),
    Proof("host_syncs", syncs.prove, syncs.fall_back, syncs.applies, syncs.facts),
    Proof("determinism", determinism.prove, determinism.fall_back, determinism.applies),
    Proof("compile", compiled.prove, compiled.fall_back, compiled.applies),
)
"""Later proofs may rest on what earlier ones have shown."""
PROOFS = (*AT_START, *ON_A_DEVICE)
"""What a run makes at its start."""
DOCTOR_PROOFS = (*BY_DOCTOR, *ON_A_DEVICE)
"""What `tunedeck doctor --gpus` makes with a rank on each device."""
