"""Runs with train.compile: they learn what runs without it learn, and what cannot be compiled or is compiled wrongly is
not used.

Graphs are made for torch's aot_eager_decomp_partition, which takes seconds where inductor takes a minute. torch keeps
them for the process, so these tests share them: all runs have the same model and one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.config.check.notes import refuse_unsupported
from engine.config.schema.run import RunSpec
from engine.errors import SpecError
from engine.model.compiled import BACKENDS, is_compiled
from engine.model.trained import decoder_of
from engine.train.run import main
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.transaction import StepTransaction
from engine.verify.record import ProofResult
from engine.verify.verify import PROOFS
from tests.events import read_events
from tests.model.samples import batch_of, logits_of
from tests.present import metered
from tests.train.proofs.proved import proved, small_setup
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, train, write_samples

COUNTED = "aot_eager_decomp_partition"
COMPILED = {"micro_batch": 4, "max_steps": 4, "gradient_checkpointing": False, "compile": True}
ONE_TARGET = {"kind": "lora", "rank": 4, "alpha": 12, "targets": ["q_proj"]}
ONE_ROW = {"batch_size": 1, "compile": True}
"""With one row a class of layers takes half as many graphs."""


@pytest.fixture(scope="module", autouse=True)
def _own_graphs() -> Iterator[None]:
    """One thread, because graphs are made for a number of threads; and no graphs of other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "samples.jsonl")


def compile_proof(setup: TrainingSetup, folder: Path) -> ProofResult:
    (proof,) = [each for each in PROOFS if each.name == "compile"]
    return proved(setup, folder, proofs=[proof])["compile"]


def compiled_layers(setup: TrainingSetup) -> int:
    return sum(is_compiled(module) for module in decoder_of(setup.context.loaded.base).modules())


