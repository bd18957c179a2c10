"""Proof of `tunedeck doctor --gpus` among ranks that share weights: steps of a small model in shards, in each of which
memory runs out on one rank, are those of one rank that computes all micro-batches alone.

Shapes: B rows, S tokens, W features.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engine.budget.predict.shards import SHARDS_SINCE, recovers_with
from engine.config.files.machine import older
from engine.device.base import Device
from engine.device.determinism import unfilled_memory
from engine.device.oom import free_failed_graph
from engine.distributed.sharded import ShardedModel
from engine.verify.among_ranks import OUT_OF_MEMORY, exchange, require_none, several, tried
from engine.verify.record import Proof, ProvedRun, drawn, worst_error
from engine.verify.state import too_much

WIDTH, HIDDEN, VOCABULARY, LAYERS, ROWS, TOKENS = 36, 50, 61, 3, 2, 7
"""Sizes that do not divide by numbers of ranks, so that parts of parameters are unequal and padded."""
CLEAN_STEPS = 2
RATE = 0.05
"""Learning rate, high enough that weights of the step before are far from those after it."""
LIMIT = 5e-2
"""Largest relative error of bf16 results. Rounding was 2e-2 at most in twelve steps of 16 ranks (their sums taken one
after another on a CPU); gradients at weights of the step before are off by 0.13 and more."""
SECONDS_TO_FREE = 20.0
"""A thread of gloo or of autograd may free a buffer some time after its operation."""
QUEUED_PRODUCTS, QUEUED_WIDTH = 40, 4096
"""Matrix products that the other ranks queue: some hundred milliseconds of work for a GPU."""


class Layer(nn.Module):
    """A gated block on top of a residual."""

    def __init__(self, norm_W: Tensor, up_HW: Tensor, down_WH: Tensor) -> None:
        super().__init__()
        self.norm, self.up, self.down = Parameter(norm_W), Parameter(up_HW), Parameter(down_WH)

    def forward(self, x_BSW: Tensor) -> Tensor:
        """Apply the layer to hidden states."""
        normed_BSW = F.rms_norm(x_BSW, (WIDTH,), self.norm)
        return x_BSW + F.linear(F.silu(F.linear(normed_BSW, self.up)), self.down)


class SmallModel(nn.Module):
    """Embedding, layers, head; the same weights on every rank and at each call."""

    def __init__(self, run: ProvedRun) -> None:
        super().__init__()
        seeds = iter(range(100, 200))

        def weight(outputs: int, inputs: int) -> Tensor:
            weight_OI: Tensor = drawn((outputs, inputs), torch.bfloat16, run, next(seeds)) / inputs**0.5
            return weight_OI

        self.embedding = nn.Embedding(VOCABULARY, WIDTH, _weight=weight(VOCABULARY, WIDTH) * 2)
        self.layers = nn.ModuleList(
            Layer(1 + weight(1, WIDTH)[0], weight(HIDDEN, WIDTH), weight(WIDTH, HIDDEN)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, device="meta")
        self.head.weight = Parameter(weight(VOCABULARY, WIDTH))

    def forward(self, ids_BS: Tensor) -> Tensor:
        """The mean of the token losses of predicting each next token."""
        x_BSW = self.embedding(ids_BS)
        for layer in self.layers:
            x_BSW = layer(x_BSW)
        return F.cross_entropy(self.head(x_BSW)[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten())


def shard(run: ProvedRun, model: SmallModel) -> ShardedModel:
    """Spread a model over all ranks as the run's own would be, weights dropped after use. All ranks call this."""
    device, ranks = run.context.device, run.context.ranks
    with device.host_region():
        mesh = init_device_mesh(device.torch_device.type, (ranks.size,))
    return ShardedModel(
        model,
        model,
        [*([layer] for layer in model.layers), [model.embedding], [model.head]],
        mesh,
        ranks.voted_group(),
        head=model.head,
        drops_weights=True,
        fill=lambda modules: nullcontext(),
        host_region=device.host_region,
    )


