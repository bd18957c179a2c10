"""Four ranks that share sequences, in pairs and all together, learn what one process learns, also when allocations
fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.distributed.sequence_parallel import SequenceGroup, join_sequence_group, to_heads, to_positions
from engine.errors import UsageError
from engine.model.loss import make_loss
from engine.model.tokenizer import byte_tokenizer
from engine.model.ulysses_attention import join_ulysses_attention
from tests.distributed.faults import differences, sampled, wrong_among
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import (
    DPO,
    FULL,
    KTO,
    LADDER,
    LORA,
    NEEDS_SHARDS,
    NO_SHARDS,
    RankWorkbench,
    on_uneven_devices,
    planned_memory,
    wrong_on_uneven_devices,
)
from tests.model.samples import FAMILIES as SIZES
from tests.model.samples import batch_of, cpu, load, run_spec
from tests.model.samples import write_model as write_family
from tests.train.fault_rig import write_model

RANKS = 4
FAULTS = 5
KINDS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "full, checkpointing": {**FULL, "train": {"gradient_checkpointing": True}},
    "lora with dropout": {"method": {**LORA["method"], "dropout": 0.3}},
    "lora, checkpointing": {**LORA, "train": {"gradient_checkpointing": True, "micro_batch": 1}},
    "plain loss": {**FULL, "train": {"loss": "plain", "label_smoothing": 0.1, "micro_batch": 3}},
    "pairs": {**DPO, "preference": {"sft_weight": 0.3}},
    "split pairs, in full": {"method": {"kind": "full", "objective": "dpo"}, "train": {"micro_batch": 1}},
    "labelled answers": KTO,
}
HEADS = [(4, 4, 3), (4, 2, 3), (4, 1, 5), (8, 4, 5)]
"""Heads, those of keys and values, and values of a head where queries have 3."""
CHUNK_TOKENS = 7
FAMILIES = ("qwen3", "phi3", "gpt2", "mixtral")
CONVOLUTION = "lfm2"
"""Its convolutions mix neighbouring positions."""
SPLIT = "split pairs, in full"
FAULTY = ("full, checkpointing", SPLIT, "labelled answers")
IN_SHARDS = ("pairs", *FAULTY)
SHARED = {"full": 2, "full, checkpointing": 4, "lora with dropout": 4, "lora, checkpointing": 2, "plain loss": 4,
          "pairs": 4, "split pairs, in full": 2, "labelled answers": 2}  # fmt: skip
"""Kinds, and how many ranks share a sequence; where they are two, two such pairs are replicas of each other."""


def shared(tables: dict[str, Any], sequence: int, strategy: str = "replicated") -> dict[str, Any]:
    return {**tables, "parallel": {"strategy": strategy, "sequence": sequence}}


def small(folder: Path, kind: str) -> dict[str, Any]:
    """Recipe tables for this kind of training, on a model that is small enough for many steps."""
    return {**KINDS[kind], "model": {"id": str(write_model(folder / "model", layers=2, width=32, heads=RANKS))}}


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def gradients_of(output: Tensor, weights: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((output * weights).sum(), inputs))


def exchanges(ranks: Ranks, _folder: Path) -> Any:
    """The largest differences between attention over slices and attention over whole sequences (of the outputs, then of
    the gradients), for each group size and each number of heads."""
    return [
        _difference(group, *numbers)
        for group in (join_sequence_group(ranks, size) for size in (2, RANKS))
        for numbers in HEADS
    ]


def _difference(group: SequenceGroup, heads: int, key_heads: int, width: int) -> float:
    drawn = torch.Generator().manual_seed(heads + key_heads)
    shapes = [(3, heads, 8, 3), (3, key_heads, 8, 3), (3, key_heads, 8, width), (3, heads, 8, width)]
    *whole, weights = [torch.randn(shape, generator=drawn) for shape in shapes]
    mine = slice(group.place * 8 // group.size, (group.place + 1) * 8 // group.size)
    expected, found = (
        [tensor.requires_grad_() for tensor in tensors]
        for tensors in (whole, [tensor[:, :, mine].clone() for tensor in whole])
    )
    output = attention(*expected)
    sliced = to_positions(group, attention(*to_heads(group, found)))
    pairs = [(output[:, :, mine], sliced)]
    there = gradients_of(output, weights, expected)
    here = gradients_of(sliced, weights[:, :, mine], found)
    pairs += [(whole_gradient[:, :, mine], gradient) for whole_gradient, gradient in zip(there, here, strict=True)]
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def steps_of(folder: Path, ranks: Ranks, tables: dict[str, Any], chunk_tokens: int | None = None) -> Any:
    work = RankWorkbench(folder, ranks, tables)
    if chunk_tokens:
        work.setup.context.loss.chunk_tokens = chunk_tokens
    result = work.steps()
    work.close()
    return result


def all_kinds(ranks: Ranks, folder: Path) -> Any:
    return {
        name: steps_of(folder, ranks, shared(small(folder, name), sequence), CHUNK_TOKENS)
        for name, sequence in SHARED.items()
    }


def families(ranks: Ranks, folder: Path) -> Any:
    """For each family: the relative difference of loss and gradients between sliced and whole sequences; or the message
    with which the family is refused."""
    found: dict[str, Any] = {}
    for family in (*FAMILIES, CONVOLUTION):
        loaded, batch = load(run_spec(str(folder / family))), batch_of(3, 9)
        loss = make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=5, device=cpu())
        parameters = [parameter for _, parameter in loaded.trainable()]
        try:
            slices = join_ulysses_attention(loaded, ranks, ranks.size)
        except UsageError as refusal:
            found[family] = refusal.found
            continue
        whole = loss(batch)
        expected = torch.autograd.grad(whole, parameters)
        with slices.installed():
            sliced = loss(slices.slice_of(batch, pad_id=0))
            found_here = torch.autograd.grad(sliced, parameters)
        here, there = ([torch.cat([part.reshape(-1).double() for part in parts])] for parts in (found_here, expected))
        total = torch.cat([sliced.detach().double()[None], *here])
        dist.all_reduce(total)
        reference = torch.cat([whole.detach().double()[None], *there])
        found[family] = float((total - reference).norm() / reference.norm())
    return found


def in_shards(ranks: Ranks, folder: Path) -> Any:
    """Take steps on two pairs of ranks that share sequences, with the weights in shards over all four ranks; of split
    pairs also with failing allocations."""
    found: dict[str, Any] = {}
    for kind in IN_SHARDS:
        work = RankWorkbench(folder, ranks, {**shared(small(folder, kind), 2, "sharded"), "backoff": LADDER})
        found[kind] = work.steps(), sampled(work, 2, seed=5) if kind == SPLIT else []
        work.close()
    return found


def faults(ranks: Ranks, folder: Path) -> Any:
    """Take steps with failing allocations, on pairs of ranks that share sequences."""
    found = {}
    for kind in FAULTY:
        work = RankWorkbench(folder, ranks, {**shared(small(folder, kind), 2), "backoff": LADDER})
        work.steps()
        found[kind] = sampled(work, FAULTS, seed=11)
        work.close()
    return found


def uneven_devices(ranks: Ranks, folder: Path) -> Any:
    return on_uneven_devices(ranks, folder, shared(small(folder, "full"), 2))


def memory(ranks: Ranks, folder: Path) -> Any:
    cases = {}
    for name, sequence in (("full", 2), ("lora, checkpointing", RANKS)):
        train = {**KINDS[name].get("train", {}), "batch_size": 4 * RANKS // sequence}
        cases[name] = {**shared(KINDS[name], sequence), "train": train}
    return planned_memory(ranks, folder, cases)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sequence")


@pytest.fixture(scope="module")
def models(folder: Path) -> None:
    """Write model folders with random weights. Ranks cannot write them, because transformers saves on the first rank
    alone."""
    for family in FAMILIES:
        write_family(folder / family, family)
    config = AutoConfig.for_model(CONVOLUTION, **SIZES["qwen2"], layer_types=["conv", "full_attention"])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / CONVOLUTION)
    byte_tokenizer().save_pretrained(folder / CONVOLUTION)


@pytest.fixture(scope="module")
def seen(folder: Path, models: None) -> dict[str, list[Any]]:
    cases = [exchanges, families, all_kinds, *([] if NO_SHARDS else [in_shards]), uneven_devices, faults, memory]
    return run_ranks(cases, folder, size=RANKS)


@pytest.fixture(scope="module")
def alone(folder: Path, seen: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: steps_of(folder, SINGLE_PROCESS, small(folder, name)) for name in KINDS}


def test_attention_of_slices_is_attention_of_the_whole_forward_and_backward(seen: dict[str, list[Any]]) -> None:
    assert max(difference for rank in seen["exchanges"] for difference in rank) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_losses_gradients_and_weights_are_those_of_one_process(
    kind: str, seen: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    for rank in seen["all_kinds"]:
        assert differences(rank[kind], alone[kind]) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_learns_from_slices_what_it_learns_from_whole_sequences(
    family: str, seen: dict[str, list[Any]]
) -> None:
    for rank in seen["families"]:
        assert rank[family] < 1e-6


def test_a_family_that_looks_at_other_positions_outside_attention_is_found_out(seen: dict[str, list[Any]]) -> None:
    for rank in seen["families"]:
        assert "gives different results" in rank[CONVOLUTION]


@NEEDS_SHARDS
@pytest.mark.parametrize("kind", IN_SHARDS)
def test_beside_shards_the_same_is_learned(kind: str, seen: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    """Of split pairs one pair of ranks has more micro-batches than the other, which runs dummies beside it."""
    for rank in seen["in_shards"]:
        assert differences(rank[kind][0], alone[kind]) == []
    assert wrong_among([rank[kind][1] for rank in seen["in_shards"]], alone[kind]) == []


def test_a_smaller_device_on_one_rank_sets_the_budget_of_all(seen: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    assert wrong_on_uneven_devices(seen["uneven_devices"], alone["full"]) == []


def test_each_rank_holds_what_the_plan_predicts_for_it(seen: dict[str, list[Any]]) -> None:
    for rank in seen["memory"]:
        for planned, measured in rank.values():
            assert planned == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("kind", FAULTY)
def test_a_failed_allocation_on_any_rank_is_told_once_and_changes_and_leaves_nothing(
    kind: str, seen: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    assert wrong_among([rank[kind] for rank in seen["faults"]], alone[kind]) == []
