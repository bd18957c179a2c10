"""A rank of a sharded model reads its own rows of the weights, and no others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from engine.device.base import Device
from engine.device.metered import MeteredDevice
from engine.distributed import sharded_files
from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.distributed.sharded_files import WeightFiles, fingerprint, mapped_tensors, own_rows
from engine.errors import UsageError
from engine.model.loaded import local_part
from engine.model.tokenizer import load_tokenizer
from engine.train.step.failures import RecoveredOom
from engine.train.strategy.load import load_sharded
from engine.train.strategy.sharded import Sharded
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import FULL, LORA, NEEDS_SHARDS, sharded, spec_of
from tests.model.samples import cpu, write_model

pytestmark = NEEDS_SHARDS


class CountingFile:
    """A safetensors file that counts the bytes of what is read from it."""

    read_bytes = 0

    def __init__(self, filename: Path, framework: str) -> None:
        self._path, self._framework = filename, framework

    def __enter__(self) -> CountingFile:
        opened: Any = safe_open(self._path, framework=self._framework)
        self._file = opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._file.keys())

    def metadata(self) -> Any:
        """What the file's header says beside its tensors."""
        return self._file.metadata()

    def get_slice(self, name: str) -> CountingSlice:
        """The tensor `name`, not read yet."""
        return CountingSlice(self._file.get_slice(name))


class CountingSlice:
    """A tensor in a `CountingFile`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_shape(self) -> list[int]:
        """The tensor's shape."""
        return list(self._inner.get_shape())

    def get_dtype(self) -> str:
        """The tensor's dtype, by its name in the file."""
        return str(self._inner.get_dtype())

    def __getitem__(self, rows: Any) -> Tensor:
        read: Tensor = self._inner[rows]
        CountingFile.read_bytes += read.numel() * read.element_size()
        return read


@contextmanager
def counted() -> Iterator[None]:
    """Inside the block, `CountingFile.read_bytes` counts what this process reads of files."""
    CountingFile.read_bytes = 0
    with pytest.MonkeyPatch.context() as patch:
        for reader in (safetensors, sharded_files):
            patch.setattr(reader, "safe_open", CountingFile)
        yield


def load(
    ranks: Ranks,
    folder: Path,
    model: Path,
    kind: dict[str, Any] = FULL,
    *,
    device: Device | None = None,
    report: Callable[[RecoveredOom], None] | None = None,
) -> Sharded:
    """The model in the folder `model`, sharded over these ranks, by default on the CPU. `report` is given the failed
    allocations; by default none is expected."""
    tables = {name: table for name, table in sharded(kind, "parameters").items() if name != "tied"}
    spec = spec_of(folder, ranks.size, {**tables, "model": {"id": str(model), "init": "pretrained"}})
    device, tokenizer = device or cpu(), load_tokenizer(spec.recipe.model)
    with device.activate():
        return load_sharded(spec, device, tokenizer, ranks, report or _unexpected, _unexpected)


def _unexpected(*failure: Any) -> None:
    raise AssertionError(f"memory ran out: {failure}")


def differing(strategy: Sharded, wanted: dict[str, Tensor]) -> list[str]:
    """The names of the parameters of which this rank holds something else than its rows of `wanted`."""
    shards = {name: p for name, p in strategy.loaded.model.named_parameters() if isinstance(p, DTensor)}
    assert shards.keys() == wanted.keys()
    return [name for name, p in shards.items() if not p.to_local().equal(wanted[name][own_rows(p)])]


def resumed(ranks: Ranks, folder: Path) -> Any:
    """Load a sharded model, then other weights into it; returns (bytes read, what is wrong on this rank)."""
    strategy = load(ranks, folder, folder / "llama")
    with CommDebugMode() as collectives:
        strategy.model.first_elements()
    assert collectives.get_total_counts() == 0
    with counted():
        strategy.loaded.load_weights(folder / "trained")
    return CountingFile.read_bytes, differing(strategy, load_file(folder / "trained" / "model.safetensors"))


MODELS = ("llama", "tied", "mixtral")
LORA_CASE, CASES = "llama with adapters", (*MODELS, "llama with adapters")


def loaded_twice(ranks: Ranks, folder: Path) -> Any:
    """Load every model as ranks do, and with rank 0 sending everything; for each returns (which parameters or buffers
    differ on this rank, bytes read here, bytes that rank 0 sent, the summary)."""
    found = {}
    for case in CASES:
        kind = LORA if case == LORA_CASE else FULL
        model = folder / ("llama" if case == LORA_CASE else case)
        with counted():
            strategy = load(ranks, folder, model, kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_files, "MAPS", folder / "no such file")
            sent = load(ranks, folder, model, kind)
        found[case] = unequal(strategy, sent), CountingFile.read_bytes, strategy.loaded.loading, sent.loaded.loading
    return found


def with_a_file_on_rank0_only(ranks: Ranks, folder: Path) -> Any:
    """Load a model whose file rank 1 cannot read; returns which parameters differ, and the summary."""
    with pytest.MonkeyPatch.context() as patch:
        if not ranks.is_rank0:
            patch.setattr(sharded_files, "fingerprint", lambda path: None)
        strategy = load(ranks, folder, folder / "llama")
    return differing(strategy, load_file(folder / "llama" / "model.safetensors")), strategy.loaded.loading


