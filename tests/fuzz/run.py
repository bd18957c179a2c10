"""Fuzzes files by strangers with hypothesis: each kind of file gets its share of the inputs, and one row in a table.

Try: `python -P -m tests.fuzz.run --inputs 2000`
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from engine.data import template_limits
from tests.conftest import FOLDERS
from tests.fuzz.guard import guarded
from tests.torture_table import record

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

MOST_CPU_SECONDS = 60.0
"""For one input: a rendering is stopped after ten, and a template is rendered up to five times."""
MOST_GROWTH_KIB = 2 << 20
"""Of the process while a target runs: a template may take 512 MiB, an image and a table some."""

REPORTED, REPORTED_LINES = 300, 60


say = partial(print, flush=True)


@dataclass
class Result:
    """What was done with one target."""

    inputs: int = 0
    slowest_seconds: float = 0.0
    grown_kib: int = 0


def fuzz(target: Target, inputs: int, folder: Path, *, seed: int) -> Result:
    """Check `inputs` inputs of a target. Raises what the first that falls raises, with the smallest such input."""
    result = Result()
    template_limits._place.process.close()  # the next one is forked, and watched, inside the guard of this folder
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def check(value: Any) -> None:
        began = _cpu_seconds()
        with guarded(folder):
            target.check(value, folder)
        result.slowest_seconds = max(result.slowest_seconds, _cpu_seconds() - began)
        result.inputs += 1

    # The phases without `reuse` and `explain`: nothing is kept in a database, and no traces are taken.
    phases = (Phase.generate, Phase.shrink)
    tried = settings(
        max_examples=inputs, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    hypothesis.seed(seed)(tried(given(target.inputs)(check)))()
    result.grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return result


def _cpu_seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def table(targets: Sequence[Target], inputs: int, seed: int) -> int:
    """Fuzz all, print a row for each; returns how many inputs fell."""
    unit = inputs / sum(target.share for target in targets)
    fallen = total = 0
    say(f"{'files by strangers':<28}{'inputs':>9}{'slowest':>10}{'grown':>11}   lost")
    for target in targets:
        with tempfile.TemporaryDirectory(prefix="tunedeck-fuzz-") as name:
            gc.collect()
            try:
                found = fuzz(target, max(1, round(unit * target.share)), Path(name), seed=seed)
            except Exception:  # noqa: BLE001  (of any kind: the other targets are fuzzed all the same)
                fallen += 1
                record("files by strangers", target.name, 0, 1)
                say(f"{target.name:<28}   FELL\n{_trace()}")
                continue
        total += found.inputs
        beyond = found.slowest_seconds > MOST_CPU_SECONDS or found.grown_kib > MOST_GROWTH_KIB
        fallen += beyond
        record("files by strangers", target.name, found.inputs, int(beyond))
        say(f"{target.name:<28}{found.inputs:>9,}{found.slowest_seconds:>8.2f} s{found.grown_kib >> 10:>7} MiB"
            f"   {'BEYOND ITS BOUND' if beyond else 'nothing'}")  # fmt: skip
    say(f"{'all':<28}{total:>9,}{'':>21}   {f'{fallen} targets' if fallen else 'nothing'}")
    return fallen


def _trace() -> str:
    """The present exception, its long lines cut."""
    return "\n".join(line[:REPORTED] for line in traceback.format_exc().splitlines()[-REPORTED_LINES:])


def main() -> int:
    """Fuzz every target; 1 if one fell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--only", help="targets whose name holds this text")
    parser.add_argument("--seed", type=int, default=36)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tunedeck-fuzz-home-") as home:
        os.environ.update({name: str(Path(home, name.lower())) for name in FOLDERS}, HF_HUB_OFFLINE="1")
        from tests.fuzz.targets import TARGETS  # imported here: huggingface_hub reads these variables at its import

        chosen = [target for target in TARGETS if (asked.only or "") in target.name]
        return 1 if table(chosen, asked.inputs, asked.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