def batch(run: ProvedRun, number: int) -> Tensor:
    """Token ids [ROWS, TOKENS] on the device, the same at each call with this `number`."""
    device = run.context.device
    with device.host_region():
        ids_BS = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(number))
    return device.upload(ids_BS)


class Place(NamedTuple):
    """A place in a step: the first operation `at` once the operation `after` has run so many `times`. torch 2.15 calls
    `fsdp::chunk_cat` `fsdp::chunk_cat_mixed_dtype`, so the beginning of a name will do for `after`."""

    after: str
    times: int
    at: str


PLACES = {
    "forward": Place("aten::silu", 1, "aten::silu"),
    "copy-out": Place("fsdp::split_with_sizes_copy", 2, "fsdp::split_with_sizes_copy"),
    "backward": Place("aten::silu_backward", 1, "aten::silu_backward"),
    "reduce allocation": Place("fsdp::chunk_cat", 2, "aten::empty"),
    "reduce cast": Place("c10d::_reduce_scatter_base_", 2, "aten::_to_copy"),
}
"""Places by name. At "copy-out" and "reduce cast" the other ranks have launched the same collective and go on."""


class RunsOutAt(TorchDispatchMode):
    """Context manager: inside the block, the operation at a place requests more than the device's cap allows, so that
    the error is the allocator's own."""

    def __init__(self, place: Place, device: Device) -> None:
        untyped: Any = super()
        untyped.__init__()
        self._place, self._device, self._left = place, device, place.times

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._schema.name
        if self._left == 0 and name == self._place.at:
            self._left = -1
            with unfilled_memory():
                torch.empty(too_much(self._device), dtype=torch.uint8, device=self._device.torch_device)
        result = operation(*args, **(kwargs or {}))
        if self._left > 0 and name.startswith(self._place.after):
            self._left -= 1
        return result


def prove_sharded_step(run: ProvedRun) -> str:
    """Take a step without a fault, then one for each place where memory may run out, on one rank after another, which
    is then repeated: with a vote before each collective, and with one for all of them, where the rank that failed joins
    the others in the rest (`engine.distributed.votes`). Compare gradients and weights of each step."""
    size, recovers = run.context.ranks.size, run.context.measures and recovers_with(torch.__version__)
    faults = [(place, n % size, once) for once in (False, True) for n, place in enumerate(PLACES)] if recovers else []
    steps = CLEAN_STEPS + len(faults)
    expected, trial, errors = _alone(run, steps), _Trial(run), []
    for step in range(steps):
        if step >= CLEAN_STEPS:
            trial.run_out(step, *faults[step - CLEAN_STEPS])
        where = f" in step {step + 1}, compared with one rank's,"
        errors.append(worst_error(trial.step(step), expected[step], LIMIT, where))
    shown = f"{steps} steps of {LAYERS} sharded layers are within {max(errors):.1e} of a single rank"
    return f"{shown}, also where memory runs out in {', '.join(PLACES)}" if recovers else shown


