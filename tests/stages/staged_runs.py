"""Small staged runs for the tests: real conductors and real engines of a tiny model. Not a test module."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config.schema.run import RunSpec
from engine.journal.directory import RunDirectory
from engine.journal.events import Event
from engine.journal.liveness import engine_process, is_alive
from engine.launch.create_run import create_run
from engine.launch.process import start_engine
from engine.model.tokenizer import byte_tokenizer
from tests.events import read_events
from tests.train.run_helpers import ROOMY_GIB, make_spec, write_samples

GIVE_UP_SECONDS = 180.0


def staged_spec(
    folder: Path, stages: list[dict[str, Any]], *, device: str = "cpu", memory_gib: float = ROOMY_GIB,
    **tables: Any,
) -> RunSpec:  # fmt: skip
    """A run spec with these stages: the tiny model, trained in full, a checkpoint at every second step."""
    train = {"max_steps": 4, "batch_size": 4, "learning_rate": 1e-3, "seed": 3, **tables.pop("train", {})}
    checkpoint = {"every_steps": 2, "every_minutes": 0}
    samples = write_samples(folder / "samples.jsonl", count=16)
    spec = make_spec(samples, device=device, memory_gib=memory_gib, train=train, checkpoint=checkpoint, **tables)
    data = spec.model_dump(by_alias=True, exclude_none=True)
    return RunSpec.model_validate({**data, "recipe": {**data["recipe"], "stages": stages}})


def new_staged_run(folder: Path, spec: RunSpec) -> RunDirectory:
    """Create the run as `train` does."""
    return create_run(spec, folder / "runs")[0]


def conduct(run: RunDirectory, *, resume: bool = False) -> int:
    """Start a conductor and wait for it; returns its exit code."""
    return start_engine(run, resume=resume).wait(GIVE_UP_SECONDS)


def events_of(run: RunDirectory, kind: str) -> list[Event]:
    """The events of one kind in the run's journal."""
    return [event for event in read_events(run.events) if event["kind"] == kind]


def ends_of(run: RunDirectory) -> list[tuple[str, str, int]]:
    """(stage, status, exit code) of every stage_finished in the run's journal."""
    return [(event["name"], event["status"], event["exit_code"]) for event in events_of(run, "stage_finished")]


def weights_of(stage: RunDirectory) -> dict[str, torch.Tensor]:
    """The weights of a stage's result."""
    return load_file(next(folder for folder in (stage.model, stage.adapter) if folder.is_dir()) / (
        "model.safetensors" if stage.model.is_dir() else "adapter_model.safetensors"
    ))  # fmt: skip


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that both have the same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different, different


def wait_for(met: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until `met()` is true; fails if the process ends before, or after GIVE_UP_SECONDS."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not met():
        assert process.poll() is None, "the conductor ended before"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a conductor, which leaves the engine of its stage alive."""
    process.kill()
    process.wait()


def kill_engine(stage: RunDirectory) -> None:
    """SIGKILL to the engine of a stage, if one is alive."""
    engine = engine_process(stage) if stage.exists() else None
    if engine is not None and is_alive(engine):
        os.killpg(engine.pid, signal.SIGKILL)


def write_tiny_model(folder: Path) -> Path:
    """A folder with a Qwen2 model of two small layers with random weights, and a tokenizer of bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen2", vocab_size=264, num_hidden_layers=2, tie_word_embeddings=True, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
