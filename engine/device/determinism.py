"""`train.deterministic`: every kernel computes the same bits from the same inputs, or the run ends with an error that
names the operation. cuBLAS needs a workspace of fixed size, set in the environment (`engine.launch.environment`)."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.errors import EnvironmentProblem, UsageError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_SETTINGS = (":4096:8", ":16:8")
"""The workspaces that make cuBLAS deterministic (its documentation, "Results reproducibility")."""

FLASH_SWITCH = "FLASH_ATTENTION_DETERMINISTIC"
"""Read by transformers (`modeling_flash_attention_utils`) at every call of flash attention."""

_NO_DETERMINISTIC_KERNEL = re.compile(r"([^\n]+) does not have a deterministic implementation")
"""torch's error for an operation without a deterministic kernel (aten/src/ATen/Context.cpp)."""


@contextmanager
def deterministic_kernels(on: bool, device_kind: str) -> Iterator[None]:
    """Use only deterministic kernels inside the block, if `on`; torch's former settings are restored after it.

    Raises EnvironmentProblem (on CUDA, the user's CUBLAS_WORKSPACE_CONFIG makes cuBLAS nondeterministic) or UsageError
    (an operation has no deterministic kernel).
    """
    if not on:
        yield
        return
    if device_kind == "cuda":
        _require_fixed_workspace()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tuning, switch = torch.backends.cudnn.benchmark, os.environ.get(FLASH_SWITCH)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    os.environ[FLASH_SWITCH] = "1"
    try:
        yield
    except RuntimeError as error:
        operation = _NO_DETERMINISTIC_KERNEL.search(str(error))
        if operation is None:
            raise
        raise UsageError(
            f"train.deterministic = true, but {operation[1]} has no deterministic kernel on this device",
            fix="set train.deterministic = false; a resumed run then equals an uninterrupted one up to rounding",
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = tuning
        if switch is None:
            del os.environ[FLASH_SWITCH]
        else:
            os.environ[FLASH_SWITCH] = switch


@contextmanager
def unfilled_memory() -> Iterator[None]:
    """torch does not fill new memory inside the block, as it does under deterministic kernels. The metered device
    refuses an allocation after torch has made it; filled, a request beyond the cap would take real host memory."""
    settings: Any = torch.utils.deterministic  # its types do not know this property
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filled


def _require_fixed_workspace() -> None:
    found = os.environ.get(CUBLAS_VARIABLE, "")
    if found in CUBLAS_SETTINGS:
        return
    raise EnvironmentProblem(
        f"train.deterministic = true, but {CUBLAS_VARIABLE}={found or '(not set)'}",
        expected=" or ".join(CUBLAS_SETTINGS),
        fix=f"unset {CUBLAS_VARIABLE}; it is set when the run starts",
    )


def has_deterministic_backward(flash_attention: Callable[..., Any]) -> bool:
    """Whether it has the switch (flash-attn 2.4.1 and newer); without it transformers silently ignores the request."""
    return "deterministic" in inspect.signature(flash_attention).parameters