def _alone(run: ProvedRun, steps: int) -> list[dict[str, Tensor]]:
    """The results of each step with the micro-batches of all ranks and whole weights; of these this rank's parts: torch
    gives each rank as many rows of a parameter, the last fewer."""
    ranks, model, found = run.context.ranks, SmallModel(run), []
    for step in range(steps):
        with torch.enable_grad():
            for rank in range(ranks.size):
                model(batch(run, step * ranks.size + rank)).backward()
        wholes = _updated(dict(model.named_parameters()))
        model.zero_grad()
        each = {name: -(-len(whole) // ranks.size) for name, whole in wholes.items()}
        found.append({name: whole[each[name] * ranks.rank :][: each[name]] for name, whole in wholes.items()})
    return found


def _updated(parameters: dict[str, Parameter]) -> dict[str, Tensor]:
    """Take a step of gradient descent; returns copies of gradients and weights, by name."""
    found = dict[str, Tensor]()
    with torch.no_grad():
        for name, weight in parameters.items():
            if weight.grad is not None:
                weight.sub_(RATE * weight.grad)
                found |= {f"the gradient of {name}": weight.grad.detach().clone(), name: weight.detach().clone()}
    return found


class _Trial:
    """A small model in shards on this rank."""

    def __init__(self, run: ProvedRun) -> None:
        self._run, self._device, self._ranks = run, run.context.device, run.context.ranks
        self._model = SmallModel(run)
        self._sharded = shard(run, self._model)
        self._votes = self._ranks.voted_group()

    def step(self, step: int) -> dict[str, Tensor]:
        """Take a step; returns gradients and weights of this rank's parts, by name."""
        self._backward(step, once=False)
        self._sharded.sync_gradients()
        found = _updated(self._sharded.local_parameters())
        self._sharded.drop_gradients()
        return found

    def run_out(self, step: int, place: str, rank: int, once: bool) -> None:
        """Run out of memory at a place in a step on a rank, where ranks vote before each collective or `once` for all,
        and recover. Raises DisprovedError on all ranks if one of them did not learn of it, if memory stays allocated,
        or if weights have changed."""
        before = {name: part.detach().clone() for name, part in self._sharded.local_parameters().items()}
        self._device.release_cached()
        allocated_bytes = self._device.memory().allocated_bytes
        with RunsOutAt(PLACES[place], self._device) if rank == self._ranks.rank else self._busy():
            failure = tried(partial(self._attempt, step, once=once))
        told = exchange(self._ranks, failure)
        self._sharded.drop_gradients()
        free_failed_graph(self._device)
        self._sharded.recover()
        self._device.release_cached()
        expected = [OUT_OF_MEMORY if each == rank else "" for each in range(self._ranks.size)]
        complaint = f"the outcomes by rank are {told}, not {expected}" if told != expected else ""
        when = f"after memory ran out in {place} on rank {rank}{', with one vote' if once else ''}"
        require_none(self._ranks, complaint or self._left_over(allocated_bytes, before), when)

    def _busy(self) -> AbstractContextManager[object]:
        """Give a device that queues its work some, so that the host runs ahead of it."""
        if self._device.asynchronous:
            product = torch.zeros((QUEUED_WIDTH,) * 2, dtype=torch.bfloat16, device=self._device.torch_device)
            for _ in range(QUEUED_PRODUCTS):
                torch.mm(product, product, out=torch.empty_like(product))
        return nullcontext()

    def _attempt(self, step: int, *, once: bool) -> None:
        join_others = partial(self._sharded.join_others, self._device, lambda *_: None)
        self._votes.run_together(partial(self._backward, step, once=once), join_others)
        self._device.synchronize()

    def _left_over(self, allocated_bytes: int, before: dict[str, Tensor]) -> str:
        """What is wrong on this rank after recovery, in words; empty if nothing is."""
        deadline = time.monotonic() + SECONDS_TO_FREE
        while (left_bytes := self._device.memory().allocated_bytes - allocated_bytes) > 0:
            if time.monotonic() > deadline:
                return f"{left_bytes:,} bytes stay allocated"
            time.sleep(0.005)
        for name, part in self._sharded.local_parameters().items():
            if not torch.equal(part.detach(), before[name]):
                return f"{name} has changed"
            if part.grad is not None:
                return f"{name} has a gradient left"
        return ""

    def _backward(self, step: int, *, once: bool) -> None:
        votes, ids_BS = self._sharded.votes, batch(self._run, step * self._ranks.size + self._ranks.rank)
        votes.begin_attempt(once=once)
        with torch.enable_grad(), votes.micro_batch():
            self._model(ids_BS).backward()


SHARDED_STEP = Proof(
    "sharded_step",
    prove_sharded_step,
    lambda run: (
        "the run ends, because training would give a different result; use parallel.strategy=replicated if "
        "the model fits one device"
    ),
    lambda run: several(run) and not older(torch.__version__, SHARDS_SINCE),
    votes=True,
)
