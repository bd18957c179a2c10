"""Makes, from a run spec, the environment variables that CUDA, cuBLAS and torch's allocator read once in a process.

They must be set before the process imports torch and peft: peft imports bitsandbytes where that is installed, and
bitsandbytes asks every GPU for its compute capability, which starts CUDA and with it torch's allocator. A variable set
after that changes nothing. So the engine, a rank that a launcher started, and `tunedeck eval` call
`set_device_environment` before they import anything heavy; the ranks that an engine starts inherit its environment.

Try: `python -m pytest tests/device/test_environment.py`
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, MutableMapping

from engine.spec.schema.run import RunSpec

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Both names of torch's allocator settings. torch 2.11 to 2.13 read either one; if both are set, the first."""

DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What deterministic kernels need: a cuBLAS workspace of fixed size (cuBLAS documentation, "Results reproducibility").
The rest is set where they are switched on (`engine.device.determinism`)."""


def device_environment(spec: RunSpec, present: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables {name: value} that a process of this run needs, without those that are set in
    `present`: values that the user set are kept.

    Empty for runs in host memory. `CUDA_DEVICE_ORDER` makes CUDA number the GPUs as nvidia-smi and `--devices` do; by
    default it puts the fastest first.
    """
    device = spec.profile.device
    if device.kind != "cuda":
        return {}
    wanted = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if device.allocator and not any(present.get(name) for name in ALLOCATOR_VARIABLES):
        wanted[ALLOCATOR_VARIABLES[0]] = device.allocator
    if spec.recipe.train.deterministic:
        wanted |= DETERMINISM
    return {name: value for name, value in wanted.items() if not present.get(name)}


def set_device_environment(spec: RunSpec, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of `device_environment` in this process. Call it before torch and peft are imported."""
    environment.update(device_environment(spec, environment))


def export_lines(spec: RunSpec) -> str:
    """Return the variables of `device_environment` as lines of a shell script. Each line leaves a variable unchanged
    that is already set on the machine."""
    lines = ""
    for name, value in device_environment(spec, {}).items():
        names = ALLOCATOR_VARIABLES if name in ALLOCATOR_VARIABLES else (name,)
        set_already = "".join(f"${{{each}:-}}" for each in names)
        lines += f'[ -n "{set_already}" ] || export {name}={shlex.quote(value)}\n'
    return lines
