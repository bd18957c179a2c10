"""Liger's kernel computes the loss of a chunk: chosen on CUDA, equal to our own chunks under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import UsageError
from engine.model import chunked
from engine.model.chunked import LossSettings, chunked_loss
from engine.model.head import OutputHead
from engine.model.loss import choose_implementation

CPU = torch.device("cpu")
LOOK_ALIKES = Path(__file__).resolve().parents[1] / "look_alikes" / "cuda_extra"


class Card:
    """A device that says it is a CUDA card; its tensors are on the host."""

    kind, name, torch_device, capacity_bytes = "cuda", "a card", CPU, 24 * 2**30


def card() -> Any:
    return Card()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "is_liger_kernel_available", lambda: True)


def head(*, trained: bool = False, softcap: float | None = None) -> OutputHead:
    return OutputHead(torch.nn.Linear(16, 40, bias=False).requires_grad_(trained), 1.0, softcap)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("asked", ["auto", "fused"])
@pytest.mark.parametrize("given", [head(), head(trained=True), head(softcap=30.0)])
def test_a_plain_linear_head_on_a_card_gets_it(asked: Any, given: OutputHead) -> None:
    assert choose_implementation(asked, given, 0.1, card()) == "liger"


@pytest.mark.usefixtures("installed")
def test_a_head_with_an_adapter_does_not() -> None:
    wrapped = OutputHead(torch.nn.Sequential(torch.nn.Linear(16, 40)), 1.0, None)
    assert choose_implementation("auto", wrapped, 0.0, card()) == "chunked"
    with pytest.raises(UsageError, match="has an adapter"):
        choose_implementation("fused", wrapped, 0.0, card())


def test_without_the_package_it_is_not_chosen() -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        assert choose_implementation("auto", head(), 0.0, card()) == "chunked"
    given: Any = Card()
    given.kind = "cpu"
    assert choose_implementation("auto", head(), 0.0, given) == "chunked"


def largest_difference(settings: LossSettings, *, trained: bool, bias: bool) -> float:
    """Between Liger's and our own loss and gradients, relative to the norm of ours."""
    results = []
    for liger in (True, False):
        torch.manual_seed(0)
        project = torch.nn.Linear(16, 40, bias=bias).requires_grad_(trained)
        hidden_NH, targets_N = torch.randn(24, 16, requires_grad=True), torch.randint(40, (24,))
        used = LossSettings(settings.label_smoothing, settings.softcap, settings.chunk_tokens, liger)
        loss = chunked_loss(OutputHead(project, 1.0, settings.softcap), hidden_NH, targets_N, used)
        (loss * 0.5).backward()
        with torch.no_grad():
            scored = chunked_loss(OutputHead(project, 1.0, settings.softcap), hidden_NH, targets_N, used)
        gradients = [hidden_NH.grad, *(parameter.grad for parameter in project.parameters())]
        results.append([loss.detach(), scored, *(each for each in gradients if each is not None)])
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(*results, strict=True))


def compare(real: bool) -> None:
    """Print the largest difference over all settings, and how many there are. Triton's interpreter cannot run the
    kernel's soft-cap."""
    found = [
        largest_difference(LossSettings(smoothing, softcap, 10), trained=trained, bias=bias)
        for smoothing in (0.0, 0.1)
        for softcap in ((None,) if real else (None, 3.0))
        for trained, bias in ((False, False), (True, True))
    ]
    print(len(found), max(found))  # noqa: T201


def test_its_losses_and_gradients_are_ours(tmp_path: Path) -> None:
    """Under Triton's interpreter, if Triton and Liger are installed, else with the look-alike. In a process of its own:
    Triton reads TRITON_INTERPRET when it is imported."""
    real = all(importlib.util.find_spec(name) is not None for name in ("triton", "liger_kernel"))
    folders = [str(Path(__file__).resolve().parents[2]), *([] if real else [str(LOOK_ALIKES)])]
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([*folders, *([inherited] if inherited else [])]),
    }
    command = [sys.executable, "-c", f"from tests.model.test_liger import compare; compare({real})"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, difference = done.stdout.split()
    assert int(count) == (4 if real else 8) and float(difference) < 1e-5
