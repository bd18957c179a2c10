"""Proofs of what the transaction of a step rests on: an out-of-memory error is undone, optimizer state is restored,
copies between host and device are whole, and the host does not wait inside a micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from engine.batching.micro_batches import plan_micro_batches
from engine.device.base import Device
from engine.device.determinism import unfilled_memory
from engine.device.oom import OutOfMemory, catch_oom, free_failed_graph
from engine.train.step.computation import StepComputation
from engine.train.step.objective import StepTokens
from engine.train.step.optimizer import StepGuard, guard_parameters
from engine.train.step.optimizer_state import state_tensors
from engine.verify.record import DisprovedError, Proof, ProvedRun, drawn

ABOVE_BYTES = 64 * 2**20
"""How far a request goes beyond the cap."""
ORDINARY_BYTES = 2**20
SHAPES = ((96, 64), (33,))
"""A matrix of more than 4,096 elements, which 8-bit optimizers quantise, and a vector, which they do not."""
PROOF_RATE = 0.01
"""The learning rate of the proved optimizer. The run's own may be too small for one step to change any bf16 weight."""
COPIES, ELEMENTS = 4, 4099
"""Copies in flight at once: each must have a buffer of its own until it has arrived."""

Named = list[tuple[str, Parameter]]


def prove_allocator(run: ProvedRun) -> str:
    """Request more bytes than the cap allows, then an ordinary amount: is it refused, and counted correctly after?"""
    device = run.context.device
    before = device.memory().allocated_bytes
    refusal = _refused(device)
    _require_returned(device, before)
    ordinary = torch.empty(ORDINARY_BYTES, dtype=torch.uint8, device=device.torch_device)
    if device.memory().allocated_bytes < before + ordinary.nbytes:
        raise DisprovedError("an allocation after a failed one is not counted")
    del ordinary
    _require_returned(device, before)
    return (
        f"allocations above {device.capacity_bytes / 2**30:.2f} GiB fail ({refusal.kind} memory), and later "
        "ones succeed"
    )


def prove_oom_in_backward(run: ProvedRun) -> str:
    """Run out of memory inside backward, recover as a step does, and compute the same gradient again."""
    device = run.context.device
    weight = drawn((64, 64), torch.float32, run, 30).requires_grad_()
    expected = _gradient(weight, 0)
    before = device.memory().allocated_bytes
    with unfilled_memory():
        failure = catch_oom(lambda: _gradient(weight, too_much(device)), device, "proof")
    if failure is None:
        raise DisprovedError("backward continues after an allocation above the cap")
    free_failed_graph(device)
    device.release_cached()
    _require_returned(device, before)
    if weight.grad is not None or not torch.equal(_gradient(weight, 0), expected):
        raise DisprovedError("the gradient after an out-of-memory error differs from the one before")
    return "after an out-of-memory error in backward, all memory is free and the gradient is the same"


def _stop_growing(run: ProvedRun) -> str:
    run.context.may_grow = False
    return "micro-batches do not grow, so that no allocation is risked"


def _gradient(weight: Tensor, failing_bytes: int) -> Tensor:
    """The gradient of a small computation whose backward allocates `failing_bytes` before it is done."""
    apply: Any = _Allocates.apply
    with torch.enable_grad():
        loss = apply((weight @ weight).tanh(), failing_bytes).square().sum()
        return torch.autograd.grad(loss, weight)[0]


class _Allocates(torch.autograd.Function):
    """Identity whose backward allocates the given number of bytes and frees them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size_bytes: int) -> Tensor:
        ctx.size_bytes = size_bytes
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        torch.empty(ctx.size_bytes, dtype=torch.uint8, device=upstream[0].device)
        return upstream[0], None


def _refused(device: Device) -> OutOfMemory:
    size_bytes = too_much(device)
    with unfilled_memory():
        place = device.torch_device
        refusal = catch_oom(lambda: torch.empty(size_bytes, dtype=torch.uint8, device=place), device, "proof")
    if refusal is None:
        raise DisprovedError(f"{size_bytes:,} bytes above the cap of {device.capacity_bytes:,} were allocated")
    device.release_cached()
    return refusal


def too_much(device: Device) -> int:
    """Bytes that the device's cap does not allow beside what is allocated now."""
    return max(0, device.capacity_bytes - device.memory().allocated_bytes) + ABOVE_BYTES


