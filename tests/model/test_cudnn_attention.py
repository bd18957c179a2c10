"""cuDNN's attention: which lengths rows are padded to, which micro-batches it computes, and what a run does without it.
cuDNN runs on GPUs alone: here torch's CPU kernels stand in for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.batching.micro_batches import MicroBatch
from engine.batching.predicted_cost import cost_when_padded
from engine.config.changes import with_changes
from engine.model import cudnn_attention as module
from engine.model.cudnn_attention import CudnnAttention, computed_by_cudnn, cudnn_attention, rounded
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.computation import StepComputation
from engine.train.step.objective import StepTokens
from engine.verify import cudnn
from tests.model.samples import batch_of, load_family, run_spec
from tests.train.proofs.proved import proved, small_setup


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that torch was asked to prefer, one entry for each call of attention."""
    calls: list[Any] = []

    @contextmanager
    def recorded(backends: list[Any], *, set_priority: bool) -> Iterator[None]:
        assert set_priority
        calls.append(backends[0])
        yield

    monkeypatch.setattr(module, "sdpa_kernel", recorded)
    return calls


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingSetup]:
    """A run whose rows of 8 tokens and more cuDNN may compute."""
    monkeypatch.setattr(module, "SHORTEST", 8)
    monkeypatch.setattr(cudnn, "SHORTEST", 8)
    with small_setup(tmp_path) as made:
        made.context.cudnn = CudnnAttention(int(made.context.data.lengths.max()), made.context.loaded.layers)
        yield made


def test_rows_are_padded_by_at_most_a_64th_to_few_lengths() -> None:
    padded = [rounded(length, 10**6) for length in range(1, 20_000)]
    assert all(0 <= wide - length <= length / 64 for length, wide in enumerate(padded, 1))
    assert padded[:511] == list(range(1, 512)) and (padded[599], padded[2999], padded[4096]) == (600, 3008, 4160)
    for first in (512, 1024, 2048, 8192):
        assert len(set(padded[first : 2 * first])) <= 64
    assert padded == sorted(padded)


def test_no_row_is_padded_beyond_the_longest_for_which_memory_is_planned() -> None:
    assert rounded(3000, 3008) == 3008 and rounded(3000, 3007) == 3000 and rounded(4096, 4096) == 4096


def test_a_shape_is_left_to_flash_until_its_plan_is_worth_building(asked: list[Any]) -> None:
    cudnn = CudnnAttention(longest=4096, layers=10)
    with cudnn.micro_batch(2, 4096):
        assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping, "nothing has shown yet that it is faster"
    cudnn.use(saved_seconds=0.01 / (2 * 4096**2), plan_seconds=0.26)

    def by_cudnn(rows: int, length: int) -> bool:
        with cudnn.micro_batch(rows, length):
            return "sdpa" in ALL_ATTENTION_FUNCTIONS._local_mapping

    # 10 layers save 0.1 s a micro-batch of 2 x 4096, and a quarter of it at half the length.
    assert [by_cudnn(2, 4096) for _ in range(5)] == [False, False, False, True, True]
    assert [by_cudnn(2, 2048) for _ in range(12)] == [False] * 11 + [True]
    assert not by_cudnn(1, 4096), "another shape needs a plan of its own"
    assert not any(by_cudnn(64, 256) or by_cudnn(2, 4095) for _ in range(1000)), (
        "too short, or of no length that returns"
    )
    assert not by_cudnn(2, 4000) and "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping


def test_cudnn_computes_what_has_the_micro_batch_s_shape_and_needs_no_mask(tmp_path: Path, asked: list[Any]) -> None:
    loaded, batch = load_family(tmp_path, "llama"), batch_of(rows=3, length=12, masked=0)
    expected = loaded.model(input_ids=batch.input_ids_BS).logits
    with computed_by_cudnn(3, 12):
        found = loaded.model(input_ids=batch.input_ids_BS).logits
        assert asked == [SDPBackend.CUDNN_ATTENTION] * loaded.layers
        loaded.model(input_ids=batch.input_ids_BS[:2])
        loaded.model(input_ids=batch.input_ids_BS, attention_mask=torch.ones(3, 12).tril(4))
    assert torch.equal(found, expected) and len(asked) == loaded.layers
    with pytest.raises(ValueError, match="broken"), computed_by_cudnn(3, 12):
        raise ValueError("broken")
    loaded.model(input_ids=batch.input_ids_BS)
    assert len(asked) == loaded.layers


