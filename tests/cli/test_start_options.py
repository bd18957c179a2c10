"""The options of a start become the run's limits; a resumed run keeps those that its command line does not name."""

from __future__ import annotations

from engine.launch.start_options import StartOptions


def test_only_what_was_named_changes_a_limit() -> None:
    assert StartOptions().changed_limits() == {}
    named = StartOptions(devices="2,3", wait=0.0, max_hours=1.5, on_finish="", trust_remote_code=True)
    assert named.changed_limits() == {
        "devices": [2, 3], "wait_seconds": 0.0, "max_hours": 1.5, "on_finish": "", "trust_remote_code": True,
    }  # fmt: skip


def test_the_limits_of_a_new_run() -> None:
    limits = StartOptions(trust_remote_code=True, max_hours=2.0).limits()
    assert limits.trust_remote_code and limits.max_hours == 2.0 and not StartOptions().limits().trust_remote_code
