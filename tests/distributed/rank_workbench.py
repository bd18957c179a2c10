"""Optimizer steps on several ranks: shared by the tests and the torture of ranks.

Not a test module. Every rank builds the setup of the real engine on a metered device of its own. How allocations are
made to fail there is in `tests.distributed.faults`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.batching.predicted_cost import micro_batch_cost
from engine.budget.advise.plan import find_predictor
from engine.budget.predict.parallel_layout import shards
from engine.budget.predict.shards import SHARDS_SINCE
from engine.config.files.machine import installed, older
from engine.config.schema.run import RunSpec
from engine.distributed.ranks import Ranks
from engine.journal.directory import RunDirectory
from engine.journal.events import Journal
from engine.train.run.preferences import learn_preferences
from engine.train.run.setup import set_up
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.budget_growth import CLEAN_STEPS, CeilingWatch
from engine.train.step.failures import RecoveredOom
from engine.train.step.ladder import adopt_memory, memory_as_json
from engine.train.step.transaction import StepTransaction
from engine.train.strategy.sequence_parallel import SequenceParallel
from engine.train.strategy.sharded import Sharded
from tests.distributed.faults import Fault, Witness, differences
from tests.train.fault_rig import replace_optimizer, write_model
from tests.train.preference_rows import write_pairs
from tests.train.run_helpers import make_spec, write_samples

SAMPLES, PAIRS = "samples.jsonl", "pairs.jsonl"
STEPS = 2
MEASUREMENTS = 3
FULL: dict[str, Any] = {"method": {"kind": "full"}}
LORA: dict[str, Any] = {"method": {"kind": "lora", "rank": 4}}
DPO: dict[str, Any] = {"method": {"kind": "lora", "rank": 4, "objective": "dpo"}}
KTO: dict[str, Any] = {**DPO, "preference": {"loss": "kto"}}
ROWS: dict[str, Any] = {**DPO, "model": {"add_tokens": ["a", "e", "<new>"]}}
"""Trains the rows of two tokens that the data have, and of one that the vocabulary lacks."""
LADDER = {"ladder": ["retry", "defragment", "cut", "checkpointing", "chunk_loss"]}
"""Rungs that move memory to the host change the level that "nothing left over" is measured from."""

NO_SHARDS = older(installed("torch"), SHARDS_SINCE)
NEEDS_SHARDS = pytest.mark.skipif(NO_SHARDS, reason="this torch is too old to spread weights over ranks")


def spec_of(folder: Path, ranks: int, tables: dict[str, Any]) -> RunSpec:
    """A small run on `ranks` metered devices, with micro-batches of two sequences.

    AdamW's `eps` is large, so that rounding errors in gradients near zero do not become updates of a whole learning
    rate.
    """
    train = {"micro_batch": 2, "batch_size": 10, "max_steps": 6, "eps": 1e-4, **tables.get("train", {})}
    asked = tables.get("parallel", {"strategy": "replicated"}) if ranks > 1 else {"strategy": "single"}
    tables = {name: table for name, table in tables.items() if name != "parallel"}
    samples = PAIRS if tables.get("method", {}).get("objective") == "dpo" else SAMPLES
    spec = make_spec(folder / samples, memory_gib=1.0, **{**tables, "train": train})
    parallel = spec.profile.parallel.model_copy(update=asked)
    device = spec.profile.device.model_copy(update={"count": ranks})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"device": device, "parallel": parallel})})


def sharded(kind: dict[str, Any], shard: str, *, tied: bool = False, **train: Any) -> dict[str, Any]:
    """`kind`, the recipe tables of a training method, extended by those of a sharded run (`shard`: "gradients" or
    "parameters"; `train`: keys of that table). With `tied`, the model's head is tied to the embedding."""
    parallel = {"strategy": "sharded", "shard": shard}
    return {**kind, "parallel": parallel, "train": train, "backoff": LADDER, "tied": tied}


def small_model(folder: Path, tables: dict[str, Any], *, layers: int = 2, width: int = 16) -> dict[str, Any]:
    """`tables` with a model in `folder` that is small enough for many steps."""
    tied = tables["tied"]
    folder_of_model = write_model(folder / f"model-{layers}-{width}-{tied}", layers, width, tied=tied)
    model = {**tables.get("model", {}), "id": str(folder_of_model)}
    return {**{name: table for name, table in tables.items() if name != "tied"}, "model": model}


def write_equal_samples(path: Path, count: int) -> None:
    """Write `count` samples of 64 tokens each, nearly all of them targets. Of a model this small, no tensor is then
    rounded up by much, so measured memory can be compared with the plan."""
    sample = json.dumps({"prompt": "ab", "completion": "abcdefg " * 7 + "abcde"})
    path.write_text(f"{sample}\n" * count)