@pytest.mark.parametrize("device", ["metered", "cpu"])
def test_a_compiled_run_learns_what_it_learns_without(
    device: str, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it continues from a checkpoint with the same losses, to the bit."""
    monkeypatch.setitem(BACKENDS, "cpu", COUNTED)
    tables: dict[str, Any] = {"device": device, "checkpoint": {"every_steps": 2}}
    place = new_run(tmp_path / "compiled", make_spec(samples, train=COMPILED, **tables))
    code, events = train(place)
    (proof,) = [event for event in of_kind(events, "proof") if event["name"] == "compile"]
    assert code == 0 and proof["passed"] and f"4 layers compiled by {COUNTED}" in proof["detail"], proof
    _, plain = train(new_run(tmp_path / "plain", make_spec(samples, train={**COMPILED, "compile": False}, **tables)))
    assert losses(events) == pytest.approx(losses(plain), rel=1e-6)
    if device == "metered":
        peaks = [max(event["peak_bytes"] for event in of_kind(each, "step")) for each in (events, plain)]
        assert peaks[0] <= peaks[1]
    assert main.run(place.path, from_step=2) == 0
    continued = list(read_events(place.events))
    assert of_kind(continued, "resumed")[-1]["step"] == 2
    assert losses(continued) == losses(events)


def test_a_compiled_step_that_runs_out_of_memory_is_repeated_with_the_same_gradient(
    samples: Path, tmp_path: Path
) -> None:
    _, roomy = train(new_run(tmp_path / "roomy", make_spec(samples, train={**COMPILED, "compile": False})))
    code, tight = train(new_run(tmp_path / "tight", make_spec(samples, memory_gib=0.0145, train=COMPILED)))
    failed = of_kind(tight, "backoff")
    assert code == 0 and failed, tight[-1]
    assert losses(tight) == pytest.approx(losses(roomy), rel=1e-6)


def test_a_compiled_run_saves_a_live_adapter(tmp_path: Path) -> None:
    """peft reopens the adapter of compiled layers: the same logits, and B matrices that are no longer zero."""
    with small_setup(tmp_path, method=ONE_TARGET, train={**ONE_ROW, "learning_rate": 1e-2}) as setup:
        names = list(setup.context.loaded.model.state_dict())
        found = compile_proof(setup, tmp_path)
        assert found.passed and compiled_layers(setup) == 4, found
        loaded, transaction = setup.context.loaded, StepTransaction(setup.context)
        for step in (1, 2, 3):
            transaction.run(step, setup.order.step(step))
        assert list(loaded.model.state_dict()) == names
        loaded.save(tmp_path / "adapter")
        live = logits_of(loaded.model, batch_of())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter" / "base", dtype=torch.float32)
    reopened = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(reopened, batch_of()), live, rtol=1e-5, atol=1e-6)
    halves = [p for name, p in reopened.named_parameters() if "lora_B" in name]
    assert halves and all(half.any() for half in halves)


def test_a_proof_leaves_weights_and_gradients_as_they_are(tmp_path: Path) -> None:
    with small_setup(tmp_path, method=ONE_TARGET, train=ONE_ROW) as setup:
        model, device = setup.context.loaded.model, setup.context.device
        before, allocated = {name: p.clone() for name, p in model.named_parameters()}, device.memory().allocated_bytes
        assert compile_proof(setup, tmp_path).passed
        assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
        assert device.memory().allocated_bytes == allocated


def scaled(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A compiler whose code is wrong by a thousandth."""
    return lambda *given: [each * 1.001 for each in graph.forward(*given)]


def without_history(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A compiler whose code has no gradients."""

    def run(*given: Any) -> list[Tensor]:
        return [each.detach() for each in graph.forward(*given)]

    return run


def absent(graph: Any, inputs: Any) -> Callable[..., Any]:
    raise FileNotFoundError("no working C++ compiler found: g++")


@pytest.mark.parametrize(
    ("backend", "reason"), [(scaled, "output of layer 0"), (without_history, ""), (absent, "no working C++ compiler")]
)
def test_layers_that_are_compiled_wrongly_are_not_used(
    backend: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "metered", backend)
    with small_setup(tmp_path, method={"kind": "full"}, train=ONE_ROW) as setup:
        found = compile_proof(setup, tmp_path)
        assert found.passed is False and reason in found.detail and found.fallback == "layers are not compiled", found
        assert compiled_layers(setup) == 0
        StepTransaction(setup.context).run(1, setup.order.step(1))


def test_layers_that_were_not_compared_for_want_of_memory_are_not_used(tmp_path: Path) -> None:
    with small_setup(tmp_path, method={"kind": "full"}, train=ONE_ROW) as setup:
        metered(setup.context.device).fail_at(40)
        found = compile_proof(setup, tmp_path)
        assert found.passed is False and "memory ran out" in found.detail and compiled_layers(setup) == 0, found


def test_layers_run_as_they_are_once_they_cannot_be_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [True]

    def compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
        forward: Callable[..., Any] = graph.forward
        return forward if there else absent(graph, inputs)

    monkeypatch.setitem(BACKENDS, "metered", compiler)
    with small_setup(tmp_path, method={"kind": "full"}, train=ONE_ROW) as setup:
        context, samples = setup.context, np.concatenate([setup.order.step(step) for step in range(1, 5)])
        assert compile_proof(setup, tmp_path).passed
        there.clear()
        context.budget.budget_bytes = context.cost(4, int(context.data.lengths.max()))
        outcome = StepTransaction(context).run(1, samples)
        assert outcome.applied and outcome.micro_batch_rows > 1 and compiled_layers(setup) == 0
        (notice,) = [each for each in context.device.notices if "compiled" in each]
        assert "no longer compiled" in notice and "no working C++ compiler" in notice


def spec_with(parallel: dict[str, Any], method: dict[str, Any]) -> RunSpec:
    spec = make_spec(Path("none.jsonl"), train={"compile": True}, method=method)
    layout = spec.profile.parallel.model_copy(update=parallel)
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"parallel": layout})})


@pytest.mark.parametrize(
    ("parallel", "method", "named"),
    [
        ({"strategy": "sharded"}, {}, 'train.compile with parallel.strategy = "sharded"'),
        ({"sequence": 2}, {}, "train.compile with parallel.sequence > 1"),
        ({}, {"kind": "lora", "dropout": 0.1}, "train.compile with method.dropout > 0"),
    ],
)
def test_what_compiled_layers_cannot_do_yet_is_refused(
    parallel: dict[str, Any], method: dict[str, Any], named: str
) -> None:
    with pytest.raises(SpecError, match=named):
        refuse_unsupported(spec_with(parallel, method))


def test_all_layers_share_their_graphs(tmp_path: Path) -> None:
    """torch.compile makes a graph for each hook's number that it meets: 20 layers with numbers of their own would need
    more graphs than a layer may have."""
    with small_setup(tmp_path) as setup:
        modules = setup.context.loaded.base.modules()
        hooks = [(type(module).__name__, tuple(module._forward_hooks)) for module in modules if module._forward_hooks]
    assert len(hooks) > 4 and len(set(hooks)) == 2  # q, k, v in attention; gate and up
