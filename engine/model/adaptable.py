"""Which linear layers of a model cannot have an adapter, and why.

There are three kinds: layers whose weights a Mamba layer's kernels read directly, layers whose names peft takes for
those of fused experts, and routers, which return more than one tensor and are frozen beside LoRA or trained in full.
Which model families have such layers is in `engine.budget.architecture.trainable_families`, which needs only a config.

Try: `python -m pytest tests/model/test_families.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from engine.budget.architecture.trainable_families import (
    SCAN_WEIGHTS,
    expert_reason,
    names_of_experts,
    scan_reason,
)


def layers_without_adapter(model: PreTrainedModel, linears: Iterable[str]) -> dict[str, str]:
    """Return {dotted name: reason} for the linear layers among `linears` that cannot have an adapter."""
    model_type = str(model.config.get_text_config().model_type)
    experts, routers = names_of_experts(model_type), router_modules(model)
    reasons: dict[str, str] = {}
    for name in linears:
        parent, _, last = name.rpartition(".")
        if name in routers:
            reasons[name] = "it is a router; moe.freeze_router = false trains it in full"
        elif last in experts:
            reasons[name] = expert_reason(model_type)
        elif last in SCAN_WEIGHTS and _scans(model.get_submodule(parent)):
            reasons[name] = scan_reason(model_type)
    return reasons


def expert_blocks(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that hold a module named "experts", in the model's order."""
    return [name.rpartition(".")[0] for name, _ in model.named_modules() if name.endswith(".experts")]


def router_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of the router parameters, which choose experts: those of a module named "gate" or "router" in
    the same block as a module named "experts"."""
    blocks = set(expert_blocks(model))
    return [
        name
        for name, _ in model.named_parameters()
        for block in [name.partition(".gate.")[0] if ".gate." in name else name.partition(".router.")[0]]
        if block in blocks and block != name
    ]


def router_modules(model: PreTrainedModel) -> set[str]:
    """Return the names of the modules that hold the routers' parameters."""
    return {name.rpartition(".")[0] for name in router_parameters(model)}


def _scans(module: nn.Module) -> bool:
    """Whether a module is a Mamba layer: it has the decay rates A and the skip weights D of a selective scan."""
    return hasattr(module, "A_log") and hasattr(module, "D")
