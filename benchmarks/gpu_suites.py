"""The measurements of `benchmarks.gpu`: what each trains, and what it reads from the run's journal afterwards.

Models have their published configs and random weights, since memory does not depend on the weights' values. On the
metered device a small model replaces each of them, with less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu_runs import (
    EXPERTS,
    MIXTURE,
    RECOMPUTING,
    Measurement,
    Result,
    SuiteDevice,
    TrainingCase,
    measured_run,
)
from benchmarks.gpu_smoke import compared_with_roomy, smoke
from engine.budget.advise.plan import Plan, make_plan
from engine.config.changes import with_changes

# budget: is the prediction right?

LORA, FULL, KEEPING = {"rank": 16}, {"kind": "full"}, {"gradient_checkpointing": False}
PLAIN, ATTENTION = {"loss": "plain"}, {"rank": 16, "targets": "attention"}
TILED = {"mlp_tiles": 4, "gradient_checkpointing": True}
BUDGET: dict[str, TrainingCase] = {
    "qwen2.5-0.5b-lora-1x512": TrainingCase("Qwen/Qwen2.5-0.5B", LORA, 1, 512, {}),
    "qwen2.5-0.5b-full-4x2048": TrainingCase("Qwen/Qwen2.5-0.5B", FULL, 4, 2048, {}),
    "qwen2.5-7b-r128-1x512": TrainingCase("Qwen/Qwen2.5-7B", {"rank": 128}, 1, 512, PLAIN),
    "qwen2.5-7b-r128-8x512": TrainingCase("Qwen/Qwen2.5-7B", {"rank": 128}, 8, 512, {}),
    "qwen2.5-7b-r128-1x8192": TrainingCase("Qwen/Qwen2.5-7B", {"rank": 128}, 1, 8192, {}),
    "qwen2.5-7b-bf16-2x2048": TrainingCase("Qwen/Qwen2.5-7B", {"rank": 128, "adapter_dtype": "bfloat16"}, 2, 2048, {}),
    "qwen2.5-7b-padded-4x1024": TrainingCase("Qwen/Qwen2.5-7B", {"rank": 128}, 4, 1024, {}, padded=True),
    "qwen2.5-7b-nf4-1x2048": TrainingCase("Qwen/Qwen2.5-7B", LORA, 1, 2048, {}, quantize="nf4"),
    "qwen3-4b-lora-1x512": TrainingCase("Qwen/Qwen3-4B", LORA, 1, 512, {}),
    "qwen3-4b-lora-1x8192": TrainingCase("Qwen/Qwen3-4B", LORA, 1, 8192, {}),
    "qwen3-4b-kept-1x2048": TrainingCase("Qwen/Qwen3-4B", LORA, 1, 2048, KEEPING),
    "qwen3-4b-full-1x2048": TrainingCase("Qwen/Qwen3-4B", FULL, 1, 2048, {}),
    "llama-3.1-8b-lora-2x4096": TrainingCase("meta-llama/Llama-3.1-8B", LORA, 2, 4096, {}),
    "llama-3.1-8b-full-1x1024": TrainingCase("meta-llama/Llama-3.1-8B", FULL, 1, 1024, {}),
    "llama-3.1-8b-full-8x4096": TrainingCase("meta-llama/Llama-3.1-8B", FULL, 8, 4096, {}),
    "qwen3-8b-lora-1x1024": TrainingCase("Qwen/Qwen3-8B", LORA, 1, 1024, PLAIN),
    "qwen3-8b-lora-1x256": TrainingCase("Qwen/Qwen3-8B", LORA, 1, 256, {}),
    "mixtral-8x7b-attention-1x512": TrainingCase("mistralai/Mixtral-8x7B-v0.1", ATTENTION, 1, 512, {}),
    "llama-3.1-8b-tiled-1x16384": TrainingCase("meta-llama/Llama-3.1-8B", LORA, 1, 16384, TILED),
    "qwen3-30b-a3b-experts-1x2048": TrainingCase(MIXTURE, EXPERTS, 1, 2048, {}, layers=8),
    "qwen2-vl-7b-lora-text-1x2048": TrainingCase("Qwen/Qwen2-VL-7B-Instruct", LORA, 1, 2048, {}),
}
WORST_PERCENT = 2.0
PADDED_PERCENT = 10.0
"""Most percent by which the prediction for padded rows may be too high: it counts padding as targets."""


def budget(_device: SuiteDevice) -> Iterator[Measurement]:
    """Yield measurements that compare predicted bytes with allocated bytes, reserved bytes and the bytes that the
    driver reports. Each run calibrates later plans."""
    for name, case in BUDGET.items():
        yield Measurement(name, partial(_predicted, case))


def _reported(plan: Plan) -> int:
    """Bytes that the driver is predicted to report: the predicted use, plus the part of the CUDA context that the plan
    counts in the profile's reserve."""
    return plan.prediction.device_bytes + plan.prediction.reserved_context_bytes


