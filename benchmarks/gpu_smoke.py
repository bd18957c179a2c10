"""The suite `smoke` of `benchmarks.gpu`: does the engine work on this device?"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_runs import (
    MIXTURE,
    RECOMPUTING,
    STEPS,
    Measurement,
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
from engine.config.changes import with_changes
from engine.launch.process import start_engine

if TYPE_CHECKING:  # imported where results are opened: the other measurements leave torch to their engines
    import torch

SMALL_MODEL = "Qwen/Qwen2.5-0.5B"
METHODS: dict[str, dict[str, Any]] = {"lora": {"rank": 8}, "full": {"kind": "full"}}
ONE_GRADIENT: dict[str, Any] = {
    "max_steps": 1, "optimizer": "sgd", "learning_rate": 1.0, "scheduler": "constant", "warmup_steps": 0,
    "weight_decay": 0.0, "max_grad_norm": 0.0,
}  # fmt: skip
"""Settings of a run after which each trained weight has changed by exactly its gradient, so that what is saved shows
the gradients. A loss shows nothing: it is computed before any gradient."""
PLAIN_LORA = TrainingCase(SMALL_MODEL, METHODS["lora"], 2, 256, {})
LEARNS: dict[str, tuple[TrainingCase, dict[str, Any]]] = {
    "dropout": (replace(PLAIN_LORA, method={"rank": 8, "dropout": 0.1}), {}),
    "optimizer-offload": (TrainingCase(SMALL_MODEL, METHODS["full"], 2, 256, {"optimizer_offload": True}), {}),
    "adamw-8bit": (TrainingCase(SMALL_MODEL, METHODS["full"], 2, 256, {"optimizer": "adamw_8bit"}), {}),
    "experts": (TrainingCase(MIXTURE, METHODS["lora"], 2, 256, {}, layers=2), {}),
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
    plain = {"model.kernels": "torch"}  # beside fused kernels, the default
    yield Measurement("fused-gradients", partial(_same_gradients, case, plain, 0.05))
    packed = replace(case, padded=True, packing=True)
    masked = {"model.attention": "sdpa"}  # with a mask that keeps the documents of a row apart
    yield Measurement("packing-gradients", partial(_same_gradients, packed, masked, 0.05))
    yield Measurement("compiled-gradients", partial(_same_gradients, case, {"train.compile": True}, 0.05))
    yield Measurement("tiled-gradients", partial(_same_gradients, case, {"train.mlp_tiles": 3}, 0.05))
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
    return compared_with_roomy(run.expect(), roomy)


def compared_with_roomy(run: Run, roomy: Run) -> Result:
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
