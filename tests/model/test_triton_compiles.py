"""Triton's compiler takes our kernels for every generation of cards; it needs no card. Its interpreter does not notice
what the compiler refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.liger import LigerKernels

triton = pytest.importorskip("triton", reason="Triton has no build for this platform")

CARDS = (80, 90, 120)
"""Compute capabilities: A100, H100, RTX 50."""
BETWEEN = (86, 89, 100)
"""RTX 30, RTX 40 and B200, where the compiler takes what it takes for the cards before and after: `make torture`."""


@pytest.mark.parametrize(
    ("element", "capability"),
    [
        *(("bf16", card) for card in CARDS),
        *(pytest.param("bf16", card, marks=pytest.mark.torture) for card in BETWEEN),
        ("fp32", 90),
        ("fp16", 90),
    ],
)
def test_the_dropout_kernel_compiles(
    element: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.model.triton_dropout import BLOCK, _kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = dict.fromkeys(("length", "features", "first", "threshold"), "i32")
    signature = {
        **dict.fromkeys(("rows_ptr", "result_ptr"), f"*{element}"),
        "keys_ptr": "*i32",
        **numbers,
        "scale": "fp32",
        "block": "constexpr",
    }
    assert compiled_bytes(_kernel, signature, {"block": BLOCK}, capability) > 1000


@pytest.mark.parametrize(("capability", "softcap"), [*((card, False) for card in CARDS), (90, True)])
def test_ligers_kernel_compiles_as_we_call_it(
    capability: int, softcap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launched: dict[str, Any] = {}
    monkeypatch.setattr(
        "liger_kernel.ops.cross_entropy.liger_cross_entropy_kernel", {(4,): lambda **given: launched.update(given)}
    )
    logits_CV, targets_C = torch.zeros(4, MAX_FUSED_SIZE + 5, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    LigerKernels().token_losses(logits_CV, targets_C, 0.1, 30.0 if softcap else None, True)

    del launched["num_warps"]
    types = {name: TYPES[type(value)] for name, value in launched.items()}
    types |= {"X_ptr": "*bf16", "Y_ptr": "*i64", "loss_ptr": "*fp32"}
    fixed = {name: value for name, value in launched.items() if types[name] == "constexpr" or name in CONSTANTS}
    signature = {name: "constexpr" if name in fixed else types[name] for name in launched}
    assert compiled_bytes(liger_cross_entropy_kernel, signature, fixed, capability) > 1000


CONSTANTS = ("lse_square_scale", "label_smoothing", "BLOCK_SIZE")
TYPES = {int: "i32", float: "fp32", bool: "constexpr", str: "constexpr", type(None): "constexpr", torch.Tensor: "*"}


def compiled_bytes(kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: int) -> int:
    """Size of the machine code of `kernel` for a card of this compute capability."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])