def _predicted(case: TrainingCase, device: SuiteDevice, folder: Path) -> Result:
    spec = case.spec(device, folder)
    before = make_plan(spec)
    run = measured_run(spec, folder, device).expect()
    measured = run.finished["measured"]
    predicted = measured["predicted"]
    off = 100 * (predicted["peak_bytes"] / measured["peak_bytes"] - 1)
    used = run.device_used_bytes
    device_off = 100 * (_reported(before) / used - 1) if used else None
    return {
        "ok": -WORST_PERCENT <= off <= (PADDED_PERCENT if case.padded else WORST_PERCENT),
        "predicted": predicted,
        "measured": {key: measured[key] for key in ("peak_bytes", "components", "sequences", "length")},
        "reserved_bytes": max(event["reserved_bytes"] for event in run.of_kind("step")),
        "device_predicted_bytes": _reported(before),
        "device_used_bytes": used,
        "deciding_phase": before.prediction.deciding_phase,
        "error_percent": round(off, 3),
        "device_error_percent": device_off and round(device_off, 3),
        "said": f"{measured['peak_bytes'] / 2**30:.3f} GiB, predicted {off:+.2f} %"
        + (f"; the device {device_off:+.2f} %" if device_off is not None else ""),
    }


# backoff: what does an OOM cost?

CAPS_GIB = (24.0, 48.0, 79.0)
LARGE_BATCH = 4096
"""More sequences than fit at once anywhere."""
SHIPPED: dict[str, TrainingCase] = {
    "lora": TrainingCase("Qwen/Qwen2.5-7B", LORA, 1, 2048, RECOMPUTING),
    "attention-lora": TrainingCase("Qwen/Qwen2.5-7B", ATTENTION, 1, 2048, RECOMPUTING),
    "full": TrainingCase("Qwen/Qwen2.5-0.5B", FULL, 1, 2048, RECOMPUTING),
}


def _caps(device: SuiteDevice, *, small_gib: float) -> list[float]:
    return [small_gib] if device.is_small else [cap for cap in CAPS_GIB if cap < device.memory_gib]


def backoff(device: SuiteDevice) -> Iterator[Measurement]:
    """Yield measurements of the backoff: each trains with twice the micro-batch that fits by the plan, under a memory
    cap."""
    for name, case in SHIPPED.items():
        for cap_gib in _caps(device, small_gib=0.02):
            yield Measurement(f"{name}-{cap_gib:g}gb", partial(_doubled, case, cap_gib))


def _doubled(case: TrainingCase, cap_gib: float, device: SuiteDevice, folder: Path) -> Result:
    fitting = _planned_rows(case, cap_gib, device, folder)
    tight = case.spec(device, folder / "data", cap_gib, micro_batch=2 * fitting)
    run = measured_run(tight, folder / "tight", device).expect()
    # Train on the same samples with the same batch size, in micro-batches that fit, without a memory cap.
    whole = case.spec(device, folder / "data", micro_batch=2 * fitting)
    roomy = measured_run(with_changes(whole, {"train.micro_batch": fitting}), folder / "roomy", device).expect()
    return {"fitting_sequences": fitting, **compared_with_roomy(run, roomy)}


