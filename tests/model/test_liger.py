"""Liger's kernel is tried before it is chosen; the package is a look-alike that computes on the CPU, right or wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.budget.architecture.facts import from_config
from engine.budget.predict.layer_traces import head_step
from engine.budget.trace import memory_config
from engine.budget.trace.memory_config import memory_config_of
from engine.budget.trace.polynomial import highest_value, shape_of
from engine.config.load import resolve
from engine.device.metered import MeteredDevice
from engine.errors import UsageError
from engine.model.chunked import liger_problem
from engine.model.decoder import OutputHead
from engine.model.loss import choose_implementation, make_loss
from tests.model.samples import cpu, load, run_spec

CPU = torch.device("cpu")

RIGHT = """
    hidden_NH, weight_VH = hidden.float(), weight.float()
    logits_NV = hidden_NH @ weight_VH.T
    return torch.nn.functional.cross_entropy(
        logits_NV, target, reduction=reduction, label_smoothing=label_smoothing)
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Make a package liger_kernel importable; `body` is the Python text of its fused loss function."""
    package = folder / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "functional.py").write_text(
        "import torch\ndef liger_fused_linear_cross_entropy("
        f"hidden, weight, target, bias=None, label_smoothing=0.0, reduction='mean'):{body}"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("engine.model.chunked.is_liger_kernel_available", lambda: True)
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)


class Card:
    """A device that says it is a CUDA card; its tensors are on the host."""

    kind, name, torch_device, capacity_bytes = "cuda", "a card", CPU, 24 * 2**30


def card() -> Any:
    return Card()


def frozen_head(dtype: torch.dtype = torch.float32) -> OutputHead:
    return OutputHead(torch.nn.Linear(16, 40, bias=False, dtype=dtype).requires_grad_(False), 1.0, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_works_is_chosen(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, RIGHT)
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)  # it would also seed every card
    assert liger_problem(CPU, dtype) is None and not seeds
    assert choose_implementation("auto", frozen_head(dtype), 0.0, card()) == ("liger", [])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("\n    raise RuntimeError('Failed to find C compiler. Please set CC.')\n", "Failed to find C compiler"),
        (RIGHT.replace("weight.float()", "weight.float() * 1.5"), "its loss is off by"),
        (RIGHT.replace("hidden.float()", "hidden.float() + (hidden - hidden.detach()).float()"), "gradient is off by"),
    ],
)
def test_a_kernel_that_fails_or_is_wrong_is_said_and_the_reference_used(
    body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, body)
    chosen = choose_implementation("auto", frozen_head(), 0.0, card())
    assert chosen.name == "chunked" and words in chosen.notices[0]
    loaded = load(run_spec())
    monkeypatch.setattr(type(cpu()), "kind", "cuda")
    loss = make_loss(loaded, implementation="auto", label_smoothing=0.0, chunk_tokens=4, device=cpu())
    assert loss.implementation == "chunked" and words in loaded.notices[-1]


def test_a_fused_loss_that_was_asked_for_and_cannot_be_had_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "\n    raise OSError('libcuda.so: cannot open shared object file')\n")
    with pytest.raises(UsageError, match=r"(?s)label_smoothing.*libcuda\.so"):
        choose_implementation("fused", frozen_head(), 0.1, card())


def test_running_out_of_memory_in_the_trial_is_no_reason_against_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "\n    raise torch.OutOfMemoryError('CUDA out of memory.')\n")
    with pytest.raises(torch.OutOfMemoryError):
        choose_implementation("auto", frozen_head(), 0.0, card())


def test_a_trained_head_never_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a trained head Liger needs 10 bytes per weight: the fp32 gradient of the head, and an fp32 copy of each
    chunk's gradient. Plans count 2 bytes."""
    install(tmp_path, monkeypatch, RIGHT)
    trained = OutputHead(torch.nn.Linear(16, 40, bias=False), 1.0, None)
    assert choose_implementation("auto", trained, 0.0, card()).name == "chunked"
    assert choose_implementation("fused", trained, 0.0, card()).name == "torch"


def as_liger_allocates(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Make the allocations of liger-kernel 0.8's forward pass for a frozen head, one operation after the other. Returns
    the kept gradient of the hidden states [N, H]."""
    (tokens, width), vocabulary = hidden_NH.shape, len(weight_VH)
    parts = -(-vocabulary // width)
    chunk = 1 << (-(-tokens // parts) - 1).bit_length()
    kept_NH, losses_N = torch.zeros_like(hidden_NH), torch.zeros(tokens)
    mask_N = targets_N != -100
    for start in range(0, tokens, chunk):
        logits_CV = hidden_NH[start : start + chunk] @ weight_VH.T
        kept_NH[start : start + chunk] = logits_CV @ weight_VH
    del mask_N, losses_N
    return kept_NH


@pytest.mark.parametrize(("rows", "length"), [(1, 96), (3, 700), (8, 1024)])
def test_the_plan_of_a_frozen_head_covers_the_kernel_where_it_is_installed(
    rows: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch = from_config({**_llama(), "vocab_size": 4096, "hidden_size": 128})
    spec = resolve("24gb", "lora").spec
    without = memory_config_of(arch, spec)
    monkeypatch.setattr(memory_config, "installed", lambda package: "0.8.0" if package == "liger-kernel" else "")
    config = memory_config_of(arch, spec)
    assert config.liger and config == replace(without, liger=True)
    predicted = highest_value(head_step(arch, config, False), shape_of(rows, length, config.chunk_tokens))
    device = MeteredDevice(2**32)
    with device.activate(), torch.no_grad():
        weight_VH = torch.zeros(4096, 128, dtype=torch.bfloat16)
        hidden_NH = torch.zeros(rows * length, 128, dtype=torch.bfloat16)
        targets_N = torch.zeros(rows * length, dtype=torch.int64)
        before = device.memory().allocated_bytes - hidden_NH.nbytes
        device.reset_peak()
        as_liger_allocates(hidden_NH, weight_VH, targets_N)
        used = device.memory().peak_bytes - before
    assert used <= predicted
    # A chunk is rounded up to a power of two, so at most doubled; the engine's own chunks (bf16 and fp32) count, too.
    own_chunk_bytes = 6 * 4096 * min(rows * length, config.chunk_tokens)
    assert predicted <= max(2.5 * used, 1.1 * (used + own_chunk_bytes))


def _llama() -> dict[str, object]:
    return {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "tie_word_embeddings": False,
    }
