"""An engine under an address-space limit: the operating system's own allocator says no. A child process of the tests.

Not a test module. Try: `python -m tests.train.limited RUN_DIRECTORY MIB`
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

from engine.train import main


def limit_to(mib: int) -> None:
    """Let this process take `mib` more address space than it has now: libraries differ in size between machines."""
    taken_bytes = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + mib * 2**20, resource.RLIM_INFINITY))


if __name__ == "__main__":
    limit_to(int(sys.argv[2]))
    sys.exit(main.run(Path(sys.argv[1])))
