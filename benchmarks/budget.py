"""Compares the budget's closed form with a simulation of the engine's step: many models, methods, random shapes.

Run: python -m benchmarks.budget [--limit SECONDS]        (CPU, little memory; about ten minutes for all cells)

Each cell is a real-size model of profiles/models, a training method and a shape drawn with a fixed seed. For each cell,
both compute the peak that torch allocates on one device: the closed form in about a millisecond, the simulation by
running every layer on tensors without data. Results are saved in benchmarks/results/budget.json, so an interrupted run
continues where it stopped; `docs/budget.md` is written from the results.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.budget.architecture.lookup import find_architecture
from engine.budget.predict.prediction import predict
from engine.config.schema.run import RunSpec
from engine.model.config import silence_libraries
from engine.simulate.step import simulate_step

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "budget.json"
PAGE = ROOT / "docs" / "budget.md"

HEAD = """# The budget's closed form against the simulation

This page answers how far the predicted peak of a run is from a simulation of its step. [memory.md](memory.md) says how
both are made.

Written by `python -m benchmarks.budget`, with torch {torch}.

- Each line is a model at its real size, with a shape drawn by a fixed seed.
- Figures are the peak memory that torch allocates on one device, in MiB.
- The simulation runs the engine's own model, adapters, loss and optimizer, with all layers, on tensors without data.
  `tests/simulate` compares it with the simulated device.
- Workspace inside operations is not counted on either side, except that of attention's backward pass on a GPU.
- Nothing here was measured on a GPU.

Errors:
"""

DENSE = (
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.1", "google/gemma-2-2b",
    "google/gemma-2-9b", "google/gemma-3-1b-pt",
)  # fmt: skip
EXPERTS = ("mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b")

VISION = (
    "Qwen/Qwen2-VL-2B-Instruct", "Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct",
    "Qwen/Qwen2.5-VL-7B-Instruct", "google/gemma-3-4b-pt", "google/gemma-3-12b-pt",
)  # fmt: skip

WAYS: dict[str, dict[str, Any]] = {
    "LoRA": {"method": {"rank": 16}},
    "LoRA, bf16 adapters": {"method": {"rank": 64, "adapter_dtype": "bfloat16"}},
    "LoRA on attention": {"method": {"rank": 8, "targets": "attention"}},
    "LoRA, everything kept": {"method": {"rank": 8}, "train": {"gradient_checkpointing": False}},
    "LoRA, plain loss": {"method": {"rank": 8}, "train": {"loss": "plain"}},
    "LoRA, packed": {"method": {"rank": 8}, "data": {"packing": True}},
    "LoRA, activations on the host": {"method": {"rank": 8}, "train": {"activation_offload": True}},
    "LoRA, tiled MLP": {"method": {"rank": 8}, "train": {"mlp_tiles": 4}},
    "DoRA": {"method": {"rank": 8, "dora": True}},
    "full": {"method": {"kind": "full"}},
    "full, everything kept": {"method": {"kind": "full"}, "train": {"gradient_checkpointing": False}},
    "full, sgd": {"method": {"kind": "full"}, "train": {"optimizer": "sgd"}},
    "full, adafactor": {"method": {"kind": "full"}, "train": {"optimizer": "adafactor"}},
    "full, upper layers only": {"method": {"kind": "full", "train_only": ["model.layers.*[13579].**"]}},
}
WAYS_WITH_VISION_ENCODER: dict[str, dict[str, Any]] = {
    "full, decoder only": {"method": {"kind": "full", "train_only": ["model.language_model"]}},
    "LoRA on decoder and vision encoder": {"method": {"rank": 16, "targets": ["**.[0-9]*.**"]}},
}
WAYS_WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "LoRA on experts": {"method": {"rank": 8, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}},
}
FOR_VISION = ("LoRA", "DoRA", "full", "LoRA, everything kept", *WAYS_WITH_VISION_ENCODER)
FOR_EXPERTS = (
    "LoRA on attention", "LoRA", "LoRA, bf16 adapters", "full", "LoRA, plain loss", *WAYS_WITH_EXPERTS,
)  # fmt: skip
TARGETS = {"dense": (0.5, 2.0), "experts": (2.0, 5.0), "vision": (2.0, 5.0)}
"""Target for the median and the worst error in percent, by kind of model."""

PIXELS_PER_TOKEN = 28 * 28
"""Pixels per image token of the Qwen models."""


@dataclass(frozen=True)
class Cell:
    """One comparison: a model, a training method (`way`), and the shape of a micro-batch."""

    model: str
    way: str
    rows: int
    length: int
    image_tokens: int = 0
    """Tokens of the image at the start of each row; 0 for rows of text only."""

    @property
    def key(self) -> str:
        """The cell's key in the results file."""
        images = f", {self.image_tokens} of an image" if self.image_tokens else ""
        return f"{self.model} | {self.way} | {self.rows} x {self.length}{images}"


