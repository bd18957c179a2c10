"""The closed form against the simulation for recipes drawn by chance: any family, targets, trained parts,
checkpointing, loss and optimizer. A plan that is too low is what ends a run hours later."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.architecture.lookup import find_architecture
from engine.budget.predict.prediction import predict
from engine.config.schema.run import RunSpec
from engine.errors import TunedeckError
from engine.extras.simulate.step import simulate_step
from tests.budget.budget_cases import FAMILIES
from tests.budget.metered_step import folder_of, run_spec

SEED = 20261127
FEW, MANY = 30, 1500
TOO_LOW, TOO_HIGH = 0.01, 0.06
"""Shares of the simulated peak, of a few MiB: a block of 512 bytes more or less is 0.01 %."""
TARGETS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj", "c_attn",
    "c_fc", "c_proj", "mlp.*", "*_proj", "model.layers.1.**", "experts.*_proj", "experts.gate_up_proj",
)  # fmt: skip
PARTS = ("lm_head", "model.embed_tokens", "model.norm", "**.mlp.**", "**.self_attn.**", "model.layers.1.**")
BESIDE = (
    "lm_head",
    "model.embed_tokens",
    "**.input_layernorm",
    "model.norm",
    "model.layers.2.mlp.down_proj",
    "**.q_norm",
)


def lora(draw: random.Random) -> dict[str, Any]:
    method: dict[str, Any] = {"rank": draw.choice((1, 4, 8, 12, 32))}
    chance = draw.random()
    if chance < 0.2:
        method["targets"] = "attention"
    elif chance < 0.6:
        method["targets"] = draw.sample(TARGETS, draw.randint(1, 3))
    if draw.random() < 0.2:
        method["exclude"] = [draw.choice(("q_proj", "down_proj", "model.layers.0.**", "**.mlp.**"))]
    if draw.random() < 0.25:
        method["also_train"] = draw.sample(BESIDE, draw.randint(1, 2))
    if draw.random() < 0.2:
        method["dropout"] = 0.1
    if draw.random() < 0.15:
        method["dora"] = True
    return method


def full(draw: random.Random) -> dict[str, Any]:
    chance = draw.random()
    if chance < 0.35:
        return {"kind": "full", "train_only": draw.sample(PARTS, draw.randint(1, 3))}
    return {"kind": "full"} | ({"freeze": draw.sample(PARTS, draw.randint(1, 2))} if chance < 0.7 else {})


def drawn(draw: random.Random, folder: Path) -> tuple[RunSpec, int, int]:
    """A run spec of a small model, and rows and length of its micro-batch. SpecError, UsageError: it is refused."""
    config = dict(FAMILIES[draw.choice(sorted(FAMILIES))])
    if draw.random() < 0.3:
        config["tie_word_embeddings"] = draw.random() < 0.5
    if draw.random() < 0.2 and config["model_type"] in ("llama", "qwen3", "mistral"):
        config["attention_bias"] = True
    method = full(draw) if draw.random() < 0.35 else lora(draw)
    dtype = draw.choice(("bfloat16", "float32", "float16"))
    train: dict[str, Any] = {
        "batch_size": 4,
        "gradient_checkpointing": draw.choice((True, False, 1, 2)),
        "optimizer": draw.choice(("adamw", "adamw", "sgd", "adafactor")),
        "mlp_tiles": draw.choice((1, 1, 1, 2, 4)),
        "optimizer_offload": draw.random() < 0.2,
        "rounding": draw.choice(("exact", "exact", "stochastic", "nearest")),
    }
    plain = draw.random() < 0.25 and not (method.get("kind") == "full" and dtype == "float16")
    train["loss"] = "plain" if plain else draw.choice(("auto", "chunked"))
    model: dict[str, Any] = {"dtype": dtype, "attention": draw.choice(("auto", "auto", "sdpa", "eager"))}
    data = {"max_length": 512, "packing": draw.random() < 0.2}
    moe = {"freeze_router": draw.random() < 0.5} if draw.random() < 0.3 else {}
    rows, length = draw.choice(((1, 300), (2, 200), (4, 128), (3, 97), (1, 512), (6, 40)))
    folder = folder_of(config, folder)
    return run_spec(folder, method=method, model=model, train=train, data=data, moe=moe), rows, length


def compared(draw: random.Random, folder: Path) -> str | None:
    """What is wrong with the plan of one drawn recipe, empty if it is right; None if the recipe is refused."""
    try:
        spec, rows, length = drawn(draw, folder)
        predicted = predict(find_architecture(spec), spec, rows=rows, length=length)
        simulated = simulate_step(spec, rows=rows, length=length).peak_bytes
    except (TunedeckError, ValueError):  # pydantic's ValidationError is a ValueError
        return None
    error = predicted.peak_bytes / simulated - 1
    if -TOO_LOW < error < TOO_HIGH:
        return ""
    recipe = spec.recipe.model_dump(exclude_defaults=True)
    return f"{error:+.3f} in {predicted.deciding_phase}, {rows} x {length}: {recipe}"


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.torture)])
def test_plans_of_recipes_drawn_by_chance_are_those_of_the_simulation(tmp_path: Path, count: int) -> None:
    draw = random.Random(SEED)
    found = [compared(draw, tmp_path / str(number)) for number in range(count)]
    assert sum(each is not None for each in found) > count / 3, "nearly all recipes were refused"
    assert [each for each in found if each] == []
