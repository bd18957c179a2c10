"""A rank that is killed while all ranks write a checkpoint together costs a restart, and no step.

One run has adapters in shards and a module that is trained whole beside them (`method.also_train`), whose copy is
gathered like the adapters. In the other each rank writes a file of the full model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.rank_workbench import FULL, LORA, NEEDS_SHARDS, spec_of
from tests.distributed.supervised import VOTE_SECONDS, engine_ends, events, restarts
from tests.train.run_helpers import losses, new_run, of_kind, train

TABLES: dict[str, Any] = {
    "train": {"max_steps": 4},
    "checkpoint": {"every_steps": 2, "every_minutes": 0},
    "parallel": {"strategy": "sharded", "timeout_seconds": VOTE_SECONDS},
}

METHODS = {"adapters": {**LORA["method"], "also_train": ["model.embed_tokens"]}, "full": FULL["method"]}

KILLED_IN_SAVING = """
import os, pathlib, signal
once = pathlib.Path(os.environ["KILLED_ONCE"])
if os.environ.get("RANK") == "1" and not once.exists():
    import torch.distributed
    whole, called = torch.distributed.all_to_all_single, []

    def counting(*arguments, **named):
        called.extend(arguments[2:3])  # the sizes
        if len(called) == 3:
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*arguments, **named)

    torch.distributed.all_to_all_single = counting
"""
"""With sizes of parts, this collective puts weights together for checkpoints. A module that Python imports at its
start."""


@NEEDS_SHARDS
@pytest.mark.torture
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_killed_while_weights_are_put_together_costs_a_restart_and_no_step(
    method: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {**TABLES, "method": METHODS[method]}
    code, alone = train(new_run(folder / f"alone-{method}", spec_of(folder, 1, tables)))
    assert code == 0
    hook = folder / f"killed-{method}"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(KILLED_IN_SAVING)
    monkeypatch.setenv("PYTHONPATH", str(hook), prepend=":")
    monkeypatch.setenv("KILLED_ONCE", str(hook / "once"))
    place = new_run(hook, spec_of(folder, 2, tables))
    assert engine_ends(place, limit_seconds=400.0) == 0
    assert (hook / "once").exists() and len(restarts(place)) == 1
    told = events(place)
    assert [event["step"] for event in of_kind(told, "checkpoint_saved")] == [2, 4]
    assert losses(told) == pytest.approx(losses(alone), rel=1e-5)
    assert not list(place.checkpoints.glob(".step-*"))
