"""Measures whether a long run stays flat: memory, open files, threads and time of a step, of the engine and a console.

The smallest model (one layer, 16 wide, random weights) is trained for 100,000 steps, with an evaluation and a
checkpoint every 1,000. A console in a pseudo-terminal of 120x36 shows the run all the time. Both processes are read
from /proc at regular intervals; the processor time of a step counts, because the time by the clock depends on what
else the machine does.

Run: `nice python -m benchmarks.long_run`, `python -m benchmarks.long_run --steps 2000 --every 5 --out samples.jsonl`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.screen_traffic import ROOT, Pane
from engine.journal.directory import RunDirectory
from engine.journal.liveness import engine_process, is_alive
from engine.journal.summary import summarise

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 384, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

PROFILE = 'schema = 1\nkind = "profile"\n[device]\nkind = "cpu"\nmemory_gib = 4.0\n'

RECIPE = """schema = 1
kind = "recipe"
model = {{ id = "{folder}/model", tokenizer = "builtin:bytes", init = "random", dtype = "float32" }}
method = {{ kind = "full" }}
train = {{ max_steps = {steps}, batch_size = 1, learning_rate = 1e-4, optimizer = "sgd" }}
checkpoint = {{ every_steps = {often}, keep = 3 }}
eval = {{ every_steps = {often}, limit = 4 }}
[data]
max_length = 16
sources = [{{ name = "rows", path = "{folder}/rows.jsonl" }}]
validation = [{{ name = "rows", path = "{folder}/rows.jsonl" }}]
"""

OFTEN = 1000
OPENING_SECONDS = 15.0


@dataclass(frozen=True)
class Sample:
    """What both processes hold after a number of steps."""

    step: int
    seconds: float
    engine_cpu_seconds: float
    console_cpu_seconds: float
    engine_kib: int
    console_kib: int
    engine_files: int
    console_files: int
    engine_threads: int
    console_threads: int


FLAT = ("engine_kib", "console_kib", "engine_files", "console_files", "engine_threads", "console_threads")


def start(folder: Path, steps: int) -> tuple[RunDirectory, Pane]:
    """Start the run, and a console that shows it."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    rows = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "here.toml").write_text(PROFILE)
    (folder / "long.toml").write_text(RECIPE.format(folder=folder, steps=steps, often=min(OFTEN, steps // 4)))
    own = {f"TUNEDECK_{name}": str(folder / name.lower()) for name in ("STATE", "CONFIG", "CACHE", "RUNS")}
    words = ["train", "-p", "./here.toml", "-r", "./long.toml", "--detach", "--json"]
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tunedeck.py"), *words], cwd=folder, check=True, capture_output=True,
        env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    run = RunDirectory(Path(json.loads(done.stdout)["path"]))
    console = Pane(ROOT, folder)
    console.read(OPENING_SECONDS)
    for key in ("1", "g", "\r"):
        console.press(key)
        console.read(3.0)
    return run, console


def follow(run: RunDirectory, console: Pane, every: float) -> Iterator[Sample]:
    """A sample of both processes at each interval, until the run has ended."""
    engine = engine_process(run)
    if engine is None:
        raise RuntimeError(f"{run.path} has no engine")
    began = time.monotonic()
    while is_alive(engine):
        step = _last_step(run)
        try:
            yield Sample(
                step, time.monotonic() - began, _cpu_seconds(engine.pid), _cpu_seconds(console.pid),
                _resident_kib(engine.pid), _resident_kib(console.pid), _count(engine.pid, "fd"),
                _count(console.pid, "fd"), _count(engine.pid, "task"), _count(console.pid, "task"),
            )  # fmt: skip
        except (FileNotFoundError, ProcessLookupError):
            if is_alive(engine):
                raise
        console.read(every)


def _last_step(run: RunDirectory) -> int:
    with run.events.open("rb") as file:
        file.seek(max(0, run.events.stat().st_size - 65536))
        lines = file.read().splitlines()
    steps = [json.loads(line)["step"] for line in lines[1:] if b'"kind":"step"' in line and line.endswith(b"}")]
    return int(steps[-1]) if steps else 0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _count(pid: int, folder: str) -> int:
    return len(os.listdir(f"/proc/{pid}/{folder}"))


def compare(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """The median of each figure in the second tenth of the samples and in the last tenth; the first tenth warms up."""
    tenth = max(2, len(samples) // 10)
    early, late = samples[tenth : 2 * tenth], samples[-tenth:]
    found = {name: tuple(statistics.median(getattr(each, name) for each in part) for part in (early, late))
             for name in FLAT}  # fmt: skip
    found["engine_cpu_ms_per_step"] = (_cpu_per_step(early), _cpu_per_step(late))
    found["console_cpu_percent"] = (_console_percent(early), _console_percent(late))
    return {name: (pair[0], pair[1]) for name, pair in found.items()}


def _cpu_per_step(part: Sequence[Sample]) -> float:
    steps = part[-1].step - part[0].step
    return 1e3 * (part[-1].engine_cpu_seconds - part[0].engine_cpu_seconds) / max(1, steps)


def _console_percent(part: Sequence[Sample]) -> float:
    seconds = part[-1].seconds - part[0].seconds
    return 100 * (part[-1].console_cpu_seconds - part[0].console_cpu_seconds) / max(1e-9, seconds)


def main() -> int:
    """Print the figures of both processes early and late in the run; 1 if the run was not done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two samples")
    parser.add_argument("--out", type=Path, help="write each sample as a line of JSON")
    asked = parser.parse_args()
    samples = []
    with tempfile.TemporaryDirectory(prefix="tunedeck-long-") as name:
        run, console = start(Path(name).resolve(), asked.steps)
        try:
            for sample in follow(run, console, asked.every):
                samples.append(sample)
                if asked.out is not None:
                    with asked.out.open("a") as file:
                        file.write(json.dumps(asdict(sample)) + "\n")
        finally:
            console.close()
        summary = summarise(run)
        size = run.events.stat().st_size
    print(f"{summary.status} after {summary.step} steps, {samples[-1].seconds:.0f} s, {len(samples)} samples, "
          f"events.jsonl {size >> 20} MiB, samples lost {summary.samples_lost}")  # fmt: skip
    print(f"{'':<24}{'second tenth':>14}{'last tenth':>14}")
    for figure, (early, late) in compare(samples).items():
        print(f"{figure:<24}{early:>14,.2f}{late:>14,.2f}")
    return 0 if summary.status == "done" else 1


if __name__ == "__main__":
    sys.exit(main())