def _require_returned(device: Device, before: int) -> None:
    now = device.memory().allocated_bytes
    if now > before:
        raise DisprovedError(f"{now - before:,} bytes stay allocated after a failed allocation")


def _optimizer_facts(run: ProvedRun) -> list[str]:
    return [run.spec.recipe.train.model_dump_json(), str(_dtypes(run))]


def prove_optimizer(run: ProvedRun) -> str:
    """Take a step on small parameters, restore weights and state, and take it again: are bits equal, and did all state
    exist before the first step? Roll-back and resume need both; state outside of tensors, such as a step counter that
    is a plain int, is neither saved nor restored."""
    named = _parameters(run)
    weights = {name: parameter.detach().clone() for name, parameter in named}
    train = run.spec.recipe.train.model_copy(update={"groups": [], "learning_rate": PROOF_RATE})
    guard = guard_parameters(train, named, run.context.device)
    start = _values(guard, named)
    if any(not torch.equal(value, start[name]) for name, value in weights.items()):
        raise DisprovedError("allocating its state changed weights")
    if any(float(value) for name, value in start.items() if name.endswith("::step")):
        raise DisprovedError("allocating its state advanced the step counters")
    once = _stepped(guard, named, run)
    with torch.no_grad():
        for name, tensor in [*named, *state_tensors(guard.optimizer, named)]:
            tensor.copy_(start[name])
    guard.read_counters()
    _compare_steps(start, once, _stepped(guard, named, run))
    return (
        f"{type(guard.optimizer).__name__}: its state can be allocated without a step, and a step repeats "
        "exactly from restored state"
    )


def _distrust_optimizer(run: ProvedRun) -> str:
    run.context.guard.distrust()
    return "a failed step is undone by going back to the last checkpoint"


def _compare_steps(start: dict[str, Tensor], once: dict[str, Tensor], again: dict[str, Tensor]) -> None:
    if start.keys() != once.keys():
        added = sorted(once.keys() - start.keys())
        raise DisprovedError(f"its first step creates more state ({', '.join(added[:3])})")
    for name in start:
        if not torch.equal(once[name], again[name]):
            raise DisprovedError(f"{name} differs when the step is repeated: some state is not restored")
        if "::" not in name and torch.equal(start[name], once[name]):
            raise DisprovedError(f"its step does not change {name}")


def _parameters(run: ProvedRun) -> Named:
    """Small parameters with their names, in each dtype that the run trains."""
    return [
        (f"weight {place} in {dtype}", Parameter(drawn(shape, dtype, run, 10 + place)))
        for dtype in _dtypes(run)
        for place, shape in enumerate(SHAPES)
    ]


def _dtypes(run: ProvedRun) -> list[torch.dtype]:
    return sorted({parameter.dtype for _, parameter in run.context.loaded.trainable()}, key=str)


def _values(guard: StepGuard, named: Named) -> dict[str, Tensor]:
    """Copies of all weights and of all optimizer state that checkpoints save, by name."""
    weights = {name: parameter.detach().clone() for name, parameter in named}
    return {**weights, **{name: value.clone() for name, value in state_tensors(guard.optimizer, named)}}


def _stepped(guard: StepGuard, named: Named, run: ProvedRun) -> dict[str, Tensor]:
    """Take step 1 with the same gradients at each call; returns copies of weights and state after it, by name."""
    for place, (_, parameter) in enumerate(named):
        parameter.grad = drawn(tuple(parameter.shape), parameter.dtype, run, 20 + place)
    guard.prepare()
    guard.step(1)
    guard.accept()
    for _, parameter in named:
        parameter.grad = None
    return _values(guard, named)