def _planned_rows(case: TrainingCase, cap_gib: float, device: SuiteDevice, folder: Path) -> int:
    """Return the largest number of sequences that fit at once, according to the plan, on a device of `cap_gib`."""
    spec = case.spec(device, folder / "plan", cap_gib, micro_batch="auto", batch_size=LARGE_BATCH)
    return make_plan(spec).micro_batch


# edge: is the planned micro-batch the largest that fits?


def edge(device: SuiteDevice) -> Iterator[Measurement]:
    """Yield measurements that search the largest micro-batch that trains without an OOM, and compare it with the
    planned one."""
    for name, case in SHIPPED.items():
        for cap_gib in _caps(device, small_gib=0.03):
            yield Measurement(f"{name}-{cap_gib:g}gb", partial(_largest, case, cap_gib))


def _largest(case: TrainingCase, cap_gib: float, device: SuiteDevice, folder: Path) -> Result:
    planned = _planned_rows(case, cap_gib, device, folder)

    def fits(rows: int) -> bool:
        spec = case.spec(device, folder / f"{rows}", cap_gib, micro_batch=rows, max_steps=2)
        return not measured_run(spec, folder / f"{rows}", device).expect().of_kind("backoff")

    low, high = 0, 2 * planned
    asked = iter((planned, planned + 1))  # two runs suffice where the plan is right
    while low < high:
        rows = next(asked, (low + high + 1) // 2)
        low, high = (rows, high) if fits(rows) else (low, rows - 1)
    share = planned / low if low else float("inf")
    return {
        "ok": planned <= low and (share >= 0.9 or low - planned <= 1),
        "planned_sequences": planned,
        "largest_sequences": low,
        "said": f"planned {planned}, really {low}",
    }


# speed: how fast is it, beside others, and where does the time go?


def speed(_device: SuiteDevice) -> Iterator[Measurement]:
    """Yield measurements of tokens/s beside transformers' Trainer and TRL, of the time of each kernel in a step, and of
    settings beside each other."""
    # Imports torch, which the other suites leave to their engines.
    from benchmarks import gpu_speed as its
    from benchmarks.gpu_speed import FUSED, OURS, TRAINER, TRL, WITH_LIGER

    for name, contestants in {
        "peers-with-liger": (FUSED, TRAINER + WITH_LIGER, TRL + WITH_LIGER),
        "peers": (OURS, TRAINER, TRL),
    }.items():
        yield Measurement(name, partial(its.compared, contestants=contestants))
    for name, checkpointing in (("recomputed", True), ("kept", False)):
        yield Measurement(f"kernels-{name}", partial(its.profiled, checkpointing=checkpointing))
    yield Measurement("kernels-kept-fused", partial(its.profiled, checkpointing=False, kernels="auto"))
    yield Measurement("experts", its.experts)
    yield Measurement("attention", its.attention)
    for name, (case, choices) in its.SETTINGS.items():
        yield Measurement(name, partial(its.settings, case, choices))


SUITES: dict[str, Callable[[SuiteDevice], Iterator[Measurement]]] = {
    "smoke": smoke, "budget": budget, "backoff": backoff, "edge": edge, "speed": speed
}  # fmt: skip

SMALL = {
    "smoke": ("lora-bfloat16", "sigterm-and-resume"),
    "budget": ("qwen2.5-7b-padded-4x1024", "qwen2.5-7b-nf4-1x2048"),
    "backoff": ("attention-lora-0.02gb",),
    "edge": ("full-0.03gb",),
    "speed": ("kernels-recomputed", "activation-offload"),
}
"""The measurements that are run on the metered device: the others run the same code with other numbers."""


def measurements_of(suite: str, device: SuiteDevice) -> list[Measurement]:
    """Return the measurements of a suite; on the metered device only those that run different code."""
    every = list(SUITES[suite](device))
    return [each for each in every if each.name in SMALL[suite]] if device.is_small else every