def cells() -> Iterator[Cell]:
    """Yield all cells, each with a random shape.

    Each dense model is combined with 6 training methods, chosen so that each method occurs at least 4 times; each
    mixture of experts with 6; each vision-language model with 6 on images, and with LoRA on text.
    """
    drawn = random.Random(20)
    ways = list(WAYS)
    for number, model in enumerate(DENSE):
        for step in range(6):
            yield Cell(model, ways[(number + 2 * step + step // 3) % len(ways)], *_shape(drawn))
    for model in EXPERTS:
        for way in FOR_EXPERTS:
            yield Cell(model, way, *_shape(drawn))
    for model in VISION:
        for way in FOR_VISION:
            rows = drawn.choice((1, 2, 4))
            length = drawn.randrange(400, 4096 // rows)
            # Gemma 3 scales all images to 256 tokens.
            yield Cell(model, way, rows, length, 256 if "gemma" in model else drawn.randrange(64, length - 64))
        yield Cell(model, "LoRA", *_shape(drawn))


def _shape(drawn: random.Random) -> tuple[int, int]:
    rows = drawn.choice((1, 2, 3, 4, 8))
    return rows, drawn.randrange(96, 4096 // rows)


def spec_of(cell: Cell) -> RunSpec:
    """The run spec of a cell, for a device large enough for every cell."""
    way = (WAYS | WAYS_WITH_VISION_ENCODER | WAYS_WITH_EXPERTS)[cell.way]
    images = {"image_max_pixels": cell.image_tokens * PIXELS_PER_TOKEN} if cell.image_tokens else {}
    data = {"sources": [{"name": "main", "path": "none.jsonl"}], "max_length": cell.length, **images}
    recipe = {
        "name": "cell",
        "model": {"id": cell.model, "init": "random", "dtype": "bfloat16"},
        "method": way.get("method", {}),
        "data": {**data, **way.get("data", {})},
        "train": {"batch_size": 2 * cell.rows, "gradient_checkpointing": True, **way.get("train", {})},
    }
    device = {"kind": "cuda", "memory_gib": 9000.0, "compute_capability": 9.0}
    profile = {"name": "cell", "device": device}
    return RunSpec.model_validate({"name": "cell", "profile": profile, "recipe": recipe})


def compare(cell: Cell) -> dict[str, Any]:
    """Predict and simulate the peak of a cell. Returns the cell's fields, both peaks in bytes with their phases, and
    the time taken."""
    spec = spec_of(cell)
    began = time.perf_counter()
    simulated = simulate_step(spec, rows=cell.rows, length=cell.length)
    seconds = time.perf_counter() - began
    predicted = predict(find_architecture(spec), spec, rows=cell.rows, length=cell.length)
    return {
        **asdict(cell),
        "predicted_bytes": predicted.peak_bytes,
        "simulated_bytes": simulated.peak_bytes,
        "predicted_phase": predicted.deciding_phase,
        "simulated_phase": simulated.deciding_phase,
        "seconds": round(seconds, 1),
    }


def error(result: dict[str, Any]) -> float:
    """Return the error of the prediction in `result` (as `compare` returns it) relative to the simulated peak, in
    percent; negative (unsafe) if the prediction is too low."""
    ratio: float = result["predicted_bytes"] / result["simulated_bytes"]
    return 100.0 * (ratio - 1.0)


def page(results: dict[str, dict[str, Any]]) -> str:
    """The text of docs/budget.md, made from the results."""
    lines = [HEAD.format(torch=torch.__version__.partition("+")[0])]
    for kind, (median, worst) in TARGETS.items():
        errors = [abs(error(result)) for result in results.values() if _kind(result) == kind]
        if errors:
            low = min(error(result) for result in results.values() if _kind(result) == kind)
            lines.append(
                f"- {kind}: {len(errors)} cases, median error {statistics.median(errors):.2f} % (target {median} %), "
                f"worst {max(errors):.2f} % (target {worst} %), largest underestimate {max(0.0, -low):.2f} %"
            )
    lines += ["", "| model | training | shape | closed form | simulated | error |", "|---|---|---|---|---|---|"]
    for result in results.values():
        predicted, simulated = (result[f"{side}_bytes"] / 2**20 for side in ("predicted", "simulated"))
        lines.append(
            f"| {result['model']} | {result['way']} | {_shape_text(result)} | {predicted:,.0f} | "
            f"{simulated:,.0f} | {error(result):+.2f} % |"
        )
    return "\n".join(lines) + "\n"


def _kind(result: dict[str, Any]) -> str:
    return "experts" if result["model"] in EXPERTS else "vision" if result["model"] in VISION else "dense"


def _shape_text(result: dict[str, Any]) -> str:
    images = result.get("image_tokens")
    return f"{result['rows']} x {result['length']}" + (f", {images} of an image" if images else "")


def main() -> None:
    """Compare the cells that have no result yet, then write docs/budget.md."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no cell is begun")
    asked = arguments.parse_args()
    warnings.filterwarnings("ignore")
    silence_libraries()
    RESULTS.parent.mkdir(exist_ok=True)
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    began = time.monotonic()
    for cell in cells():
        if cell.key not in results and time.monotonic() - began < asked.limit:
            results[cell.key] = compare(cell)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
            print(f"{error(results[cell.key]):+7.2f} %  {results[cell.key]['seconds']:6.1f} s  {cell.key}", flush=True)
    ordered = {cell.key: results[cell.key] for cell in cells() if cell.key in results}
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(ordered), "utf-8")


if __name__ == "__main__":
    main()