def prove_copies(run: ProvedRun) -> str:
    """Copy several tensors to the device through page-locked memory without waiting, offload and park them, and read
    them back."""
    device = run.context.device
    with device.host_region():
        sent = [torch.arange(ELEMENTS, dtype=torch.int64) * (number + 1) for number in range(COPIES)]
    arrived = [device.upload(device.pin(tensor)) for tensor in sent]
    device.synchronize()
    for number, (tensor, copy) in enumerate(zip(sent, arrived, strict=True), 1):
        if not torch.equal(device.download(copy), tensor):
            raise DisprovedError(f"copy {number} of {COPIES} arrived with other values than were sent")
    for number, (tensor, copy) in enumerate(zip(sent, _there_and_back(device, arrived), strict=True), 1):
        if not torch.equal(device.download(copy), tensor):
            raise DisprovedError(f"offloaded tensor {number} of {COPIES} came back with other values")
        if not torch.equal(device.download(device.upload(device.park(copy))), tensor):
            raise DisprovedError(f"tensor {number} of {COPIES}, kept on the host, has other values")
    return f"{COPIES} concurrent copies arrive unchanged, and return unchanged from the host"


def _there_and_back(device: Device, tensors: list[Tensor]) -> list[Tensor]:
    """Offload `tensors` and bring all of them back, the last first, while the next one is prefetched; returns them in
    their order. Device memory that an offload frees is overwritten. The list `tensors` is emptied."""
    copies = []
    while tensors:
        copies.append(device.offload(tensors.pop(0) + 0))
        torch.zeros(ELEMENTS, dtype=torch.int64, device=device.torch_device)
    back = []
    for number in reversed(range(len(copies))):
        back.append(copies[number].fetch())
        if number:
            copies[number - 1].prefetch()
    device.settle_offloads()
    return back[::-1]


def _stop_pinning(run: ProvedRun) -> str:
    run.context.device.stop_pinning()
    return "copies to the device use pageable memory"


def _host_syncs_facts(run: ProvedRun) -> list[str]:
    recipe, context = run.spec.recipe, run.context
    about = [recipe.model, recipe.method, recipe.data.packing, recipe.train.gradient_checkpointing]
    return [*map(str, about), context.loaded.attention, context.loss.implementation, str(context.loss.offload.on)]


def prove_host_syncs(run: ProvedRun) -> str:
    """Run a micro-batch of the shortest sample and count how often the host waits for the device. The micro-batch
    budget is restored and the gradients are dropped."""
    context = run.context
    samples = np.array([context.data.lengths.argmin()])
    plan = plan_micro_batches(context.data.lengths[samples], context.cost, context.budget.budget_bytes)
    budget, context.budget = context.budget, replace(context.budget)
    try:
        found = StepComputation(context).host_syncs(1, samples, plan[0], StepTokens(1, 1))
    finally:
        context.budget = budget
        context.strategy.drop_gradients()
        if any(True for _ in context.rollback.moving()):
            context.rollback.restore()
    if found:
        raise DisprovedError(f"the host waits for the device {len(found)} times in a micro-batch, first in {found[0]}")
    return "the host never waits for the device within a micro-batch"


# The plain CPU has no cap on allocated bytes.
ALLOCATOR = Proof("allocator", prove_allocator, _stop_growing, lambda run: run.context.measures)
OOM_IN_BACKWARD = Proof("oom_in_backward", prove_oom_in_backward, _stop_growing, lambda run: run.context.measures)
OPTIMIZER = Proof("optimizer", prove_optimizer, _distrust_optimizer, facts=_optimizer_facts)
COPIED = Proof("copies", prove_copies, _stop_pinning, facts=lambda run: [])
HOST_SYNCS = Proof(
    "host_syncs",
    prove_host_syncs,
    lambda run: "none needed: it costs time but does not change the result",
    lambda run: run.context.strategy.voted_group is None,  # no collectives: one rank can run a micro-batch alone
    _host_syncs_facts,
)
