"""Three implementations, one loss: values and gradients against the plain definition, in every dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.device.metered import MeteredDevice
from engine.errors import UsageError
from engine.model.chunked import LossSettings, chunked_loss, token_losses, torch_loss
from engine.model.head import OutputHead
from engine.model.loss import LossChoice, choose_implementation, make_loss
from tests.model.samples import batch_of, cpu, disturb, load, load_family, run_spec
from tests.present import grad_of, present

HIDDEN, VOCABULARY, TOKENS = 24, 97, 53

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Relative to the largest gradient: a few units in the last place of each dtype (2^-24, 2^-8, 2^-11)."""

NEEDS_KERNEL = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="linear_cross_entropy came with torch 2.13"
)
IMPLEMENTATIONS = ("plain", "chunked", pytest.param("fused", marks=NEEDS_KERNEL))


Outcome = tuple[torch.Tensor, list[torch.Tensor]]
"""A summed loss, and the gradients of the hidden states and of the head's parameters."""


def problem(
    dtype: torch.dtype, *, bias: bool = False, scale: float = 1.0, softcap: float | None = None
) -> tuple[OutputHead, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    project = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in project.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    hidden_NH = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets_N = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return OutputHead(project, scale, softcap), hidden_NH, targets_N


def outcome(loss: torch.Tensor, head: OutputHead, hidden_NH: torch.Tensor) -> Outcome:
    hidden_NH.grad = None
    head.project.zero_grad()
    (loss * 0.37).backward()
    grads = [p.grad.float().clone() for p in head.project.parameters() if p.grad is not None]
    return loss.detach(), [grad_of(hidden_NH).float().clone(), *grads]


def assert_equal_within(dtype: torch.dtype, found: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=max(1e-6, TOLERANCE[dtype] / 4), atol=0)
    assert len(found[1]) == len(expected[1])
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert float((ours - theirs).abs().max()) <= TOLERANCE[dtype] * float(theirs.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 53, 1000])
@pytest.mark.parametrize(
    ("smoothing", "options"),
    [(0.0, {}), (0.1, {}), (0.0, {"softcap": 3.0}), (0.2, {"softcap": 3.0, "bias": True, "scale": 0.25})],
)
def test_the_chunk_loop_equals_the_plain_loss(
    dtype: torch.dtype, chunk_tokens: int, smoothing: float, options: dict[str, Any]
) -> None:
    head, hidden_NH, targets_N = problem(dtype, **options)
    plain = outcome(token_losses(head.logits(hidden_NH), targets_N, smoothing).sum(), head, hidden_NH)
    settings = LossSettings(smoothing, head.softcap, chunk_tokens)
    chunked = outcome(chunked_loss(head, hidden_NH, targets_N, settings), head, hidden_NH)
    assert chunked[0].dtype == torch.float32
    assert_equal_within(dtype, chunked, plain)


@NEEDS_KERNEL
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_torchs_kernel_summed_in_fp32_equals_the_plain_loss(dtype: torch.dtype) -> None:
    head, hidden_NH, targets_N = problem(dtype, bias=True)
    plain = outcome(token_losses(head.logits(hidden_NH), targets_N, 0.0).sum(), head, hidden_NH)
    fused = outcome(torch_loss(head, hidden_NH, targets_N, 9), head, hidden_NH)
    assert fused[0].dtype == torch.float32
    assert_equal_within(dtype, fused, plain)


def test_a_frozen_head_gets_no_gradient_and_changes_no_other() -> None:
    head, hidden_NH, targets_N = problem(torch.float32)
    learning = outcome(chunked_loss(head, hidden_NH, targets_N, LossSettings(0.0, None, 7)), head, hidden_NH)
    head.project.requires_grad_(False)
    head.project.weight.grad = None
    frozen = outcome(chunked_loss(head, hidden_NH, targets_N, LossSettings(0.0, None, 7)), head, hidden_NH)
    assert head.project.weight.grad is None
    assert torch.equal(frozen[1][0], learning[1][0])


def test_an_adapter_of_the_head_learns_where_nothing_before_it_does() -> None:
    """With method.targets = ["lm_head"], the hidden states have no gradient."""
    head, hidden_NH, targets_N = problem(torch.float32)
    hidden_NH.requires_grad_(False)
    wrapped = replace(head, project=nn.Sequential(head.project))
    grads = []
    for loss in (
        token_losses(wrapped.logits(hidden_NH), targets_N, 0.0).sum(),
        chunked_loss(wrapped, hidden_NH, targets_N, LossSettings(0.0, None, 7)),
    ):
        head.project.zero_grad()
        loss.backward()
        grads.append(grad_of(present(head.linear).weight).clone())
    torch.testing.assert_close(*grads)


