"""The measurements of `benchmarks.gpu`: what each trains, and what it reads from the run's journal afterwards.

Models have their published configs and random weights, since memory does not depend on the weights' values. On the
metered device a small model replaces each of them, with less memory.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_runs import (
    STEPS,
    Result,
    Run,
    SuiteDevice,
    TrainingCase,
    ended,
    engine_run,
    measured_run,
    new_run,
    until_step,
)
from engine.budget.advise.levers import with_changes
from engine.budget.advise.plan import Plan, make_plan
from engine.launch.process import start_engine

if TYPE_CHECKING:  # imported where results are opened: the other measurements leave torch to their engines
    import torch


@dataclass(frozen=True)
class Measurement:
    """One measurement of a suite. `run` is called with the device and an empty folder, and returns a dict that contains
    at least `ok` and the summary `said`."""

    name: str
    run: Callable[[SuiteDevice, Path], Result]


# smoke: does the engine work on this device?

SMALL_MODEL = "Qwen/Qwen2.5-0.5B"
METHODS: dict[str, dict[str, Any]] = {"lora": {"rank": 8}, "full": {"kind": "full"}}
ONE_GRADIENT: dict[str, Any] = {
    "max_steps": 1, "optimizer": "sgd", "learning_rate": 1.0, "scheduler": "constant", "warmup_steps": 0,
    "weight_decay": 0.0, "max_grad_norm": 0.0,
}  # fmt: skip
"""Settings of a run after which each trained weight has changed by exactly its gradient, so that what is saved shows
the gradients. A loss shows nothing: it is computed before any gradient."""


MIXTURE = "Qwen/Qwen3-30B-A3B"
RECOMPUTING = {"gradient_checkpointing": True}
"""Keys of [train] of measurements that search a limit: by default, layers are recomputed until the plan fits."""
PLAIN_LORA = TrainingCase(SMALL_MODEL, METHODS["lora"], 2, 256, {})
LEARNS: dict[str, tuple[TrainingCase, dict[str, Any]]] = {
    "dropout": (replace(PLAIN_LORA, method={"rank": 8, "dropout": 0.1}), {}),
    "optimizer-offload": (TrainingCase(SMALL_MODEL, METHODS["full"], 2, 256, {"optimizer_offload": True}), {}),
    "adamw-8bit": (TrainingCase(SMALL_MODEL, METHODS["full"], 2, 256, {"optimizer": "adamw_8bit"}), {}),
    "experts": (TrainingCase("Qwen/Qwen3-30B-A3B", METHODS["lora"], 2, 256, {}, layers=2), {}),
    "answers": (PLAIN_LORA, {"data.valid_fraction": 0.25, "eval.metrics": ["loss", "exact_match"]}),
}
"""Measurements that only look whether the loss falls: what is trained, and further keys of the recipe."""


def smoke(_device: SuiteDevice) -> Iterator[Measurement]:
    """Yield measurements that check that the engine works: LoRA and full fine-tuning in two dtypes, with the result
    opened again; SIGTERM and resume; an OOM; gradients with activations in host memory, over a quantised base, too."""
    for method in METHODS:
        for dtype in ("bfloat16", "float16"):
            case = TrainingCase(SMALL_MODEL, METHODS[method], 2, 256, {}, dtype)
            yield Measurement(f"{method}-{dtype}", partial(_trains, case))
    case = PLAIN_LORA
    beside = replace(case, method={"rank": 8, "also_train": ["model.norm"]})
    yield Measurement("lora-also-train", partial(_trains, beside))
    yield Measurement("sigterm-and-resume", partial(_sigterm, case))
    yield Measurement("out-of-memory", partial(_survives, replace(case, train=RECOMPUTING, rows=64)))
    offload = {"train.activation_offload": True}
    yield Measurement("offload-gradients", partial(_same_gradients, case, offload, 0.01))
    # Two layers of real size: bitsandbytes' 4-bit products keep tensors of their own, whatever the number of layers.
    large = TrainingCase("Qwen/Qwen2.5-7B", METHODS["lora"], 1, 1024, {}, quantize="nf4", layers=2)
    yield Measurement(
        "nf4-offload-gradients", partial(_same_gradients, large, {"train.activation_offload": True}, 0.01)
    )
    # Other kernels round differently: bf16 has 8 bits.
    fused = {"model.kernels": "auto"}
    yield Measurement("fused-gradients", partial(_same_gradients, case, fused, 0.05))
    packed = replace(case, padded=True, packing=True)
    masked = {"model.attention": "sdpa"}  # with a mask that keeps the documents of a row apart
    yield Measurement("packing-gradients", partial(_same_gradients, packed, masked, 0.05))
    yield Measurement("compiled-gradients", partial(_same_gradients, case, {"train.compile": True}, 0.05))
    for name, (other, changes) in LEARNS.items():
        yield Measurement(name, partial(_learns, other, changes))
    yield Measurement("preference", partial(_prefers, case))


def _trains(case: TrainingCase, device: SuiteDevice, folder: Path) -> Result:
    run = engine_run(new_run(case.spec(device, folder), folder)).expect()
    losses = list(run.losses.values())
    falls = len(losses) == STEPS and losses[-1] < losses[0]
    loaded, changed = _reopened(run)
    return {
        "ok": falls and loaded == changed > 0,
        "tensors_reopened": loaded,
        "tensors_that_learned": changed,
        "said": f"losses {losses[0]:.4f} -> {losses[-1]:.4f}, {changed} of {loaded} tensors learned",
    }


def _reopened(run: Run) -> tuple[int, int]:
    """Open a run's result with transformers and peft, on the host. Returns the number of trained tensors in the result,
    and how many of them training has changed: for adapters, how many `lora_B` are not zero."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if run.place.adapter.is_dir():
        base = AutoModelForCausalLM.from_pretrained(run.place.adapter / "base", dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(run.place.adapter))
        trained = [tensor for name, tensor in model.named_parameters() if ".lora_B." in name]
        return len(trained), sum(bool(tensor.count_nonzero()) for tensor in trained)
    loading: Any = AutoModelForCausalLM
    whole, report = loading.from_pretrained(run.place.model, output_loading_info=True)
    count = len(list(whole.parameters()))
    return count, count - len(report["missing_keys"]) - len(report["unexpected_keys"])


