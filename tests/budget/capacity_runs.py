"""Trains on the metered device with one per cent more memory than predicted, and with one per cent less.

Each case is a small model of a family with dimensions drawn at random, a way to train it and a shape. The whole engine
trains it for two steps of two micro-batches: with the predicted peak + 1 % nothing may run out of memory, with - 1 %
something must. `make test` runs some of the cases, `python -m benchmarks.capacity_runs` all of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.architecture.lookup import find_architecture
from engine.budget.advise.plan import make_plan
from engine.budget.predict.prediction import Predictor
from engine.config.files.caches import SequenceBounds
from engine.config.schema.run import RunSpec
from engine.data.prepare import prepare_data
from engine.errors import MemoryExhaustedError
from engine.model.tokenizer import load_tokenizer
from tests.budget.budget_cases import FAMILIES, WAYS, applies
from tests.budget.metered_step import folder_of
from tests.train.run_helpers import new_run, of_kind, train

CASES = 40
SEED = 4
MARGIN = 0.01
OUT_OF_MEMORY = MemoryExhaustedError.exit_code
STEPS, MICRO_BATCHES = 2, 2
UNPAIRED = ("dropout", "smoothing", "packed")
"""Parts of ways that preference learning refuses."""
PREFERENCE_LOSSES = ("dpo", "ipo", "simpo", "orpo")
LAYERS, WIDTHS = ("num_hidden_layers", "n_layer"), ("intermediate_size", "moe_intermediate_size")


@dataclass(frozen=True)
class CapacityCase:
    """A small model, a way to train it, and the shape of its micro-batches: `rows` sequences of `length` tokens."""

    family: str
    way: str
    rows: int
    length: int
    config: dict[str, Any]
    preference: str = ""
    """A loss of [preference], for pairs whose sides are `length` tokens long; empty for texts."""
    prompt: int = 1
    """Tokens of each pair's prompt."""

    def __str__(self) -> str:
        prompt = f"prompt {self.prompt}" if self.prompt > 1 else ""
        return ", ".join(
            part for part in (self.family, self.way, f"{self.rows} x {self.length}", self.preference, prompt) if part
        )


@dataclass(frozen=True)
class CapacityResult:
    """The number of allocation failures of both runs, whether both finished, and the predicted and the measured peak in
    bytes.

    The measured peak is that of the run with more memory. A run with less memory also counts as finished if it ends out
    of memory and its plan says that no remedy makes it fit. That happens if the update of all weights has the peak: in
    a model this small no remedy lowers that peak.
    """

    with_more: int
    with_less: int
    finished: bool
    missed_predictions: int
    """Number of warnings that a prediction was wrong; none are expected, even after a failure."""
    predicted_bytes: int
    measured_bytes: int

    @property
    def right(self) -> bool:
        """Whether nothing failed with one per cent more memory, something failed with one per cent less, both runs
        finished, and neither warned about its prediction."""
        return self.finished and not self.with_more and self.with_less > 0 and not self.missed_predictions


def capacity_cases(count: int = CASES, seed: int = SEED) -> Iterator[CapacityCase]:
    """Yield random cases, with each family and each way about equally often."""
    drawn = random.Random(seed)
    families, ways = list(FAMILIES), list(WAYS)
    for number in range(count):
        if number % len(families) == 0:
            drawn.shuffle(families)
        if number % len(ways) == 0:
            drawn.shuffle(ways)
        family, way = families[number % len(families)], ways[number % len(ways)]
        while not applies(family, way):
            way = drawn.choice(ways)
        rows, length = drawn.randint(1, 4), drawn.randrange(64, 385)
        yield CapacityCase(family, way, rows, length, _resized(FAMILIES[family], drawn))


def preference_cases(
    count: int, seed: int = SEED, losses: tuple[str, ...] = PREFERENCE_LOSSES
) -> Iterator[CapacityCase]:
    """Yield random cases of preference learning: sequences alone, and two or four at once; half of them with long
    prompts."""
    drawn = random.Random(seed)
    learnable = (case for case in capacity_cases(100 * count, seed) if not set(UNPAIRED) & set(case.way.split(", ")))
    for number, case in zip(range(count), learnable, strict=False):
        prompt = case.length * (2 + number % 7) // 9 - 10 if number % 2 else 1
        yield replace(case, rows=(1, 2, 4)[number % 3], preference=drawn.choice(losses), prompt=max(1, prompt))


