"""Measures how rows become tokens: processor time per row beside `datasets.map`, wall time with two workers, memory.

Each side is a process of its own, in turn, with the same tokenizer (a byte-level BPE trained on the rows) and the same
file of text rows; `datasets.map` tokenises batches and writes its table, as trainers have it do. What a start costs is
taken off: each side also prepares a twentieth of the rows, and the difference counts. Then a preparation is killed with
SIGKILL halfway and gone on with, and its tokens must be those of the one that was not killed.

Run: `python -m benchmarks.preparing --rows 100000`; `--out FILE` keeps the figures.
`python -m benchmarks.preparing --large --rows 2000000` prepares that many with a SIGKILL in the middle, beside a
twentieth of them: memory must not grow with the rows, and each row must be there once, as the tokenizer has it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
VOCABULARY = 8000
SAMPLE_SHARE = 20
"""A side's smaller run has one of so many rows."""

MAP = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
file, folder, cache = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
end = [tokenizer.eos_token_id]

def tokenise(rows):
    ids = [found + end for found in tokenizer(rows["text"], add_special_tokens=False)["input_ids"]]
    return {"input_ids": ids, "labels": ids}

rows = load_dataset("json", data_files=file, split="train", cache_dir=cache)
print(len(rows.map(tokenise, batched=True, remove_columns=["text"])))
"""


@dataclass
class Cost:
    """What a process and its children took."""

    processor_s: float
    wall_s: float
    peak_mib: float
    """Resident memory of the largest process."""


def words(count: int, drawn: random.Random) -> list[str]:
    return ["".join(drawn.choices(LETTERS, weights=range(26, 0, -1), k=drawn.randint(2, 9))) for _ in range(count)]


def write_rows(file: Path, count: int, tokens: int, vocabulary: list[str], seed: int) -> None:
    """`count` rows of text of about `tokens` tokens: a word is about a token, since common words become one."""
    drawn = random.Random(seed)
    weights = list(accumulate(1 / (rank + 1) for rank in range(len(vocabulary))))
    with file.open("w") as opened:
        for _ in range(count):
            length = drawn.randint(tokens // 2, tokens * 3 // 2)
            text = " ".join(drawn.choices(vocabulary, cum_weights=weights, k=length))
            opened.write(json.dumps({"text": text}) + "\n")


def write_tokenizer(folder: Path, file: Path) -> None:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    with file.open() as opened:
        sample = [json.loads(line)["text"] for line, _ in zip(opened, range(2000), strict=False)]
    core.train_from_iterator(sample, trainer)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)


def recipe(folder: Path, file: Path, workers: int) -> Path:
    path = folder / f"{file.stem}-{workers}.toml"
    path.write_text(
        f'model = {{ id = "builtin:tiny", tokenizer = "{folder / "tokenizer"}", init = "random" }}\n'
        f'[data]\nmax_length = 1024\nworkers = {workers}\nsources = [{{ name = "rows", path = "{file}" }}]\n'
    )
    return path


def start(command: list[str], cache: Path) -> subprocess.Popen[bytes]:
    places = {"TUNEDECK_CACHE": str(cache), "HF_DATASETS_CACHE": str(cache / "datasets"), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **places, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def cost(command: list[str], cache: Path) -> Cost:
    """Run a command to its end. RuntimeError: it fails."""
    began, process = time.monotonic(), start(command, cache)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(said.decode(errors="replace")[-2000:])
    return Cost(used.ru_utime + used.ru_stime, time.monotonic() - began, used.ru_maxrss / 1024)


def ours(recipe: Path) -> list[str]:
    return [sys.executable, str(ROOT / "tunedeck.py"), "data", "-r", str(recipe), "--prepare"]


def tokens_of(cache: Path) -> str:
    """A hash of the prepared files, whatever their names."""
    found = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in cache.rglob("*.npy"))
    return hashlib.sha256("".join(found).encode()).hexdigest() if found else ""


def killed_halfway(command: list[str], cache: Path, after_s: float) -> Cost:
    """Kill a preparation after `after_s`, then run it to its end; returns what the second run took."""
    process = start(command, cache)
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return cost(command, cache)


def measure(folder: Path, rows: int, tokens: int) -> dict[str, object]:
    vocabulary = words(VOCABULARY // 2, random.Random(0))
    files = {"all": folder / "all.jsonl", "few": folder / "few.jsonl"}
    write_rows(files["all"], rows, tokens, vocabulary, 1)
    write_rows(files["few"], max(1, rows // SAMPLE_SHARE), tokens, vocabulary, 2)
    write_tokenizer(folder / "tokenizer", files["all"])
    found: dict[str, Cost] = {}
    for size, file in files.items():
        theirs = [sys.executable, "-c", MAP, str(file), str(folder / "tokenizer"), str(folder / f"map-{size}")]
        found[f"map {size}"] = cost(theirs, folder / f"map-{size}")
        for workers in (0, 2):
            name = f"workers {workers} {size}"
            found[name] = cost(ours(recipe(folder, file, workers)), folder / name.replace(" ", "-"))
    whole = found["workers 0 all"]
    again = killed_halfway(ours(recipe(folder, files["all"], 0)), folder / "killed", whole.wall_s / 2)
    counted = rows - max(1, rows // SAMPLE_SHARE)

    def each(side: str, what: str) -> float:
        return float(getattr(found[f"{side} all"], what) - getattr(found[f"{side} few"], what)) / counted

    return {
        "rows": rows,
        "tokens_a_row": tokens,
        "processor_us_a_row": {side: round(1e6 * each(side, "processor_s"), 1) for side in ("map", "workers 0")},
        "processor_ratio_to_map": round(each("workers 0", "processor_s") / each("map", "processor_s"), 3),
        "wall_ratio_of_two_workers": round(each("workers 2", "wall_s") / each("workers 0", "wall_s"), 3),
        "peak_mib": {name: round(each_cost.peak_mib) for name, each_cost in found.items()},
        "after_a_kill_halfway": asdict(again),
        "same_tokens_after_the_kill": tokens_of(folder / "killed") == tokens_of(folder / "workers-0-all") != "",
        "costs": {name: asdict(each_cost) for name, each_cost in found.items()},
    }


POLL_S = 0.5
COMPARED = 20_000
"""Rows of a large preparation, drawn at random, whose tokens are compared with the tokenizer's own."""


