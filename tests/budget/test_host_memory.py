"""Memory that plans count in addition to the tensors of a training step: offloads on the host, the CUDA context,
generated answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.architecture.lookup import find_architecture
from engine.budget.advise.plan import Plan, make_plan
from engine.budget.predict.non_torch_memory import CONTEXT_BYTES, host_bytes
from engine.budget.predict.prediction import Prediction, predict
from engine.budget.trace.memory_config import memory_config_of
from engine.commands.plan_text import host_sentence
from engine.config.schema.run import RunSpec
from tests.budget.budget_cases import FAMILIES, FULL, LORA
from tests.budget.metered_step import folder_of, loaded_step, run_spec

ROWS, LENGTH = 2, 200


def predicted(spec: RunSpec) -> dict[str, int]:
    arch = find_architecture(spec)
    return host_bytes(arch, memory_config_of(arch, spec), spec.profile, ROWS, LENGTH)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_activations_on_the_host_are_predicted(
    family: str, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"gradient_checkpointing": checkpointing, "activation_offload": True, "batch_size": 2 * ROWS}
    spec = run_spec(folder_of(FAMILIES[family], tmp_path), method=LORA, model={"dtype": "bfloat16"}, train=train)
    moved: list[int] = []
    with loaded_step(spec) as step:
        offload = step.device.offload

        def counted(tensor: torch.Tensor) -> torch.Tensor:
            moved.append(tensor.nbytes)
            copy: torch.Tensor = offload(tensor)
            return copy

        monkeypatch.setattr(step.device, "offload", counted)
        step.step(ROWS, LENGTH, 1)
    assert predicted(spec)["activations"] == pytest.approx(sum(moved), rel=0.06)


def test_optimizer_state_on_the_host_counts_for_every_device_of_a_machine() -> None:
    def host(count: int, strategy: str) -> int:
        device = {"kind": "cuda", "memory_gib": 79.1, "count": count}
        spec = run_spec("Qwen/Qwen2.5-7B", device, method=FULL, train={"optimizer_offload": True})
        parallel = spec.profile.parallel.model_copy(update={"strategy": strategy})
        return predicted(spec.model_copy(update={"profile": spec.profile.model_copy(update={"parallel": parallel})}))[
            "optimizer"
        ]

    alone = host(1, "single")
    assert host(4, "replicated") == 4 * alone
    assert host(4, "sharded") == pytest.approx(alone, rel=0.01)


def test_a_micro_batch_is_no_larger_than_what_the_host_holds_of_it() -> None:
    train = {"gradient_checkpointing": False, "activation_offload": True}

    def planned(host_gib: float) -> Plan:
        device = {"kind": "cuda", "memory_gib": 60.0, "host_memory_gib": host_gib, "compute_capability": 9.0}
        return make_plan(run_spec("Qwen/Qwen2.5-7B", device, method=LORA, train=train, data={"max_length": 2048}))

    roomy = planned(4000.0)
    tight = planned(2.5 * roomy.host_bytes / roomy.micro_batch / 2**30)
    assert (tight.verdict, tight.host_fits) == ("fits", True) and 1 < tight.micro_batch < roomy.micro_batch
    none = planned(0.5 * roomy.host_bytes / roomy.micro_batch / 2**30)
    assert (none.host_fits, none.micro_batch) == (False, roomy.micro_batch)


def test_a_plan_relies_on_no_offload_that_the_host_cannot_hold() -> None:
    def planned(host_gib: float, **train: Any) -> Plan:
        device = {"kind": "cuda", "memory_gib": 60.0, "host_memory_gib": host_gib, "compute_capability": 9.0}
        return make_plan(run_spec("Qwen/Qwen2.5-7B", device, method=FULL, train=train, data={"max_length": 512}))

    assert planned(128.0).remedies["train.optimizer_offload"]
    assert planned(32.0).verdict == "does_not_fit"
    asked = planned(32.0, optimizer_offload=True)
    assert not asked.host_fits and asked.as_json()["host_bytes"] == asked.host_bytes > 32 * 2**30
    assert "TOO LITTLE" in host_sentence(asked)
    assert host_sentence(planned(128.0, optimizer_offload=True)).endswith("of 128.00 GiB of host memory")


def test_the_context_counts_once(tmp_path: Path) -> None:
    def prediction(reserve_gib: float) -> Prediction:
        device = {"kind": "cuda", "memory_gib": 24.0, "reserve_gib": reserve_gib}
        spec = run_spec(folder_of(FAMILIES["qwen2"], tmp_path), device)
        return predict(find_architecture(spec), spec, rows=ROWS, length=LENGTH)

    for reserve_gib, reserved in ((0.0, 0), (0.25, 2**28), (1.0, CONTEXT_BYTES)):
        found = prediction(reserve_gib)
        assert found.reserved_context_bytes == reserved
        assert found.components["context"] == CONTEXT_BYTES - reserved


def test_three_samples_are_generated_three_at_a_time_or_as_many_as_fit() -> None:
    def planned(memory_gib: float, **evaluation: Any) -> Plan:
        device = {"kind": "cuda", "memory_gib": memory_gib}
        tables = {"data": {"valid_fraction": 0.1, "max_length": 256}, "generate": {"max_new_tokens": 100_000}}
        return make_plan(run_spec("Qwen/Qwen2.5-7B", device, eval=evaluation, **tables))

    assert planned(80.0, samples=3).generation_rows == 3
    assert planned(80.0, metrics=["exact_match"], limit=2).generation_rows == 2
    tight = planned(25.0, samples=3)
    assert (tight.generation_rows, tight.verdict) == (1, "fits")
    assert planned(80.0).generation_rows == 0
