"""What follows a run's end: the user's own --on-finish command. Light: the supervisor of several ranks runs it too."""

from __future__ import annotations

import logging
import os
import subprocess

from engine.journal.directory import RunDirectory
from engine.spec.schema.run import RunSpec

log = logging.getLogger(__name__)


def run_on_finish(spec: RunSpec, place: RunDirectory, status: str) -> None:
    """Run the user's own --on-finish command; its failure is logged and changes nothing."""
    if not spec.limits.on_finish:
        return
    environment = {**os.environ, "TUNEDECK_RUN": str(place.path), "TUNEDECK_STATUS": status}
    done = subprocess.run(spec.limits.on_finish, shell=True, env=environment, check=False)
    log.info("--on-finish ended with %d", done.returncode)
