"""Runs an engine under a limit on its address space, so that the operating system refuses allocations. A child process
of the tests.

Not a test module. Try: `python -m tests.train.limited RUN_DIRECTORY MIB`
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

import engine.data.dataset_files  # noqa: F401  # an engine imports it when it opens a file, which is beyond the limit
from engine.train.run import main


def limit_to(mib: int) -> None:
    """Limit this process's address space to its present size plus `mib` MiB. The limit is relative, because the size of
    libraries differs between machines."""
    taken_bytes = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + mib * 2**20, resource.RLIM_INFINITY))


if __name__ == "__main__":
    limit_to(int(sys.argv[2]))
    sys.exit(main.run(Path(sys.argv[1])))