def with_too_little_memory_on_rank1(ranks: Ranks, folder: Path) -> Any:
    """Load a model while an allocation for rank 1's rows fails; returns (step, rank, remedy, attempt and rows
    afterwards of each failure, what is wrong here)."""
    device, failed = MeteredDevice(2**30), list[RecoveredOom]()
    if not ranks.is_rank0:
        device.fail_at(5)
    strategy = load(ranks, folder, folder / "llama", device=device, report=failed.append)
    told = [(each.step, each.oom.rank, each.remedy, each.attempt, each.rows_after) for each in failed]
    return told, differing(strategy, load_file(folder / "llama" / "model.safetensors"))


def unequal(first: Sharded, second: Sharded) -> list[str]:
    """The names of parameters and buffers in which two models differ on this rank."""
    one, other = (dict(each.loaded.model.named_parameters()) for each in (first, second))
    assert one.keys() == other.keys()
    odd = [name for name, p in one.items() if not local_part(p).equal(local_part(other[name]))]
    buffers = dict(second.loaded.model.named_buffers())
    return odd + [name for name, b in first.loaded.model.named_buffers() if not b.equal(buffers[name])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    # Two ranks cannot halve the embedding's rows.
    model = write_model(folder / "llama", "llama", vocab_size=265, tie_word_embeddings=False)
    write_model(folder / "tied", "qwen2", tie_word_embeddings=True)
    write_model(folder / "mixtral", "mixtral")
    (folder / "trained").mkdir()
    moved = {name: tensor + 1 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(moved, folder / "trained" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, list[Any]]:
    cases = [resumed, loaded_twice, with_a_file_on_rank0_only, with_too_little_memory_on_rank1]
    return run_ranks(cases, folder)


def bytes_of(path: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(path).values())


def test_at_resume_ranks_read_the_weights_once_among_them(seen: dict[str, list[Any]], folder: Path) -> None:
    assert [wrong for _, wrong in seen["resumed"]] == [[], []]
    read = [count for count, _ in seen["resumed"]]
    assert sum(read) == bytes_of(folder / "trained" / "model.safetensors")
    assert max(read) < 0.51 * sum(read)


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_read_their_rows_hold_what_rank_0_would_have_sent(case: str, seen: dict[str, list[Any]]) -> None:
    assert [rank[case][0] for rank in seen["loaded_twice"]] == [[], []]
    assert all("no weight has the same layout" in rank[case][3] for rank in seen["loaded_twice"][:1])


@pytest.mark.parametrize("case", ["llama", "tied", "llama with adapters"])
def test_at_the_start_ranks_read_the_weights_once_among_them(
    case: str, seen: dict[str, list[Any]], folder: Path
) -> None:
    read = [rank[case][1] for rank in seen["loaded_twice"]]
    assert sum(read) == bytes_of(folder / case.removesuffix(" with adapters") / "model.safetensors")
    assert max(read) < 0.51 * sum(read)


def test_weights_that_transformers_converts_come_from_rank_0(seen: dict[str, list[Any]], folder: Path) -> None:
    """Experts are merged in memory; the rest of a mixture is read from its file."""
    weights = load_file(folder / "mixtral" / "model.safetensors")
    rest = sum(tensor.nbytes for name, tensor in weights.items() if ".experts." not in name)
    assert (
        sum(rank["mixtral"][1] for rank in seen["loaded_twice"])
        == rest
        < bytes_of(folder / "mixtral" / "model.safetensors")
    )


def test_a_file_that_one_rank_does_not_find_is_sent_to_all(seen: dict[str, list[Any]]) -> None:
    (wrong0, summary), (wrong1, _) = seen["with_a_file_on_rank0_only"]
    assert (wrong0, wrong1) == ([], [])
    assert "not all ranks have the same" in summary and "llama/model.safetensors" in summary


def test_memory_that_runs_out_for_the_rows_of_one_rank_makes_all_load_again(seen: dict[str, list[Any]]) -> None:
    assert seen["with_too_little_memory_on_rank1"] == [([(0, 1, "retry", 1, 0)], [])] * 2


def test_a_weight_that_was_changed_in_memory_is_not_read_from_its_file(folder: Path) -> None:
    path = folder / "trained" / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - a safetensors file is not a mapping
    assert set(mapped_tensors(tensors)) == set(map(id, tensors))
    tensors[0].mul_(2)
    assert set(mapped_tensors(tensors)) == set(map(id, tensors[1:]))


def test_a_file_of_other_weights_has_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    there, other = folder / "llama" / "model.safetensors", folder / "trained" / "model.safetensors"
    copy = Path(shutil.copy(there, tmp_path))
    assert fingerprint(str(copy)) == fingerprint(str(there)) is not None
    assert fingerprint(str(other)) != fingerprint(str(there))
    assert fingerprint(str(tmp_path / "none")) is None


def test_a_file_that_is_damaged_while_it_is_loaded_is_named(folder: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(folder / "llama" / "model.safetensors", tmp_path))
    with safe_open(path, framework="pt") as file:
        mapped = file.get_tensor("model.norm.weight")
        files = WeightFiles(SINGLE_PROCESS, [mapped])
    place = files.place_of(mapped)
    assert place is not None
    assert files.read(place, slice(3, 5)).equal(mapped[3:5])
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match=r"cannot read model\.norm\.weight in .*model\.safetensors"):
        files.read(place, slice(3, 5))
