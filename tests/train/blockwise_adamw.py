"""An optimizer built like bitsandbytes 0.50's AdamW8bit, which needs CUDA: the same methods, state and blocks of 256.

Not a test module. What counts for the engine is the same: state is made by `init_state`, `step` is an int, moments are
uint8 with a scale for each block, tables of values are shared by all parameters, and tensors below 4096 values have
state in fp32. Only the tables are simpler: 256 evenly spaced values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.present import grad_of

BLOCK = 256
SMALLEST_8BIT = 4096


class BlockwiseAdamW(torch.optim.Optimizer):
    """AdamW with moments in 8 bits."""

    def __init__(self, groups: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, **_: Any) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.tables = {"qmap1": torch.linspace(-1, 1, 256), "qmap2": torch.linspace(0, 1, 256)}

    @torch.no_grad()
    def init_state(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Create the state of one parameter."""
        state = self.state[p]
        state["step"] = 0
        narrow = p.numel() >= SMALLEST_8BIT
        for number in (1, 2):
            state[f"state{number}"] = torch.zeros_like(p, dtype=torch.uint8 if narrow else torch.float32)
            if narrow:
                state[f"qmap{number}"] = self.tables[f"qmap{number}"]
                state[f"absmax{number}"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody passes a closure
        """Update every parameter that has a gradient."""
        for gindex, group in enumerate(self.param_groups):
            for pindex, p in enumerate(group["params"]):
                if p.grad is not None:
                    if not self.state[p]:
                        self.init_state(group, p, gindex, pindex)
                    self._update(group, p, self.state[p])

    def _update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        state["step"] += 1
        step: int = state["step"]
        if not isinstance(step, int):
            raise TypeError(f"the kernel takes an int, not {step!r}")
        (beta1, beta2), gradient = group["betas"], grad_of(p).float().view(-1)
        first, second = (self._widened(state, number) for number in (1, 2))
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = group["lr"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_((size * first / (second.sqrt() + group["eps"])).view(p.shape).to(p.dtype))
        self._store(state, 1, first)
        self._store(state, 2, second)

    def _widened(self, state: dict[str, Any], number: int) -> Tensor:
        stored: Tensor = state[f"state{number}"].view(-1)
        if stored.dtype == torch.float32:
            return stored.clone()
        scale = state[f"absmax{number}"].repeat_interleave(BLOCK)[: len(stored)]
        widened: Tensor = state[f"qmap{number}"][stored.int()] * scale
        return widened

    def _store(self, state: dict[str, Any], number: int, values: Tensor) -> None:
        stored: Tensor = state[f"state{number}"].view(-1)
        if stored.dtype == torch.float32:
            stored.copy_(values)
            return
        padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        scale = padded.abs().amax(1)
        state[f"absmax{number}"].copy_(scale)
        low = state[f"qmap{number}"][0]
        share = (padded / scale.clamp(min=1e-30)[:, None] - low) / (1 - low)
        stored.copy_((share * 255).round().to(torch.uint8).view(-1)[: len(stored)])
