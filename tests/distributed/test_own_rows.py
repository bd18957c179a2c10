"""A rank of a sharded model reads its own rows of the weights, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.distributed.own_rows import own_rows
from engine.distributed.ranks import Ranks
from engine.model import saved_tensors
from engine.model.tokenizer import load_tokenizer
from engine.train.strategy.load_sharded import load_sharded
from engine.train.strategy.sharded import Sharded
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import FULL, NEEDS_SHARDS, sharded, spec_of
from tests.model.samples import cpu, write_model

pytestmark = NEEDS_SHARDS


class CountingFile:
    """A safetensors file that counts the bytes of what is read from it."""

    read_bytes = 0

    def __init__(self, path: Path, framework: str) -> None:
        self._path, self._framework = path, framework

    def __enter__(self) -> CountingFile:
        opened: Any = safe_open(self._path, framework=self._framework)
        self._file = opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._file.keys())

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

    def __getitem__(self, rows: Any) -> Tensor:
        read: Tensor = self._inner[rows]
        CountingFile.read_bytes += read.numel() * read.element_size()
        return read


@contextmanager
def counted() -> Iterator[None]:
    """Inside the block, `CountingFile.read_bytes` counts what this process reads with `saved_tensors`."""
    CountingFile.read_bytes = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tensors, "safe_open", CountingFile)
        yield


def load(ranks: Ranks, folder: Path, model: Path, kind: dict[str, Any] = FULL) -> Sharded:
    """The model in the folder `model`, sharded over these ranks."""
    tables = {name: table for name, table in sharded(kind, "parameters").items() if name != "tied"}
    spec = spec_of(folder, ranks.size, {**tables, "model": {"id": str(model), "init": "pretrained"}})
    device, tokenizer = cpu(), load_tokenizer(spec.recipe.model)
    with device.activate():
        return load_sharded(spec, device, tokenizer, ranks, _unexpected, _unexpected)


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
    with counted():
        strategy.loaded.load_weights(folder / "trained")
    return CountingFile.read_bytes, differing(strategy, load_file(folder / "trained" / "model.safetensors"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    # Two ranks cannot halve the embedding's rows.
    model = write_model(folder / "llama", "llama", vocab_size=265, tie_word_embeddings=False)
    (folder / "trained").mkdir()
    moved = {name: tensor + 1 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(moved, folder / "trained" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, list[Any]]:
    return run_ranks([resumed], folder)


def bytes_of(path: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(path).values())


def test_at_resume_ranks_read_the_weights_once_among_them(seen: dict[str, list[Any]], folder: Path) -> None:
    assert [wrong for _, wrong in seen["resumed"]] == [[], []]
    read = [count for count, _ in seen["resumed"]]
    assert sum(read) == bytes_of(folder / "trained" / "model.safetensors")
    assert max(read) < 0.51 * sum(read)
