"""How the supervisor describes the ends of ranks that torch's agent reports."""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from engine.distributed.elastic import BEYOND_REPAIR_CODE, LOST_CODE, SECONDS_TO_LEAVE, describe_failures


def ended(exit_code: int, *, after_seconds: int = 0) -> ProcessFailure:
    """A rank that ended with this code, some seconds after the first."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exit_code, error_file="<N/A>")
    failure.timestamp = 1000 + after_seconds
    return failure


@pytest.mark.parametrize(
    ("failures", "size", "words"),
    [
        ({1: ended(-signal.SIGKILL), 0: ended(LOST_CODE)}, 2, "rank 1 was killed (SIGKILL"),
        ({2: ended(-signal.SIGSEGV), 0: ended(-signal.SIGTERM)}, 4, "rank 2 was terminated by signal 11 (SIGSEGV)"),
        (
            {0: ended(BEYOND_REPAIR_CODE), 1: ended(LOST_CODE)},
            2,
            "rank 0 reports a device error that requires a new process",
        ),
        ({3: ended(1), 0: ended(LOST_CODE)}, 4, "rank 3 exited with 1"),
        ({0: ended(LOST_CODE), 1: ended(-9, after_seconds=SECONDS_TO_LEAVE)}, 2, "rank 1 does not respond"),
        ({0: ended(LOST_CODE), 1: ended(LOST_CODE), 3: ended(LOST_CODE)}, 4, "rank 2 does not respond"),
        ({0: ended(LOST_CODE), 1: ended(LOST_CODE)}, 2, "the ranks lost their connection"),
    ],
    ids=["killed", "crashed", "sticky device", "defect", "stopped", "stopped, older torch", "all lost"],
)
def test_the_cause_is_named_and_not_those_it_took_along(
    failures: dict[int, ProcessFailure], size: int, words: str
) -> None:
    said = describe_failures(failures, size)
    assert said.startswith(words) and ";" not in said.partition("(")[0]
