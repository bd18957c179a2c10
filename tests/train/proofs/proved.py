"""A small setup that a test can break on purpose, and functions that break it or make its proofs. Not a test module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, Journal
from engine.train.run.training_setup import TrainingSetup
from engine.verify.record import Proof, ProofResult
from engine.verify.verify import PROOFS, prove
from tests.train.run_helpers import Workshop, make_spec, write_samples

LORA = {"kind": "lora", "rank": 4, "alpha": 12}


@contextmanager
def small_setup(folder: Path, **tables: Any) -> Iterator[TrainingSetup]:
    """The setup of a small LoRA run on the metered device, which is active inside the block."""
    samples = write_samples(folder / "samples.jsonl")
    with Workshop(make_spec(samples, memory_gib=0.5, **{"method": LORA, **tables}), folder / "run") as setup:
        yield setup


def proved(
    setup: TrainingSetup, folder: Path, *, proofs: Sequence[Proof] = PROOFS, afresh: bool = True
) -> dict[str, ProofResult]:
    """Make `proofs`; returns the results by name. Unless `afresh`, stored results are used."""
    place = folder / "proved"
    place.mkdir(exist_ok=True)
    with EventWriter(RunDirectory(place)) as writer:
        return {result.name: result for result in prove(setup, Journal(writer), proofs=proofs, afresh=afresh)}


def break_attention(setup: TrainingSetup, wrap: Callable[..., Any]) -> None:
    """Replace the run's attention kernel by one that calls `wrap` with the right kernel and that kernel's arguments,
    and returns what `wrap` returns."""
    right = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS.register("broken", lambda *given, **options: wrap(right, *given, **options))
    setup.context.loaded.use_attention("broken")


def wrong_scale(right: Callable[..., Any], *given: Any, scaling: float, **options: Any) -> Any:
    """Attention whose scores are scaled by 1.2 times the right factor."""
    return right(*given, scaling=1.2 * scaling, **options)
