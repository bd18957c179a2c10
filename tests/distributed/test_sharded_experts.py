"""Mixtures of experts in shards: a rank whose tokens use only some experts still takes part in all collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.distributed import ranks as ranks_module
from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from tests.distributed.faults import differences, sampled, wrong_among
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import FULL, LORA, NEEDS_SHARDS, RankWorkbench, sharded
from tests.model.samples import FAMILIES

pytestmark = NEEDS_SHARDS

EXPERTS = 16
FAULTS = 2
ON_EXPERTS = {"method": {"kind": "lora", "rank": 4, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full, replicated": ("mixtral", {**FULL, "parallel": {"strategy": "replicated"}, "tied": False}),
    "full, weights dropped": ("mixtral", sharded(FULL, "parameters")),
    "full, weights kept, recomputed": ("qwen3_moe", sharded(FULL, "gradients", gradient_checkpointing=True)),
    "adapters beside experts, weights kept": ("mixtral", sharded(LORA, "gradients")),
    "adapters on experts, weights dropped, recomputed": (
        "qwen3_moe", sharded(ON_EXPERTS, "parameters", gradient_checkpointing=True)
    ),
}  # fmt: skip


def tables_of(folder: Path, case: str) -> dict[str, Any]:
    """A case's tables, with a model whose every token goes to one of many experts."""
    family, tables = CASES[case]
    sizes = {"num_local_experts": EXPERTS, "num_experts": EXPERTS, "num_experts_per_tok": 1}
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **sizes})
    architecture = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[family]
    place = folder / family
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [architecture]}))
    named = {name: table for name, table in tables.items() if name != "tied"}
    return {**named, "model": {"id": str(place)}, "moe": {"aux_loss_weight": 1.0}}


def every_case(ranks: Ranks, folder: Path) -> Any:
    """For each case: the results of steps without faults, the results of steps with faults, and for each layer which
    experts received tokens in the steps without faults."""
    found = {}
    ranks_module.COUNTS_AT_ONCE = 10  # the choices of experts take several exchanges
    for number, case in enumerate(CASES):
        work = RankWorkbench(folder, ranks, tables_of(folder, case))
        modules = work.setup.context.loaded.model.named_modules()
        routers = [Router(module) for name, module in modules if name.endswith(".mlp.gate")]
        clean = work.steps()
        used = torch.stack([router.used() for router in routers])
        found[case] = clean, sampled(work, FAULTS, seed=number), used
        work.close()
    return found


class Router:
    """Records to which experts a router sends tokens."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._used = torch.zeros(EXPERTS, dtype=torch.bool)
        self._watch = module.register_forward_hook(self._note)

    def _note(self, _module: torch.nn.Module, _given: Any, output: tuple[torch.Tensor, ...]) -> None:
        self._used[output[2].flatten()] = True

    def used(self) -> torch.Tensor:
        """For each expert, whether it received tokens. Stops recording."""
        self._watch.remove()
        return self._used


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[Any]:
    return run_ranks([every_case], folder)["every_case"]


@pytest.fixture(scope="module")
def alone(folder: Path, seen: list[Any]) -> dict[str, Any]:
    results = {}
    for case in CASES:
        work = RankWorkbench(folder, SINGLE_PROCESS, tables_of(folder, case))
        results[case] = work.steps()
        work.close()
    return results


@pytest.mark.parametrize("case", CASES)
def test_experts_that_are_idle_on_one_rank_only_learn_what_they_learn_in_one_process(
    case: str, seen: list[Any], alone: dict[str, Any]
) -> None:
    first, second = (rank[case][2] for rank in seen)
    assert (first != second).any(), "both ranks used the same experts: nothing was tried here"
    for rank in seen:
        assert differences(rank[case][0], alone[case]) == []


@pytest.mark.parametrize("case", CASES)
def test_a_failed_allocation_is_told_once_and_changes_and_leaves_nothing(
    case: str, seen: list[Any], alone: dict[str, Any]
) -> None:
    assert wrong_among([rank[case][1] for rank in seen], alone[case]) == []
