"""How many answers are predicted to fit into a device's free memory at once.

Generation starts with this number; an out-of-memory error halves it (`engine.evaluate.answers`).

Try: `tunedeck plan -p demo -r demo --eval`
"""

from __future__ import annotations

from collections.abc import Callable

from engine.budget.architecture.facts import from_config
from engine.budget.predict.inference import generation_bytes
from engine.budget.predict.parallel_layout import on_one_device
from engine.budget.trace.memory_config import memory_config_of
from engine.device.base import Device
from engine.errors import UnknownArchitectureError
from engine.evaluate.context import GENERATION_ROWS
from engine.model.config import model_config_dict
from engine.spec.schema.run import RunSpec

FILLED = 0.97
"""Share of the free memory that answers may fill; predictions of generation are at most 1 % too low."""


def planned_rows(spec: RunSpec, device: Device) -> Callable[[int], int]:
    """Return a function from the length of a prompt in tokens to the number of answers that fit at once, at least 1 and
    at most GENERATION_ROWS. The returned function measures the free memory at each call. Without a closed form of the
    architecture it always returns GENERATION_ROWS."""
    try:
        arch = from_config(model_config_dict(spec))
    except UnknownArchitectureError:
        return lambda prompt: GENERATION_ROWS
    config = memory_config_of(arch, on_one_device(spec))

    def rows(prompt: int) -> int:
        free_bytes = FILLED * (device.available_bytes - device.memory().allocated_bytes)
        fitting = GENERATION_ROWS
        while fitting > 1:
            needed_bytes = generation_bytes(arch, config, rows=fitting, prompt=prompt, generate=spec.recipe.generate)
            if needed_bytes <= free_bytes:
                break
            fitting //= 2
        return fitting

    return rows
