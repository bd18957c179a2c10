"""Mixed precision: chooses the dtypes of weights and of the computation, and whether the loss is scaled (fp16)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.config.schema.recipe import Method, Model
from engine.device.base import Device

OVERFLOWING_FAMILIES = ("gemma", "t5", "mt5", "umt5", "recurrent_gemma")
"""Prefixes of model types whose activations exceed fp16's range (65504); they were trained in bf16."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Precision:
    """Dtypes of base weights and computation, autocast's dtype (None: no autocast), loss scaling, and notices."""

    weights: torch.dtype
    compute: torch.dtype
    autocast: torch.dtype | None = None
    needs_loss_scaling: bool = False
    notices: list[str] = field(default_factory=list)


def choose_precision(model: Model, method: Method, model_type: str, device: Device) -> Precision:
    """Dtypes and loss scaling for model.dtype on `device`. "auto" is float32 on a CPU or a metered device, bfloat16 on
    a GPU that has it, else float16. A notice warns of model types known to overflow in float16. Full fine-tuning in
    float16 keeps fp32 weights: updates below 2^-11 of a weight round away in fp16 itself (Micikevicius et al. 2018,
    "Mixed Precision Training", section 3.1)."""
    compute = DTYPES[model.dtype] if model.dtype != "auto" else _automatic(device)
    notices: list[str] = []
    if compute == torch.bfloat16 and not device.supports_bfloat16:
        notices.append(f"{device.name} has no native bfloat16; it is emulated and slow")
    if compute == torch.float16 and model_type.startswith(OVERFLOWING_FAMILIES):
        notices.append(
            f"{model_type} models are known to overflow in float16; check for skipped steps, or set "
            "model.dtype to bfloat16 or float32"
        )
    if compute != torch.float16:
        return Precision(compute, compute, notices=notices)
    if method.kind == "full":
        return Precision(torch.float32, compute, autocast=compute, needs_loss_scaling=True, notices=notices)
    return Precision(compute, compute, needs_loss_scaling=True, notices=notices)


def _automatic(device: Device) -> torch.dtype:
    if device.torch_device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if device.supports_bfloat16 else torch.float16
