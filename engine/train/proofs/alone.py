"""Runs the proofs of a run without training it. `tunedeck doctor --gpus` does so in a separate process for each card.

Try: `tunedeck doctor --gpus -p demo`
"""

from __future__ import annotations

from engine.device import open_device
from engine.device.determinism import deterministic_kernels
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.spec.load import load_run_spec
from engine.train.monitor.journal import Journal
from engine.train.proofs.prove import prove
from engine.train.recovery.oom_report import oom_reporter
from engine.train.setup import set_up


def prove_alone(place: RunDirectory) -> None:
    """Set up the run in `place`, run all its proofs without using results of earlier runs, and write the outcomes to
    its journal. Nothing is trained.

    Raises:
        TunedeckError: the run cannot be set up, or a proof left the device unusable.
    """
    spec = load_run_spec(place.run_toml, own=True)
    device = open_device(spec)
    deterministic = deterministic_kernels(spec.recipe.train.deterministic, device.kind)
    with EventWriter(place) as writer, device.activate(), deterministic:
        journal = Journal(writer)
        prove(set_up(spec, device, journal, oom_reporter(journal, device)), journal, afresh=True)
