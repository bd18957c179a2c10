"""DeepSpeed's ZeRO (`parallel.strategy = "deepspeed"`): what it adds to a plan, what it cannot do, whether it is there.

A plan is that of `engine.budget.shards` with DeepSpeed's fp32 copy of what learns, fp32 gradients and optimizer state,
the buffer gradients are reduced in, and weights that are gathered ahead. That is an approximation: DeepSpeed gathers
and frees by rules of its own, and ZeRO-2 keeps whole weights on every rank. A closer plan is not worth it for an extra.

Try: `tunedeck plan -p demo-2 -r demo --set parallel.strategy=deepspeed`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from engine.budget.architecture import from_config
from engine.budget.operations import FLOAT
from engine.budget.static import Tensors, rounded
from engine.errors import EnvironmentProblem, UnknownArchitectureError, UsageError
from engine.spec.schema.profile import Profile
from engine.spec.schema.run import RunSpec

REDUCE_ELEMENTS = 16 * 2**20
"""Gradients that are reduced at once: 64 MiB in fp32, instead of DeepSpeed's 2 GB."""

PREFETCH_ELEMENTS = 16 * 2**20
"""Weights that ZeRO-3 gathers ahead of their use."""


def uses_deepspeed(profile: Profile) -> bool:
    """Whether a run's ranks share it through DeepSpeed."""
    return profile.parallel.strategy == "deepspeed" and profile.device.count * profile.nodes.count > 1


def require_deepspeed() -> None:
    """Raise EnvironmentProblem where the package is missing."""
    if find_spec("deepspeed") is None:
        raise EnvironmentProblem(
            'parallel.strategy = "deepspeed" needs DeepSpeed, which is not installed',
            fix="pip install 'tunedeck[deepspeed]', or set parallel.strategy = \"sharded\", which needs nothing more",
        )


def refuse_under_deepspeed(facts: Mapping[str, Any], spec: RunSpec) -> None:
    """Raise UsageError for models DeepSpeed would train wrongly; `facts` are the model's config.

    It steps every parameter with a gradient of zero where there was none: experts that no token chose, a tower that saw
    no image. What a recipe asks for is refused by `engine.spec.check.hardware_rules`.
    """
    if not uses_deepspeed(spec.profile):
        return
    try:
        arch = from_config(facts)
    except UnknownArchitectureError:
        return
    has = [word for word, there in (("experts", arch.experts), ("a vision tower", arch.tower)) if there]
    if has:
        raise UsageError(
            f'{spec.recipe.model.id} has {" and ".join(has)}, which parallel.strategy = "deepspeed" does not train',
            expected="a dense model of text",
            fix='set parallel.strategy = "sharded"',
        )


def in_fp32(held: Tensors, elements: int, width: int) -> Tensors:
    """A rank's part in shards as DeepSpeed holds it, of `elements` in all that learn in `width` bytes."""
    each = rounded(elements * FLOAT)
    return held._replace(gradients=each, optimizer=held.optimizer * FLOAT // width + each)


def warnings_under_deepspeed(spec: RunSpec) -> Iterator[str]:
    """What a plan says of the smaller promise."""
    if uses_deepspeed(spec.profile):
        yield (
            "the plan is an approximation under DeepSpeed, and memory that runs out on one rank is not outlived there: "
            "all ranks start again from the last checkpoint with what was learned (nothing is lost or applied twice; "
            f"at most {spec.profile.nodes.max_restarts} times, nodes.max_restarts); set checkpoint.every_steps, or use "
            'parallel.strategy = "sharded", where it costs a retry'
        )
