"""With every strategy, several ranks learn what one process learns, whichever allocation fails on whichever rank.

The whole sweep is `make torture`, and prints what it tried: every place where the engine asks for memory, on each rank
alone, on all at once, and again right after; for each way of sharing, LoRA and full fine-tuning, activations kept
and recomputed, a step in one micro-batch and in several. Samples of it are in the tests of each way of sharing; what
four ranks learn and hold where nothing fails is in `tests.distributed.test_four_ranks`.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from tests.distributed.faults import Asked, asked_by, complaints, differences, faulty_steps, sweep_of_faults
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import FULL, LADDER, LORA, RankWorkbench, small_model, write_equal_samples

SHARING: dict[str, dict[str, Any]] = {
    "replicated": {"strategy": "replicated"},
    "weights in shards": {"strategy": "sharded", "shard": "parameters"},
    "gradients in shards": {"strategy": "sharded", "shard": "gradients"},
    "sequences by twos": {"strategy": "replicated", "sequence": 2},
    "sequences by twos, weights in shards": {"strategy": "sharded", "shard": "parameters", "sequence": 2},
}
ALLOCATING = {"kind": "AdamW", "foreach": True, "eps": 1e-4}
"""The recipe's AdamW allocates nothing in its step; this one does, so that it can fail there."""


@dataclass(frozen=True)
class Cell:
    """A kind of training, and how its steps are divided into micro-batches."""

    kind: str
    checkpointing: bool
    several: bool
    """Whether a step has several micro-batches of two sequences each; otherwise a rank has one micro-batch for the
    whole step."""

    def tables(self, folder: Path, sharing: str) -> dict[str, Any]:
        """The cell's recipe tables with a small model in `folder`; for LoRA the model has a tied head."""
        train = {"gradient_checkpointing": self.checkpointing, "micro_batch": 2 if self.several else 10}
        tables = {**{"full": FULL, "lora": LORA}[self.kind], "train": train, "backoff": LADDER}
        tables |= {} if self.several else {"torch_optimizer": ALLOCATING}
        return small_model(folder, {**tables, "parallel": SHARING[sharing], "tied": self.kind == "lora"})


CELLS = [Cell(*each) for each in product(("full", "lora"), (False, True), (False, True))]
ROWS_OF_A_RANK = 4
EQUAL = "equal.jsonl"


def alike(folder: Path, sharing: str, cell: Cell, ranks: int) -> dict[str, Any]:
    """Recipe tables of a cell with sequences of equal length, the same number for each of `ranks`. The number is even:
    a smaller micro-batch is the remedy for memory that runs out twice in a row, so each micro-batch must have a second
    sequence."""
    tables = cell.tables(folder, sharing)
    train = {**tables["train"], "batch_size": ROWS_OF_A_RANK * ranks}
    return {**tables, "data": {"sources": [{"name": "main", "path": str(folder / EQUAL)}]}, "train": train}


def alone(folder: Path, tables: dict[Cell, dict[str, Any]]) -> dict[Cell, dict[str, Any]]:
    """For each cell, the results of the steps on a single process."""
    found = {}
    for cell, asked in tables.items():
        work = RankWorkbench(folder, SINGLE_PROCESS, asked)
        found[cell] = work.steps()
        work.close()
    return found


def tortured(ranks: Ranks, folder: Path, sharing: str) -> Any:
    """Run the whole sweep of faults. Returns for each cell the results of the steps without faults, and a list of
    (faults, allocations refused on each rank, what was wrong)."""
    found = {}
    for cell in CELLS:
        work = RankWorkbench(folder, ranks, alike(folder, sharing, cell, ranks.size))
        clean = work.steps()
        asked = [Asked(**each) for each in ranks.all_gather_object(asdict(asked_by(work)))]
        tried = []
        for faults in sweep_of_faults(asked, f"{sharing} {cell} {ranks.size}"):
            result = faulty_steps(work, faults)
            facts = {name: result[name] for name in ("refused", "told", "left_bytes")}
            everywhere = ranks.all_gather_object([facts, differences(result, clean)])
            wrong = complaints(*map(list, zip(*everywhere, strict=True)))
            tried.append((faults, [each["refused"] for each, _ in everywhere], wrong))
        found[cell] = clean, tried
        work.close()
    return found


@pytest.mark.torture
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sharing", SHARING)
def test_memory_that_runs_out_anywhere_costs_a_retry_and_nothing_else(
    sharing: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_equal_samples(tmp_path / EQUAL, 64)
    results = run_ranks([partial(tortured, sharing=sharing)], tmp_path, size=size)["tortured"]
    expected = alone(tmp_path, {cell: alike(tmp_path, "replicated", cell, size) for cell in CELLS})
    for rank in results:
        assert [cell for cell, (clean, _) in rank.items() if differences(clean, expected[cell])] == []
    tried = [each for _, faults in results[0].values() for each in faults]
    places = Counter(place for _, refused, _ in tried for rank in refused for place in rank)
    with capsys.disabled():
        sys.stdout.write(f"\n{size} ranks, {sharing}: {len(tried)} attempts, {places.total()} faults: {dict(places)}\n")
    assert [(cell, *each) for cell, (_, tried) in results[0].items() for each in tried if each[-1]] == []
    assert places.keys() >= {"forward", "backward", "recomputation", "clip", "optimizer"}
