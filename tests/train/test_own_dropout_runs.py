"""A model with dropout in its config learns the same however often memory runs out, and uses the planned memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.architecture.lookup import find_architecture
from engine.batching.budget import MicroBatchBudget
from engine.budget.predict.prediction import predict
from engine.extras.simulate.step import simulate_step
from engine.train.step.transaction import StepTransaction
from tests.budget.metered_step import GPT2, LLAMA, PHI3, folder_of, measured_step, run_spec
from tests.present import metered
from tests.train.run_helpers import Workshop, make_spec, write_samples

P, STEPS = 0.1, 3
EVERYWHERE = {"attn_pdrop": P, "resid_pdrop": P, "embd_pdrop": P}
OPT: dict[str, Any] = {
    "model_type": "opt", "vocab_size": 900, "hidden_size": 128, "ffn_dim": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 512, "word_embed_proj_dim": 128, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 2, "dropout": P, "attention_dropout": P,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({**GPT2, **EVERYWHERE}, "auto"),
    "gpt2, eager": ({**GPT2, **EVERYWHERE}, "eager"),
    "opt": (OPT, "auto"),
    "opt, eager": (OPT, "eager"),
    "llama, eager": ({**LLAMA, "attention_dropout": P}, "eager"),
}


def trained(tmp_path: Path, name: str, case: str, *, capped: bool) -> tuple[list[float], int]:
    """The losses of STEPS steps, and how often memory ran out. If `capped`, a micro-batch has at most three of the
    longest sequences, and an allocation fails in each step."""
    config, attention = MODELS[case]
    model = {"id": str(folder_of(config, tmp_path / "model")), "attention": attention}
    data = write_samples(tmp_path / "samples.jsonl")
    workshop = Workshop(make_spec(data, model=model, train={"learning_rate": 1e-3}), tmp_path / name)
    losses = []
    with workshop as setup:
        context = setup.context
        budget = context.cost(3 if capped else 64, int(context.data.lengths.max()))
        context.budget = MicroBatchBudget(budget, top_bytes=budget)
        transaction = StepTransaction(context)
        for step in range(1, STEPS + 1):
            if capped:
                metered(context.device).fail_at(100 * step)
            losses.append(transaction.run(step, setup.order.step(step)).loss)
        return losses, sum(event["kind"] == "backoff" for event in workshop.events())


LEFT_OUT = ("gpt2, eager", "opt")
"""Cases that `make torture` adds: for each, one of the same family and one with the same kernel are there."""


def sampled(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.torture) if case in LEFT_OUT else case for case in cases]


@pytest.mark.parametrize("case", sampled(MODELS))
def test_memory_that_runs_out_changes_no_loss(case: str, tmp_path: Path) -> None:
    roomy, none = trained(tmp_path, "roomy", case, capped=False)
    capped, backoffs = trained(tmp_path, "capped", case, capped=True)
    assert (none, backoffs) == (0, STEPS)
    assert capped == pytest.approx(roomy, rel=1e-5)


PLANNED = {**MODELS, "phi3": ({**PHI3, "resid_pdrop": P}, "auto")}


@pytest.mark.parametrize("case", sampled(PLANNED))
def test_the_peak_is_the_planned_one(case: str, tmp_path: Path) -> None:
    """The measured peak is compared with the simulation, and with the closed form for families that have one."""
    config, attention = PLANNED[case]
    tables: dict[str, Any] = {
        "method": {"kind": "full"} if "eager" in case else {"rank": 8},
        "model": {"dtype": "float32" if "eager" in case else "bfloat16", "attention": attention},
        "train": {"batch_size": 4, "gradient_checkpointing": "eager" in case},
    }
    spec = run_spec(folder_of(config, tmp_path), **tables)
    _, measured = measured_step(spec, 2, 120, 2)
    assert simulate_step(spec, rows=2, length=120).peak_bytes == pytest.approx(measured, rel=1e-3)
    if config is not OPT:  # which is simulated alone
        predicted = predict(find_architecture(spec), spec, rows=2, length=120)
        assert predicted.peak_bytes == pytest.approx(measured, rel=5e-3)


@pytest.mark.parametrize("case", ["gpt2, eager", "llama, kept in sdpa", "llama, LoRA"])
def test_on_a_card_masks_take_no_memory(case: str, tmp_path: Path) -> None:
    """A kernel draws the masks in registers, or the attention kernel draws them itself. The closed form and the
    simulation agree on this."""
    config = {**GPT2, **EVERYWHERE} if "gpt2" in case else {**LLAMA, "attention_dropout": P}
    model = {"dtype": "bfloat16", "attention": "eager" if "eager" in case else "sdpa"}
    model |= {"attention_dropout": "keep"} if "kept" in case else {}
    method = {"rank": 8, "dropout": P if "LoRA" in case else 0.0}
    folder = folder_of(config, tmp_path)
    spec = run_spec(folder, {"kind": "cuda", "memory_gib": 24.0}, method=method, model=model, train={"batch_size": 4})
    predicted = predict(find_architecture(spec), spec, rows=2, length=200).peak_bytes
    assert simulate_step(spec, rows=2, length=200).peak_bytes == pytest.approx(predicted, rel=2e-3)
    if "LoRA" in case:
        metered = run_spec(folder, method=method, model=model, train={"batch_size": 4})
        assert predicted < predict(find_architecture(metered), metered, rows=2, length=200).peak_bytes