def run_case(case: CapacityCase, folder: Path) -> CapacityResult:
    """Train a case with more memory than predicted, and with less."""
    peak_bytes, known = _predicted(case, folder)
    code, events = _run(case, folder / "more", (1 + MARGIN) * peak_bytes)
    code_less, events_less = _run(case, folder / "less", (1 - MARGIN) * peak_bytes)
    less = spec_of(case, folder / "less", (1 - MARGIN) * peak_bytes)
    hopeless = make_plan(less, known=known).verdict == "does_not_fit"
    warnings = of_kind([*events, *events_less], "warning")
    return CapacityResult(
        with_more=len(of_kind(events, "backoff")),
        with_less=len(of_kind(events_less, "backoff")),
        finished=code == 0 and (code_less == 0 or (code_less == OUT_OF_MEMORY and hopeless)),
        missed_predictions=sum(event["code"] == "prediction_missed" for event in warnings),
        predicted_bytes=peak_bytes,
        measured_bytes=max((event["peak_bytes"] for event in of_kind(events, "step")), default=0),
    )


def _predicted(case: CapacityCase, folder: Path) -> tuple[int, SequenceBounds]:
    """The predicted peak in bytes, and what it rests on."""
    spec = spec_of(case, folder / "predicted", 2.0**33)
    known = prepare_data(spec, load_tokenizer(spec.recipe.model)).bounds
    return Predictor(find_architecture(spec), spec, known.targets).predict(case.rows, case.length).peak_bytes, known


def _run(case: CapacityCase, folder: Path, capacity_bytes: float) -> tuple[int, list[dict[str, Any]]]:
    return train(new_run(folder / "runs", spec_of(case, folder, capacity_bytes)))


def _resized(config: dict[str, Any], drawn: random.Random) -> dict[str, Any]:
    """The config with random depth, vocabulary and feed-forward width."""
    changed = {"vocab_size": drawn.randrange(300, 4000)}
    for key in config:
        if key in LAYERS:
            changed[key] = drawn.randint(2, 5)
        if key in WIDTHS:
            changed[key] = 8 * drawn.randint(12, 64)
    return {**config, **changed}


def spec_of(case: CapacityCase, folder: Path, capacity_bytes: float) -> RunSpec:
    """The run spec of a case, on texts of exactly the case's length; if packed, two documents per row."""
    way = WAYS[case.way]
    folder.mkdir(parents=True, exist_ok=True)
    batch = case.rows * MICRO_BATCHES
    packed = bool(way.data.get("packing"))
    length = case.length // 2 if packed else case.length
    count = STEPS * batch * (1 + packed)
    samples = pairs(folder, count, length, case.prompt) if case.preference else texts(folder, count, length)
    method, preference = way.method, {}
    if case.preference:
        method, preference, batch = {**method, "objective": "dpo"}, {"loss": case.preference}, max(1, batch // 2)
        batch *= 2 if case.preference == "kto" else 1
    recipe = {
        "name": "cell",
        "model": {
            "id": str(folder_of(case.config, folder / "model")), "tokenizer": "builtin:bytes", "init": "random",
            "dtype": way.dtype, **way.model,
        },
        "method": method,
        "preference": preference,
        "data": {
            "sources": [{"name": "main", "path": str(samples), "template": "none"}],
            "max_length": 2 * length if packed else length,
            **way.data,
        },
        "train": {"max_steps": STEPS, "batch_size": batch, "micro_batch": case.rows, **way.train},
        "checkpoint": {"every_minutes": 0},
    }  # fmt: skip
    device = {"kind": "metered", "memory_gib": capacity_bytes / 2**30}
    return RunSpec.model_validate({"name": "cell", "profile": {"name": "cell", "device": device}, "recipe": recipe})


def texts(folder: Path, count: int, length: int) -> Path:
    """Write a file of samples of exactly `length` tokens for the byte tokenizer, all of them targets."""
    drawn = random.Random(0)
    path = folder / "samples.jsonl"
    # One token is the end of the text.
    lines = ({"text": "".join(drawn.choices("abcdefgh ", k=length - 1))} for _ in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def pairs(folder: Path, count: int, length: int, prompt_tokens: int = 1) -> Path:
    """Write a file of pairs, each side of which has exactly `length` tokens for the byte tokenizer."""
    drawn, side = random.Random(0), length - prompt_tokens - 11  # ten digits, and the end of the text
    path = folder / "pairs.jsonl"
    with path.open("w") as file:
        for number in range(count):
            prompt, *sides = ("".join(drawn.choices("abcdefgh ", k=k)) for k in (prompt_tokens, side, side))
            chosen, rejected = (f"{side}{number:010d}" for side in sides)
            file.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
    return path
