"""Starts `tunedeck eval` on a run, in an OS session of its own: the scores come into the run's directory."""

from __future__ import annotations

import subprocess
import sys

from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.launch.process import ENTRY_FILE, engine_environment
from engine.launch.requirements import require_training_packages


class Evaluation:
    """A scoring that this process has started."""

    def __init__(self, run: RunDirectory, process: subprocess.Popen[bytes]) -> None:
        self.run, self._process = run, process

    def outcome(self) -> str | None:
        """None while it goes on; then a sentence, with the reason if it failed."""
        code = self._process.poll()
        if code is None:
            return None
        if code == 0:
            return f"{self.run.name} is scored"
        lines = (self.run.kept_scores / LOG).read_text("utf-8", errors="replace").splitlines()
        reasons = [line for line in lines if line.startswith("tunedeck: ")] or lines[-1:]
        return "; ".join([f"{self.run.name} was not scored", *reasons[-1:]])


LOG = "eval.log"
"""In the folder of kept scores: what the command said."""


def start_evaluation(run: RunDirectory) -> Evaluation:
    """Score the newest checkpoint. Raises EnvironmentProblem or OSError if the process cannot be started."""
    require_training_packages()
    try:
        run.kept_scores.mkdir(exist_ok=True)
        with (run.kept_scores / LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", str(ENTRY_FILE), "eval", str(run.path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=engine_environment(), start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise EnvironmentProblem(
            f"{run.name} cannot be scored: {error.strerror or error}", fix="give yourself permission to write there"
        ) from error
    return Evaluation(run, process)
