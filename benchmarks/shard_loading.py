"""Measures what each rank reads, receives and holds while a sharded model is loaded and while it is resumed.

Run: python -m benchmarks.shard_loading [--ranks 4] [--millions 200]        (CPU and gloo, two minutes)

A random llama in bf16 is written to a file (in the working directory, since /tmp can be memory) and loaded for full
fine-tuning: first so that rank 0 sends all weights, then so that each rank reads its rows. After each, the same file is
read as the weights of a checkpoint. The file is dropped from the page cache before each, so that it is read from disk.

"read" is what the kernel counts (read_bytes of /proc/self/io): it reads ahead, so of ranks that read beside each other
the first reads more than its rows, and the others find theirs in the page cache. "received" is what rank 0 broadcasts.
"host" is the peak of the process's memory (VmHWM) above that before, pages of mapped files included; at the start it is
taken until all weights are in shards, and less the rank's shards, which here lie in host memory, too.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.job import RECIPE_MODEL, Job, spec_of
from benchmarks.ranks import measure_on_ranks
from engine.config.schema.run import RunSpec
from engine.device.open import open_device
from engine.distributed import sharded_files
from engine.distributed.elastic import spec_of_rank
from engine.distributed.ranks import Ranks
from engine.model.config import disable_progress_bars
from engine.model.tokenizer import load_tokenizer
from engine.train.strategy import load as loading
from engine.train.strategy.load import load_sharded

WIDTH, VOCABULARY = 1024, 32000
SMALL = "small"
"""Folder of a small model, beside the files of the measured one."""

LAYER_PARAMETERS = 3 * WIDTH * WIDTH + 3 * WIDTH * 11 * WIDTH // 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--millions", type=int, default=200, help="parameters of the model, in millions")
    asked = parser.parse_args()
    disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        layers = max(1, round((asked.millions * 10**6 - 2 * VOCABULARY * WIDTH) / LAYER_PARAMETERS))
        size_bytes = write_llama(Path(folder), layers, WIDTH)
        write_llama(Path(folder, SMALL), 1, 64)
        print(f"MiB by rank, of {size_bytes / 2**20:.0f} MiB of weights on {asked.ranks} ranks:")
        for way, measurement in (("sent by rank 0", measure_sending), ("read by each rank", measure_loading)):
            found = measure_on_ranks(measurement, asked.ranks, _spec(Path(folder), asked.ranks))
            for what, by_rank in found.items():
                for name in by_rank[0]:
                    numbers = "".join(f"{rank[name] / 2**20:>8.1f}" for rank in by_rank)
                    print(f"{way:<18}{what:<8}{name:<10}{numbers}", flush=True)


def write_llama(folder: Path, layers: int, width: int) -> int:
    """Write a random llama in bf16 with its tokenizer; returns the size of its file in bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    load_tokenizer(RECIPE_MODEL).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


def measure_sending(ranks: Ranks, spec: RunSpec) -> dict[str, Any]:
    """`measure_loading` with all weights sent by rank 0, as where no rank can say which file they are in."""
    vars(sharded_files)["MAPS"] = Path(spec.recipe.model.id, "none")
    return measure_loading(ranks, spec)


def measure_loading(ranks: Ranks, spec: RunSpec) -> dict[str, Any]:
    """Load the model in shards, then its weights again as a resume does; returns, by rank, what `_watched` counted."""
    device = open_device(spec_of_rank(spec, ranks.local_rank))
    tokenizer = load_tokenizer(spec.recipe.model)
    folder = Path(spec.recipe.model.id)
    with device.activate():
        # What is imported and compiled on the way is in memory from here on.
        load_sharded(_of(spec, folder / SMALL), device, tokenizer, ranks, _unexpected, _unexpected)
        with _watched(ranks, folder) as at_load, _peak_until_sharded() as peak:
            strategy = load_sharded(spec, device, tokenizer, ranks, _unexpected, _unexpected)
        at_load["host"] = peak[0] - sum(part.nbytes for _, part in strategy.loaded.trainable())
        with _watched(ranks, folder) as at_resume:
            strategy.loaded.load_weights(folder)
    return {"load": ranks.all_gather_object(at_load), "resume": ranks.all_gather_object(at_resume)}


@contextmanager
def _watched(ranks: Ranks, folder: Path) -> Iterator[dict[str, int]]:
    """Yield a dict that the end of the block fills with this rank's bytes "read", "received" and of "host" memory."""
    found: dict[str, int] = {}
    if ranks.is_rank0:
        _drop_from_page_cache(folder)
    ranks.all_gather_object("dropped")
    held, read = status_bytes("VmRSS"), _read_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    with _counting_broadcasts(received := [0]):
        yield found
    found |= {"read": _read_bytes() - read, "received": 0 if ranks.is_rank0 else received[0]}
    found["host"] = status_bytes("VmHWM") - held
    ranks.all_gather_object("measured")


@contextmanager
def _peak_until_sharded() -> Iterator[list[int]]:
    """Yield a list that gets the growth of memory until all weights are in shards: then the head is gathered for its
    loss, which takes memory of the device."""
    held, grown, make = status_bytes("VmRSS"), list[int](), vars(loading)["ShardedModel"]

    def noting(*arguments: Any, **named: Any) -> Any:
        made = make(*arguments, **named)
        grown.append(status_bytes("VmHWM") - held)
        return made

    vars(loading)["ShardedModel"] = noting
    try:
        yield grown
    finally:
        vars(loading)["ShardedModel"] = make


@contextmanager
def _counting_broadcasts(total: list[int]) -> Iterator[None]:
    broadcast: Callable[..., Any] = dist.broadcast

    def counting(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        total[0] += tensor.nbytes
        return broadcast(tensor, *arguments, **named)

    vars(dist)["broadcast"] = counting
    try:
        yield
    finally:
        vars(dist)["broadcast"] = broadcast


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_bytes() -> int:
    return int(re.findall(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)[0])


def status_bytes(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    return 1024 * int(re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[0])


def _unexpected(*failure: Any) -> None:
    raise RuntimeError(f"memory ran out: {failure}")


def _of(spec: RunSpec, folder: Path) -> RunSpec:
    model = spec.recipe.model.model_copy(update={"id": str(folder)})
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"model": model})})


def _spec(folder: Path, ranks: int) -> RunSpec:
    spec = spec_of(Job(folder, [], 1), "cpu").model_dump(by_alias=True)
    spec["recipe"]["model"]["dtype"] = "bfloat16"
    spec["profile"]["device"] |= {"count": ranks, "memory_gib": 4.0}
    spec["profile"]["parallel"] |= {"strategy": "sharded", "shard": "parameters"}
    return RunSpec.model_validate(spec)


if __name__ == "__main__":
    main()
