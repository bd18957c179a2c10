"""Safetensors files that are hashed while they are written: they hold what they should, and are not read again."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.journal import checkpoints_on_disk
from engine.journal.checkpoints_on_disk import damage
from engine.model import result_files, tensor_file
from engine.model.tensor_file import DTYPES, FileTensor, write_tensors
from engine.train.run.checkpoint_files import write_checkpoint
from tests.model.samples import load_family


def samples() -> dict[str, Tensor]:
    """A tensor of each dtype, a scalar, an empty one, a transposed one and one of stride 0."""
    drawn = torch.Generator().manual_seed(0)
    found = {
        f"{dtype}": torch.randint(0, 2, (3, 5), generator=drawn).to(dtype)
        for dtype in DTYPES
        if dtype not in (torch.uint16, torch.uint32, torch.uint64)
    }
    shapes = {"scalar": torch.tensor(7.5), "empty": torch.zeros(0, 4), "turned": torch.arange(6.0).view(2, 3).T}
    return {**found, **shapes, "strideless": torch.tensor(2.5).expand(1)}


def write(path: Path, tensors: dict[str, Tensor], **named: Any) -> str:
    return write_tensors(path, [FileTensor.like(*item) for item in tensors.items()], tensors.values(), **named)


@pytest.mark.parametrize("large", [1, 2**30])
def test_safetensors_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(tensor_file, "LARGE_BYTES", large)
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 16)
    monkeypatch.setattr(tensor_file, "FLUSH_BYTES", 64)
    tensors, path = samples(), tmp_path / "a.safetensors"
    found = write(path, tensors, metadata={"format": "pt"})
    assert found == hashlib.sha256(path.read_bytes()).hexdigest()
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].float() if tensor.dtype.itemsize == 1 else read[name],
                           tensor.float() if tensor.dtype.itemsize == 1 else tensor)  # fmt: skip
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_file_has_the_bytes_that_safetensors_itself_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(4, 3), "b": torch.rand(2)}
    write(tmp_path / "own", tensors)
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "own").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_without_memory_for_a_thread_a_file_is_hashed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tensor_file, "LARGE_BYTES", 1)
    monkeypatch.setattr(threading.Thread, "start", refused)
    found = write(tmp_path / "a", {"a": torch.rand(4, 3)})
    assert found == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.int32)])
def test_another_tensor_than_announced_is_refused(tmp_path: Path, wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="expected "):
        write_tensors(tmp_path / "a", [FileTensor("a", torch.float32, (2,))], [wrong])


def test_a_full_disk_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError) as caught:
        write(Path("/dev/full"), {"a": torch.zeros(100_000)})
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_a_checkpoint_of_a_full_model_is_hashed_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    loaded = load_family(tmp_path, family, method={"kind": "full"})
    read: list[str] = []
    whole = checkpoints_on_disk.sha256

    def noting(path: Path) -> str:
        read.append(path.name)
        return whole(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_on_disk, "sha256", noting)
        checkpoint = write_checkpoint(tmp_path / "checkpoints", 1, lambda path: loaded.save(path / "weights"))
    assert [name for name in read if name.endswith(".safetensors")] == []
    listed = json.loads((checkpoint.path / "manifest.json").read_text())["files"]
    assert "weights/model.safetensors" in listed and "weights/config.json" in listed
    assert damage(checkpoint) is None


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "gpt_neox"])
def test_a_model_is_saved_in_the_tensors_that_transformers_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Tied weights, fused experts, renamed weights; also in several files."""
    loaded = load_family(tmp_path, family, method={"kind": "full"})
    loaded.model.save_pretrained(str(tmp_path / "theirs"))
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    loaded.save(tmp_path / "one")
    monkeypatch.setattr(result_files, "LARGEST_FILE_BYTES", sum(map(_bytes, expected.values())) // 2)
    loaded.save(tmp_path / "several")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    for folder in ("one", "several"):
        found: dict[str, Tensor] = {}
        for path in (tmp_path / folder).glob("*.safetensors"):
            found |= load_file(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        AutoModelForCausalLM.from_pretrained(tmp_path / folder)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
