"""Creates run directories from the Launch screen's choice.

Both functions may take seconds: they write files, and may wait for the hub. The screen calls them in a thread. They
read the profile and recipe files again, which may have changed since the last key.

Try: `python -m pytest tests/tui/screens/test_launch.py -k 'start or queue'`
"""

from __future__ import annotations

from pathlib import Path

from engine.config.schema.run import RunSpec
from engine.errors import UsageError
from engine.journal.directory import RunDirectory
from engine.launch.create_run import create_run, queue_run
from engine.launch.start_options import QUEUED_WAIT_SECONDS
from tui.launch.choice import Choice
from tui.launch.evaluate import evaluate_choice


def make_run(choice: Choice, runs_dir: Path, *, force: bool = False) -> tuple[RunDirectory, list[str]]:
    """Create the run directory of a choice, ready for an engine to start; returns it with notices for the user. With
    `force`, also for a run that does not fit. Raises TunedeckError."""
    return create_run(_current_spec(choice), runs_dir, force=force)


def enqueue_run(choice: Choice, runs_dir: Path) -> tuple[str, int]:
    """Create the run directory of a choice and put it at the end of the queue; returns the run's name and its place in
    the queue. Raises TunedeckError."""
    spec = _current_spec(choice)
    limits = spec.limits.model_copy(update={"wait_seconds": QUEUED_WAIT_SECONDS})
    directory, state, _ = queue_run(spec.model_copy(update={"limits": limits}), runs_dir)
    return directory.name, state.waiting.index(directory.name) + 1


def _current_spec(choice: Choice) -> RunSpec:
    spec = evaluate_choice(choice).spec
    if spec is None:
        raise UsageError("a profile or recipe file has changed since", fix="check the fields")
    return spec