class RankWorkbench:
    """A training setup on one rank that can be reset to its first state, to take the same steps again."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        tables: dict[str, Any],
        *,
        capacity_bytes: int = 2**30,
        at_start: Fault | None = None,
        votes_once: bool = False,
        count: int = STEPS,
    ) -> None:
        """`tables` of the recipe; "torch_optimizer" replaces its optimizer by one of torch's (`tests.train.fault_rig`).
        With `at_start` an allocation fails while this rank sets up. With `votes_once`, sharded ranks take steps as if
        many had succeeded before: with one vote for each micro-batch, until memory runs out. `count` is the number of
        steps that `steps` takes."""
        if ranks.is_rank0:
            write_samples(folder / SAMPLES)
            write_pairs(folder / PAIRS, count=48, longest=20)
        ranks.all_gather_object("written")
        self.ranks, self.told = ranks, list[RecoveredOom]()
        self.device = Witness(capacity_bytes)
        self._active = self.device.activate()
        self._active.__enter__()
        tables = dict(tables)
        torch_optimizer = tables.pop("torch_optimizer", None)
        self.spec = spec_of(folder, ranks.size, tables)
        if at_start:
            at_start.spring(self.device)
        self.setup: TrainingSetup = set_up(self.spec, self.device, Journal(None), self.told.append, ranks)
        learn_preferences(self.setup, RunDirectory(folder), Journal(None))
        if torch_optimizer:
            replace_optimizer(self.setup, torch_optimizer)
        self.asked = 0, 0
        """Allocations asked for by the end of the last steps: of the device, of the host."""
        self._applied: list[Tensor | None] = []
        """Gradients as the optimizer was last given them: of this rank's context, where each holds a part."""
        self.setup.context.optimizer.register_step_pre_hook(self._look)
        self.transaction = StepTransaction(self.setup.context)
        self.transaction.probe(1, self.setup.order.step(1))
        with self.device.host_region():
            self._weights = [parameter.detach().clone() for parameter in self.setup.context.strategy.parameters]
            self._state = deepcopy(self.setup.context.optimizer.state_dict())
            self._memory = deepcopy(memory_as_json(self.setup.context))
        self.votes_once, self._count = votes_once, count
        strategy = self.setup.context.strategy
        self._known_order = dict(vars(strategy.model.votes)) if isinstance(strategy, Sharded) else {}
        """What the votes of a sharded model know after the probe, where each collective was voted on."""

    def close(self) -> None:
        """Deactivate the device."""
        self._active.__exit__(None, None, None)

    def reset(self) -> None:
        """Restore the state after set-up."""
        context = self.setup.context
        with self.device.host_region(), torch.no_grad():
            for parameter, first in zip(self.setup.context.strategy.parameters, self._weights, strict=True):
                parameter.copy_(first)
            for state, first in zip(context.optimizer.state.values(), self._state["state"].values(), strict=True):
                for key, tensor in first.items():
                    state[key].copy_(tensor)
        if isinstance(context.strategy, Sharded):
            vars(context.strategy.model.votes).update(self._known_order)
        self.transaction.ceiling_watch = CeilingWatch(context)
        for _ in range(CLEAN_STEPS if self.votes_once else 0):
            self.transaction.ceiling_watch.record_step()
        context.guard.forget()
        adopt_memory(context, deepcopy(self._memory))
        self.told.clear()

    def steps(self) -> dict[str, Any]:
        """Take the first steps. Returns lists with an entry for each step (losses, gradient norms, samples, choices of
        experts, gradients as one vector) and the weights after the last step as one vector. Gradients and weights are
        gathered from all ranks. All ranks must call this."""
        outcomes, gradients = [], []
        for step in range(1, self._count + 1):
            outcomes.append(self.transaction.run(step, self.setup.order.step(step)))
            gradients.append(self._applied)
        # What is asked for from here on is no part of the steps.
        self.asked = len(self.device.asked), self.device.host_allocations
        self.device.fail_at(None)
        self.device.fail_host_at(None)
        return {
            "losses": [outcome.loss for outcome in outcomes],
            "norms": [outcome.grad_norm for outcome in outcomes],
            "samples": [outcome.samples for outcome in outcomes],
            "choices": [None if outcome.choices_LE is None else outcome.choices_LE.tolist() for outcome in outcomes],
            "gradients": [self._whole(each) for each in gradients],
            "weights": self._whole(self.setup.context.strategy.parameters),
        }

    def memory(self) -> tuple[int, int]:
        """(planned, measured) peak bytes of this rank in steps. All ranks call this.

        A thread of gloo frees a buffer some time after its operation, which can only increase a peak, so the least
        measured peak of several steps is returned.
        """
        plan = micro_batch_cost(self.spec, self.setup.context.bounds).plan
        assert plan is not None
        self.reset()
        peaks = []
        # The first step is not measured: what it would leave behind shows in those after it.
        for step in range(1, MEASUREMENTS + 2):
            self.transaction.work.peak_bytes = 0
            self.transaction.run(step, self.setup.order.step(step))
            peaks.append(self.transaction.work.peak_bytes)
        return plan.peak_bytes, min(peaks[1:])

    def _look(self, *_: Any) -> None:
        # Unseen by the device: nothing fails here.
        with _disable_current_modes():
            grads = [parameter.grad for parameter in self.setup.context.strategy.parameters]
            self._applied = [None if grad is None else grad.detach().clone() for grad in grads]

    def _whole(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The tensors of all trainable parameters, gathered from all ranks and concatenated into one fp64 vector. A
        missing tensor (None) counts as zeros."""
        strategy = self.setup.context.strategy
        weights = strategy.inner if isinstance(strategy, SequenceParallel) else strategy
        with self.device.host_region(), torch.no_grad():
            pairs = zip(tensors, strategy.parameters, strict=True)
            filled = [torch.zeros_like(p) if tensor is None else tensor.detach() for tensor, p in pairs]
            if isinstance(weights, Sharded):
                wholes = weights.model.full_parameters().values()
                filled = [_gathered(part, whole) for part, whole in zip(filled, wholes, strict=True)]
            return torch.cat([tensor.double().view(-1) for tensor in filled])


def planned_memory(ranks: Ranks, folder: Path, cases: Mapping[Any, dict[str, Any]]) -> dict[Any, tuple[int, int]]:
    """For each case: (planned, measured) peak bytes of this rank, for recipe tables where every sequence has the
    maximum length. All ranks call it."""
    equal = folder / "equal.jsonl"
    if ranks.is_rank0:
        write_equal_samples(equal, 64)
    ranks.all_gather_object("written")
    found = {}
    for name, tables in cases.items():
        data = {"sources": [{"name": "main", "path": str(equal), "template": "none"}]}
        work = RankWorkbench(folder, ranks, {**tables, "data": data})
        found[name] = work.memory()
        work.close()
    return found


def exchanged_in_micro_batch(ranks: Ranks, folder: Path, tables: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Bytes of weights and of gradients in the buffers of a micro-batch's collectives: (planned, measured). All ranks
    call it."""
    work = RankWorkbench(folder, ranks, tables)
    counts = [0, 0]
    gather, reduce = DefaultAllGather.__call__, DefaultReduceScatter.__call__

    def counting(which: int, call: Callable[..., Any], place: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            counts[which] += named[place].nbytes
            return call(*arguments, **named)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultAllGather, "__call__", counting(0, gather, "output_tensor"))
        patch.setattr(DefaultReduceScatter, "__call__", counting(1, reduce, "input_tensor"))
        outcome = work.transaction.run(1, work.setup.order.step(1))
    predictor = find_predictor(work.spec)
    assert predictor.arch is not None
    groups = shards(predictor.arch, predictor.config, predictor.layout)
    work.close()
    assert groups is not None
    planned = [groups.micro_batch.gathered, groups.micro_batch.reduced]
    return planned, [count / outcome.micro_batches for count in counts]


def on_uneven_devices(ranks: Ranks, folder: Path, tables: dict[str, Any]) -> dict[str, Any]:
    """Take steps where rank 1 has room for much smaller micro-batches than the others. Returns their results, the ranks
    that failed, the remedies, and the budget afterwards. All ranks call it."""
    peaks = []
    for rows in (1, 5):
        tables = {**tables, "train": {"micro_batch": rows}}
        work = RankWorkbench(folder, ranks, tables)
        work.steps()
        peaks.append(work.transaction.work.peak_bytes)
        work.close()
    tight = sum(max(told) for told in zip(*ranks.all_gather_object(peaks), strict=True)) // 2
    work = RankWorkbench(folder, ranks, tables, capacity_bytes=tight if ranks.rank == 1 else 2**30)
    result = work.steps()
    result["told"] = [(each.oom.rank, each.remedy) for each in work.told]
    result["budget"] = work.setup.context.budget.as_json()
    work.close()
    return result


def wrong_on_uneven_devices(by_rank: Sequence[dict[str, Any]], expected: dict[str, Any]) -> list[str]:
    """What is wrong with the results of `on_uneven_devices`: rank 1 alone must have failed, and all ranks must have the
    budget that it learned."""
    first = by_rank[0]
    found = [f"rank {rank} failed" for rank, _ in first["told"] if rank != 1]
    found += [] if first["told"] else ["no rank failed"]
    for rank, result in enumerate(by_rank):
        if (result["told"], result["budget"]) != (first["told"], first["budget"]):
            found.append(f"rank {rank} knows {result['told']}, {result['budget']}; rank 0 {first}")
        found += [f"rank {rank}: {words} differ" for words in differences(result, expected)]
    return found


def _gathered(part: Tensor, whole: DTensor) -> Tensor:
    spread = DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return spread.full_tensor()
