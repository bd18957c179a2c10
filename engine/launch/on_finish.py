"""Runs the user's --on-finish command when a run has ended. Imports no torch: the supervisor of ranks uses this, too.

Try: `tunedeck train -p demo -r demo --on-finish 'echo $TUNEDECK_STATUS'`
"""

from __future__ import annotations

import logging
import os
import subprocess

from engine.journal.directory import RunDirectory
from engine.spec.schema.run import RunSpec

log = logging.getLogger(__name__)


def run_on_finish(spec: RunSpec, place: RunDirectory, status: str) -> None:
    """Run the user's --on-finish command in a shell and wait for its end; does nothing without one. TUNEDECK_RUN is the
    run directory's path, TUNEDECK_STATUS is `status` ("done", "failed", …). The command's exit code is logged and
    changes nothing."""
    if not spec.limits.on_finish:
        return
    environment = {**os.environ, "TUNEDECK_RUN": str(place.path), "TUNEDECK_STATUS": status}
    done = subprocess.run(spec.limits.on_finish, shell=True, env=environment, check=False)
    log.info("--on-finish ended with %d", done.returncode)
