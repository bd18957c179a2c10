"""Triton's compiler takes our kernels for every generation of cards; it needs no card. Its interpreter does not notice
what the compiler refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton has no build for this platform")

CARDS = (80, 86, 89, 90, 100, 120)
"""Compute capabilities: A100, RTX 30, RTX 40, H100, B200, RTX 50."""


@pytest.mark.parametrize(("element", "capability"), [*(("bf16", card) for card in CARDS), ("fp32", 90), ("fp16", 90)])
def test_the_dropout_kernel_compiles(
    element: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
    source = ASTSource(fn=_kernel, signature=signature, constexprs={"block": BLOCK})

    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))

    assert len(compiled.asm["cubin"]) > 1000
