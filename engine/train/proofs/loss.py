"""Proof: the loss kernel gives the sum of token losses and its gradients, as the plain loss in fp32 does.

Shapes: N tokens with a target, H hidden, V vocabulary.

Try: `pytest tests/train/proofs/test_kernels.py`
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.chunked import token_losses
from engine.model.decoder import autocast
from engine.model.head import OutputHead
from engine.model.loss import LossFunction
from engine.train.proofs.record import DisprovedError, drawn, require_close, tolerance
from engine.train.setup import TrainingSetup

TOKENS, CHUNK_TOKENS, VOCABULARY = 13, 5, 263
"""Two full chunks and a part of one; the vocabulary fills no tile of a kernel."""


class WrappedLinear(nn.Linear):
    """A linear layer that the loss does not treat as plain, like a head with an adapter or with 4-bit weights."""


def applies(setup: TrainingSetup) -> bool:
    """Whether the run uses another implementation of the loss than the reference, "plain"."""
    return setup.context.loss.implementation != "plain"


def facts(setup: TrainingSetup) -> list[str]:
    """What the outcome depends on: implementation, label smoothing, dtypes and shape of the head."""
    loss, precision = setup.context.loss, setup.context.loaded.precision
    head = loss.head
    trains = [name for name, parameter in head.project.named_parameters() if parameter.requires_grad]
    about_head = [head.linear is not None, head.scale, head.softcap, trains, _hidden(setup)]
    return [loss.implementation, str(loss.label_smoothing), str(precision.compute), str(about_head)]


def prove(setup: TrainingSetup) -> str:
    """Compare the loss and its gradients with the plain loss in fp32. Returns what was shown, in a few words. Raises
    DisprovedError if they differ by more than rounding."""
    return _proved(setup, setup.context.loss.implementation)


def fall_back(setup: TrainingSetup) -> str:
    """Use the chunked loss if it passes this proof, else the plain one; returns what the run does instead, in a few
    words."""
    loss = setup.context.loss
    passes = loss.implementation != "chunked" and _passes(setup, "chunked")
    loss.implementation = "chunked" if passes else "plain"
    return f"loss = {loss.implementation}"


def repeats(setup: TrainingSetup) -> None:
    """Compute the loss twice. Raises DisprovedError if it or a gradient differs in a bit."""
    first, second = (_results(setup, setup.context.loss.implementation) for _ in range(2))
    for name, one in first.items():
        if not torch.equal(one, second[name]):
            raise DisprovedError(f"{name} differs between two runs on the same input")


def _passes(setup: TrainingSetup, implementation: str) -> bool:
    try:
        return bool(_proved(setup, implementation))
    except DisprovedError:
        return False


def _proved(setup: TrainingSetup, implementation: str) -> str:
    found, expected = _results(setup, implementation), _results(setup, None)
    limit = tolerance(setup.context.loaded.precision.compute)
    worst = max(require_close(name, found.get(name), expected[name], limit) for name in expected)
    return f"{implementation} is within {worst:.1e} of the plain loss in fp32, gradients too"


def _results(setup: TrainingSetup, implementation: str | None) -> dict[str, Tensor]:
    """The loss and its gradients, by name: as `implementation` computes them, or if that is None, the plain loss in
    fp32."""
    loss, loaded = setup.context.loss, setup.context.loaded
    compute = loaded.precision.compute
    dtype = torch.float32 if implementation is None else loaded.precision.weights
    weight_VH = drawn((VOCABULARY, _hidden(setup)), compute, setup, 5).to(dtype) / _hidden(setup) ** 0.5
    weight_VH = weight_VH.to(compute).to(dtype)
    hidden_NH = drawn((TOKENS, _hidden(setup)), compute, setup, 6)
    hidden_NH = (hidden_NH.float() if implementation is None else hidden_NH).requires_grad_()
    targets_N = (drawn((TOKENS,), torch.float32, setup, 7).abs() * 100).long() % VOCABULARY
    project = _head_like(setup, weight_VH)
    head = OutputHead(project, loss.head.scale, loss.head.softcap)
    with torch.enable_grad():
        if implementation is None:
            total = token_losses(head.logits(hidden_NH), targets_N, loss.label_smoothing).sum()
        else:
            kernel = LossFunction(loaded, head, implementation, loss.label_smoothing, CHUNK_TOKENS)
            with autocast(loaded):
                total = kernel.sum_of_losses(hidden_NH, targets_N)
        # Half of it, as the step divides the sum by its tokens: a kernel that ignores what comes from above is caught.
        (total * 0.5).backward()
    found = {"the loss": total.detach(), "the gradient of hidden states": _present(hidden_NH.grad)}
    if project.weight.requires_grad:
        found["the gradient of the head"] = _present(project.weight.grad)
    return found


def _present(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise DisprovedError("backward leaves no gradient")
    return gradient


def _head_like(setup: TrainingSetup, weight_VH: Tensor) -> nn.Linear:
    """A small head that the loss treats like the run's own: plain or not, trained or frozen."""
    head = setup.context.loss.head
    kind = nn.Linear if head.linear is not None else WrappedLinear
    project = kind(weight_VH.shape[1], weight_VH.shape[0], bias=False, device="meta")
    trained = any(parameter.requires_grad for parameter in head.project.parameters())
    project.weight = nn.Parameter(weight_VH, requires_grad=trained)
    return project


def _hidden(setup: TrainingSetup) -> int:
    return int(setup.context.loaded.config.get_text_config().hidden_size)