@dataclass
class LargeCost(Cost):
    own_mib: float = 0.0
    """Most memory of its own that the process had: without pages that only mirror files, which the system takes back
    at will."""


def watched(command: list[str], cache: Path, *, kill_at_bytes: float = float("inf")) -> LargeCost:
    """Run a command and watch its memory, until it ends or its tokens have reached so many bytes on the disk."""
    began, process = time.monotonic(), start(command, cache)
    assert process.stderr is not None
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read() if process.stderr else b""))
    reader.start()
    own_bytes, killed = 0, False
    while (found := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        try:
            memory = psutil.Process(process.pid).memory_info()
        except psutil.NoSuchProcess:
            continue
        own_bytes = max(own_bytes, memory.rss - memory.shared)
        written = sum(path.stat().st_size for path in cache.rglob("ids.npy"))
        if written >= kill_at_bytes and not killed:
            killed = True
            process.send_signal(signal.SIGKILL)
        time.sleep(POLL_S)
    reader.join()
    _, status, used = found
    if status and not killed:
        raise RuntimeError(b"".join(said).decode(errors="replace")[-2000:])
    wall_s, processor_s = time.monotonic() - began, used.ru_utime + used.ru_stime
    return LargeCost(processor_s, wall_s, used.ru_maxrss / 1024, own_bytes / 2**20)


def differing_rows(cache: Path, file: Path, folder: Path, rows: int) -> int:
    """Of COMPARED rows drawn at random, those whose prepared tokens are not the tokenizer's own. RuntimeError: the
    cache does not hold each row once, in order."""
    (entry,) = {path.parent for path in cache.rglob("ids.npy")}
    ids, offsets, origins = (np.load(entry / f"{name}.npy", mmap_mode="r") for name in ("ids", "offsets", "origins"))
    if not np.array_equal(origins, np.arange(rows)):
        raise RuntimeError(f"{len(origins):,} documents for {rows:,} rows, or in another order")
    chosen = set(random.Random(0).sample(range(rows), min(rows, COMPARED)))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    different = 0
    with file.open() as opened:
        for number, line in enumerate(opened):
            if number in chosen:
                wanted = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"]
                found = ids[offsets[number] : offsets[number + 1]].tolist()
                different += found != [*wanted, tokenizer.eos_token_id]
    return different


def measure_large(folder: Path, rows: int, tokens: int) -> dict[str, object]:
    vocabulary, few = words(VOCABULARY // 2, random.Random(0)), max(1, rows // SAMPLE_SHARE)
    files = {"all": folder / "all.jsonl", "few": folder / "few.jsonl"}
    write_rows(files["all"], rows, tokens, vocabulary, 1)
    write_rows(files["few"], few, tokens, vocabulary, 2)
    write_tokenizer(folder / "tokenizer", files["all"])
    costs = {"few": watched(ours(recipe(folder, files["few"], 0)), folder / "cache-few")}
    (written,) = (path.stat().st_size for path in (folder / "cache-few").rglob("ids.npy"))
    command, cache = ours(recipe(folder, files["all"], 0)), folder / "cache-all"
    costs["killed"] = watched(command, cache, kill_at_bytes=written * rows / few / 2)
    costs["continued"] = watched(command, cache)
    return {
        "rows": rows,
        "tokens": int(np.load(next(cache.rglob("ids.npy")), mmap_mode="r").size),
        "text_mib": round(files["all"].stat().st_size / 2**20),
        "rows_compared": min(rows, COMPARED),
        "rows_that_differ": differing_rows(cache, files["all"], folder / "tokenizer", rows),
        "costs": {name: {key: round(value, 1) for key, value in asdict(each).items()} for name, each in costs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--large", action="store_true", help="our side alone, killed in the middle")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    taken = measure_large if given.large else measure
    with tempfile.TemporaryDirectory(prefix="preparing-") as folder:
        figures = json.dumps(taken(Path(folder), given.rows, given.tokens), indent=2)
    print(figures)
    if given.out:
        given.out.write_text(figures + "\n")


if __name__ == "__main__":
    main()