def test_the_chunk_loop_is_correct_by_finite_differences() -> None:
    head, hidden_NH, targets_N = problem(torch.float64, softcap=2.0, bias=True)
    hidden_NH, targets_N = hidden_NH.detach()[:5].requires_grad_(), targets_N[:5]
    step = 1e-3
    direction_NH = torch.randn_like(hidden_NH)

    def at(offset: float) -> float:
        moved_NH = hidden_NH.detach() + offset * direction_NH
        with torch.no_grad():
            return float(token_losses(head.project(moved_NH).div(2.0).tanh() * 2.0, targets_N, 0.1).sum())

    loss = chunked_loss(head, hidden_NH, targets_N, LossSettings(0.1, 2.0, 2))
    loss.backward()
    slope = (at(step) - at(-step)) / (2 * step)
    assert float((grad_of(hidden_NH) * direction_NH).sum()) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_all_implementations_agree_on_a_model(implementation: LossChoice, kind: str) -> None:
    loaded = load(run_spec(method={"kind": kind}))
    disturb(loaded)
    batch = batch_of()
    results = []
    both: list[LossChoice] = ["plain", implementation]
    for name in both:
        loss = make_loss(loaded, implementation=name, label_smoothing=0.0, chunk_tokens=4, device=cpu())
        loaded.model.zero_grad()
        total = loss(batch)
        total.backward()
        results.append((total.detach(), [grad_of(p).clone() for _, p in loaded.trainable()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_to_learn_from_is_zero_with_zero_gradients(implementation: LossChoice) -> None:
    loaded = load(run_spec())
    loss = make_loss(loaded, implementation=implementation, label_smoothing=0.0, chunk_tokens=4, device=cpu())
    batch = batch_of()
    empty = replace(batch, labels_BS=torch.full_like(batch.labels_BS, -100), target_tokens=0)
    total = loss(empty)
    total.backward()
    assert float(total.detach()) == 0.0
    assert all(p.grad is not None and not p.grad.any() for _, p in loaded.trainable())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_adapter_on_the_head_learns_through_the_chunk_loop(tmp_path: Path, smoothing: float) -> None:
    loaded = load_family(tmp_path, "llama", method={"targets": ["q_proj"], "also_train": ["lm_head"]})
    disturb(loaded)
    batch, results = batch_of(), []
    for name in ("plain", "chunked"):
        loss = make_loss(loaded, implementation=name, label_smoothing=smoothing, chunk_tokens=4, device=cpu())
        loaded.model.zero_grad()
        total = loss(batch)
        total.backward()
        results.append((total.detach(), {name: grad_of(p).clone() for name, p in loaded.trainable()}))
    assert "lm_head.weight" in results[0][1]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_evaluation_needs_no_gradients() -> None:
    loaded = load(run_spec())
    loss = make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=4, device=cpu())
    with_gradients = float(loss(batch_of()).detach())
    with torch.no_grad():
        assert float(loss(batch_of())) == with_gradients


@NEEDS_KERNEL
def test_fused_with_smoothing_is_refused_rather_than_silently_plain() -> None:
    head, *_ = problem(torch.float32)
    with pytest.raises(UsageError, match="label_smoothing"):
        choose_implementation("fused", head, 0.1, cpu())
    with pytest.raises(UsageError, match="caps its logits"):
        choose_implementation("fused", replace(head, softcap=5.0), 0.0, cpu())


def test_a_family_that_cannot_be_asked_and_has_other_logits_is_refused(tmp_path: Path) -> None:
    loaded = load_family(tmp_path, "granite")
    own = loaded.base.forward

    def forward(**given: Any) -> Any:
        output = own(**given)
        if not isinstance(output.hidden_states, tuple):  # as where something stands in for the decoder
            raise LookupError("needs the states of all layers")
        output.logits = 2.0 * output.logits
        return output

    loaded.base.config.output_hidden_states = True
    loaded.base.forward = forward
    with pytest.raises(UsageError, match="not the output of its decoder and head"):
        make_loss(loaded, implementation="auto", label_smoothing=0.0, chunk_tokens=None, device=cpu())


def test_second_backward_says_why_it_cannot() -> None:
    head, hidden_NH, targets_N = problem(torch.float32)
    loss = chunked_loss(head, hidden_NH, targets_N, LossSettings(0.0, None, 7))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward pass again"):
        loss.backward()


@pytest.mark.parametrize("frozen", [True, False])
def test_memory_at_32k_vocabulary_stays_far_below_the_plain_loss(frozen: bool) -> None:
    peaks = {}
    for name in ("plain", "chunked"):
        device = MeteredDevice(4 * 2**30)
        with device.activate():
            project = nn.Linear(64, 32_000, bias=False).requires_grad_(not frozen)
            hidden_NH = torch.randn(2048, 64, requires_grad=True)
            targets_N = torch.randint(0, 32_000, (2048,))
            head = OutputHead(project, 1.0, None)
            held_bytes = device.memory().allocated_bytes
            device.reset_peak()
            if name == "plain":
                loss = token_losses(head.logits(hidden_NH), targets_N, 0.0).sum()
            else:
                loss = chunked_loss(head, hidden_NH, targets_N, LossSettings(0.0, None, 128))
            loss.backward()
            peaks[name] = device.memory().peak_bytes - held_bytes
    chunk_bytes, weight_gradient_bytes = 128 * 32_000 * 4, 0 if frozen else 64 * 32_000 * 4
    assert peaks["chunked"] <= 1.2 * chunk_bytes + 2 * weight_gradient_bytes + 4 * 2048 * 64 * 4
    assert peaks["plain"] > 10 * peaks["chunked"]