def test_padded_micro_batches_give_the_same_step(setup: TrainingSetup, asked: list[Any]) -> None:
    context = setup.context
    lengths = context.data.lengths
    samples = np.flatnonzero(lengths <= min(lengths[lengths % 8 == 3]))[:4]

    def step() -> tuple[list[int], float, dict[str, torch.Tensor]]:
        computation = StepComputation(context)
        tokens = StepTokens(targets=100, real=100)
        computation.begin()
        computation.accumulate(1, samples, [MicroBatch((0, 1, 2, 3), 0, 1)], tokens)
        gradients = {name: each.grad.clone() for name, each in context.loaded.trainable() if each.grad is not None}
        context.optimizer.zero_grad(set_to_none=True)
        shape = list(computation.batch(samples).input_ids_BS.shape)
        return shape, computation.mean_loss, gradients

    shape, loss, gradients = step()
    assert context.cudnn is not None and not asked
    context.cudnn.longest = 10**6
    context.cudnn.use(saved_seconds=1.0, plan_seconds=0.0)
    wider, same, equal = step()
    assert shape[1] < wider[1] <= shape[1] + 8 and wider[1] % 8 == 0
    assert asked and same == pytest.approx(loss, rel=1e-6) and gradients
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, equal[name], rtol=1e-4, atol=1e-7), name


def test_the_cost_is_that_of_padded_rows() -> None:
    cost = cost_when_padded(lambda rows, length, patches=None: rows * length + (patches or 0), 4096)
    assert (cost(2, 3000), cost(2, 3000, 7), cost(1, 100), cost(1, 4090)) == (6016, 6023, 100, 4096)


def test_a_run_is_set_up_with_it_and_its_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORTEST", 8)
    made = CudnnAttention(longest=64, layers=2)
    monkeypatch.setattr("engine.train.run.setup.cudnn_attention", lambda *given: made)
    with small_setup(tmp_path) as setup:
        context = setup.context
        assert context.cudnn is made and context.cost_recomputing is not None
        longest = int(context.data.lengths.max())
        length = next(each for each in range(longest - 8, 0, -1) if each % 8 == 3)
        for cost in (context.cost, context.cost_recomputing(1)):
            assert cost(2, length - 3) < cost(2, length) == cost(2, length + 5), "3 more tokens are padded to 8"


def test_a_faster_kernel_is_used_and_a_slower_one_is_not(
    setup: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter([0.004, 0.002, 0.5, 0.1])
    monkeypatch.setattr(cudnn, "_seconds", lambda *given, **options: next(taken))
    found, context = proved(setup, tmp_path, proofs=[cudnn.CUDNN])["cudnn"], setup.context
    assert found.passed and "4.00" in found.detail and "0.10 s" in found.detail, found
    assert context.cudnn is not None and context.cudnn.in_use and context.cudnn.plan_seconds == pytest.approx(0.098)
    length = cudnn._multiple(context.cudnn.longest)
    rows = cudnn.TIMED_TOKENS // length
    assert context.cudnn.saved_seconds * rows * length**2 == pytest.approx(0.002)
    context.cudnn.in_use, taken = False, iter([0.004, 0.0039, 0.5, 0.1])
    found = proved(setup, tmp_path, proofs=[cudnn.CUDNN])["cudnn"]
    assert found.passed and found.detail.startswith("cuDNN is not used: ") and not context.cudnn.in_use


def test_the_kernels_are_really_timed(setup: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "MOST_OF_FLASH", 1e9)
    monkeypatch.setattr(cudnn, "TIMED_TOKENS", 64)
    found = proved(setup, tmp_path, proofs=[cudnn.CUDNN])["cudnn"]
    assert found.passed and setup.context.cudnn is not None and setup.context.cudnn.in_use, found


def test_a_wrong_kernel_is_not_used(setup: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def wrong(*given: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return sdpa_attention_forward(*given, **options)[0] * 1.1, None

    monkeypatch.setattr(module, "sdpa_attention_forward", wrong)
    found = proved(setup, tmp_path, proofs=[cudnn.CUDNN])["cudnn"]
    assert found.passed is False and "output at " in found.detail
    assert setup.context.cudnn is not None and not setup.context.cudnn.in_use
    assert found.fallback == "attention uses torch's flash kernel"


SUITED = {"attention": "sdpa", "layers": 4, "attends_to_padding": False}


@pytest.mark.parametrize(
    ("changes", "loaded", "capability", "expected"),
    [
        ({}, {}, 9, True),
        ({}, {}, 10, True),
        ({}, {}, 8, False),
        ({}, {"attention": "flash_attention_2"}, 9, False),
        ({}, {"attends_to_padding": True}, 9, False),
        ({"model.attention": "sdpa"}, {}, 9, False),
        ({"train.deterministic": True}, {}, 9, False),
        ({"train.compile": True}, {}, 9, False),
        ({"data.packing": True}, {}, 9, False),
        ({"method.objective": "dpo"}, {}, 9, False),
        ({}, {"dtype": torch.float32}, 9, False),
    ],
)
def test_which_runs_may_use_it(
    changes: dict[str, Any], loaded: dict[str, Any], capability: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    facts = {"dtype": torch.bfloat16, **SUITED, **loaded}
    model: Any = SimpleNamespace(precision=SimpleNamespace(compute=facts.pop("dtype")), **facts)
    device: Any = SimpleNamespace(torch_device=torch.device("cuda", 0))
    assert (cudnn_attention(with_changes(run_spec(), changes), device, model, 4096) is not None) is expected


def test_a_cpu_has_no_cudnn(setup: TrainingSetup) -> None:
    assert cudnn_attention(setup.spec, setup.context.device, setup.context.loaded, 4096) is None