def _learns(case: TrainingCase, changes: dict[str, Any], device: SuiteDevice, folder: Path) -> Result:
    run = measured_run(with_changes(case.spec(device, folder), changes), folder, device).expect()
    losses = list(run.losses.values())
    notices = [event["text"] for event in run.of_kind("notice")]
    return {
        "ok": len(losses) == STEPS and losses[-1] < losses[0],
        "notices": notices,
        "said": f"losses {losses[0]:.4f} -> {losses[-1]:.4f}",
    }


def _prefers(case: TrainingCase, device: SuiteDevice, folder: Path) -> Result:
    """Train on pairs of answers to equal prompts, of which the chosen one is always the same word."""
    spec = case.spec(device, folder, learning_rate=1e-3)
    rows = [{"prompt": f"question {number}: ", "chosen": "yes", "rejected": "no"} for number in range(4 * STEPS)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    run = engine_run(new_run(with_changes(spec, {"method.objective": "dpo"}), folder)).expect()
    losses = list(run.losses.values())
    return {
        "ok": abs(losses[0] - math.log(2)) < 0.01 and losses[-1] < losses[0],
        "said": f"losses {losses[0]:.4f} -> {losses[-1]:.4f}",
    }


def _same_gradients(
    case: TrainingCase, changes: dict[str, Any], largest_share: float, device: SuiteDevice, folder: Path
) -> Result:
    """Compare the gradients of two equal steps, one with `changes` to the recipe and one without. `ok` if they differ
    by at most `largest_share` of the largest gradient."""
    spec = case.spec(device, folder, **ONE_GRADIENT)
    kept = _saved_adapter(engine_run(new_run(spec, folder / "kept")).expect())
    changed_run = engine_run(new_run(with_changes(spec, changes), folder / "changed")).expect()
    changed = _saved_adapter(changed_run)
    gradients = [name for name in kept if ".lora_B." in name]
    size = max(float(kept[name].abs().max()) for name in gradients)
    worst = max(float((kept[name] - changed[name]).abs().max()) for name in gradients)
    return {
        "ok": size > 0 and worst <= largest_share * size,
        "notices": [event["text"] for event in changed_run.of_kind("notice")],
        "largest_gradient": size,
        "largest_difference": worst,
        "said": f"{len(gradients)} gradients of up to {size:.1e} differ by at most {worst:.1e}",
    }


def _saved_adapter(run: Run) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run.place.adapter / "adapter_model.safetensors")


