"""`tunedeck _simulate`: simulates run specs, one JSON document per line of standard input, until that ends.

Started by `engine.launch.simulation`, never by hand. Each result is written to the cache folder
(`engine.budget.predict.simulated`); then a line "done" is printed on standard output.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from engine.commands.importing import importing

if TYPE_CHECKING:
    from engine.spec.schema.run import RunSpec


def simulate_process() -> None:
    """Simulate runs whose memory no closed form predicts; started by other commands, never by hand."""
    from engine.budget.predict.simulated import keep_simulation
    from engine.spec.schema.run import RunSpec

    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # a model's own code may print
        for line in sys.stdin:
            spec = RunSpec.model_validate(json.loads(line))
            keep_simulation(spec, simulation(spec))
            answers.write("done\n")
            answers.flush()


def simulation(spec: RunSpec) -> dict[str, Any]:
    """Simulate a run; returns the JSON document to cache. If the run would be refused, the document has the refusal
    (`refused`); if the model's code cannot run on tensors without data, the exception (`problem`)."""
    from engine.errors import TunedeckError

    with importing():
        from engine.model.library_output import silence_libraries
        from engine.simulate.curves import simulate_curves

    silence_libraries()
    try:
        return simulate_curves(spec)
    except TunedeckError as refusal:
        return {"refused": {"found": refusal.found, "expected": refusal.expected, "fix": refusal.fix}}
    except Exception as error:  # noqa: BLE001  (the code of any model of transformers runs here)
        return {"problem": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
