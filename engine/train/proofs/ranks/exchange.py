"""What proofs among ranks tell each other: an outcome of each rank, so that all end at the same place.

Try: `pytest tests/distributed/test_rank_proofs.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.device.oom import classify, clear_frames
from engine.distributed.host_gather import LostRankError
from engine.distributed.ranks import Ranks
from engine.train.proofs.record import DisprovedError

OUT_OF_MEMORY = "out of memory"
"""What `tried` returns for an out-of-memory error."""


def exchange(ranks: Ranks, value: Any) -> list[Any]:
    """Vote, then gather `value` (JSON) of every rank, in the order of ranks. Raises PeerFailedError, LostRankError."""
    ranks.voted_group().ready()
    return ranks.all_gather_object(value)


def require_none(ranks: Ranks, complaint: str, when: str) -> None:
    """Raise DisprovedError on all ranks if one of them has a `complaint` (a text, empty if it has none); `when` begins
    the sentence. All ranks call this."""
    for rank, found in enumerate(exchange(ranks, complaint)):
        if found:
            raise DisprovedError(f"{when}, on rank {rank} {found}")


def tried(action: Callable[[], object]) -> str:
    """Run `action`; returns OUT_OF_MEMORY, or another error as a text, or an empty text. The error's tensors are freed.
    Raises LostRankError."""
    try:
        action()
    except LostRankError:
        raise
    except Exception as error:  # noqa: BLE001  (of any kind: the other ranks are told of it, none is left waiting)
        clear_frames(error)
        return OUT_OF_MEMORY if classify(error) else f"{type(error).__name__}: {str(error)[:300]}"
    return ""