def _sigterm(case: TrainingCase, device: SuiteDevice, folder: Path) -> Result:
    spec = case.spec(device, folder, max_steps=12)
    whole = engine_run(new_run(spec, folder / "whole")).expect()
    place = new_run(spec, folder / "broken")
    process = start_engine(place)
    until_step(place, 3, process)
    process.send_signal(signal.SIGTERM)
    stopped = ended(place, process).expect(130)
    resumed = engine_run(place, resume=True).expect()
    worst = max(abs(loss - resumed.losses.get(step, 9e9)) for step, loss in whole.losses.items())
    return {"ok": worst <= 1e-3, "said": f"stopped after step {len(stopped.losses)}; losses differ by {worst:.1e}"}


def _survives(case: TrainingCase, device: SuiteDevice, folder: Path) -> Result:
    roomy = measured_run(case.spec(device, folder), folder / "roomy", device).expect()
    capped_gib = 0.8 * roomy.peak_bytes / 2**30
    run = measured_run(case.spec(device, folder, capped_gib), folder / "capped", device)
    return _compared(run.expect(), roomy)


def _compared(run: Run, roomy: Run) -> Result:
    """Compare `run`, which ran out of memory, with `roomy`, which had enough memory. `ok` if `run` ended normally,
    had an allocation failure, lost no sample, and its losses differ by at most 0.02."""
    failures = run.of_kind("backoff")
    steps = [event["step_seconds"] for event in run.of_kind("step")]
    worst = max((abs(loss - run.losses.get(step, 9e9)) for step, loss in roomy.losses.items()), default=9e9)
    lost = run.finished.get("samples_lost")
    causes = sorted({f"{event['cause']} in {event['phase']}: {event['remedy']}" for event in failures})
    return {
        "ok": run.code == 0 and bool(failures) and lost == 0 and worst <= 0.02,
        "failures": causes,
        "samples_lost": lost,
        "largest_loss_difference": worst,
        "step_seconds": steps,
        "said": f"exit {run.code}, {len(failures)} failures, {lost} samples lost, losses within {worst:.1e}",
    }


# budget: is the prediction right?

LORA, FULL, KEEPING = {"rank": 16}, {"kind": "full"}, {"gradient_checkpointing": False}
PLAIN, ATTENTION = {"loss": "plain"}, {"rank": 16, "targets": "attention"}
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
    return {"fitting_sequences": fitting, **_compared(run, roomy)}


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
    """Yield measurements of tokens/s beside transformers' Trainer and TRL, and of the time of each kernel in a step,
    with recomputed and with kept activations."""
    # Imports torch, which the other suites leave to their engines.
    from benchmarks.gpu_speed import FUSED, OURS, TRAINER, TRL, WITH_LIGER, compared, profiled

    for name, contestants in {
        "peers-with-liger": (FUSED, TRAINER + WITH_LIGER, TRL + WITH_LIGER),
        "peers": (OURS, TRAINER, TRL),
    }.items():
        yield Measurement(name, partial(compared, contestants=contestants))
    for name, checkpointing in (("recomputed", True), ("kept", False)):
        yield Measurement(f"kernels-{name}", partial(profiled, checkpointing=checkpointing))
    yield Measurement("kernels-kept-fused", partial(profiled, checkpointing=False, kernels="auto"))


SUITES: dict[str, Callable[[SuiteDevice], Iterator[Measurement]]] = {
    "smoke": smoke, "budget": budget, "backoff": backoff, "edge": edge, "speed": speed
}  # fmt: skip

SMALL = {
    "smoke": ("lora-bfloat16", "sigterm-and-resume"),
    "budget": ("qwen2.5-7b-padded-4x1024", "qwen2.5-7b-nf4-1x2048"),
    "backoff": ("attention-lora-0.02gb",),
    "edge": ("full-0.03gb",),
    "speed": ("kernels-recomputed",),
}
"""The measurements that are run on the metered device: the others run the same code with other numbers."""


def measurements_of(suite: str, device: SuiteDevice) -> list[Measurement]:
    """Return the measurements of a suite; on the metered device only those that run different code."""
    every = list(SUITES[suite](device))
    return [each for each in every if each.name in SMALL[suite]] if device.is_small else every
