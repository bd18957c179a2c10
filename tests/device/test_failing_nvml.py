"""A driver that fails: a fake libnvidia-ml, opened by the real pynvml, whose functions fail one at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
FUNCTIONS = [
    "nvmlInit_v2", "nvmlInitWithFlags", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetIndex",
    "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature", "nvmlDeviceGetComputeRunningProcesses_v3",
]  # fmt: skip
GPU_IS_LOST, NOT_SUPPORTED, UNKNOWN = 15, 3, 999

READ = """
import ctypes, json, sys
from engine.device.nvml import driver_version, read_gpus

fake = ctypes.CDLL("libnvidia-ml.so.1")
found = {}
for name in ["", *json.loads(sys.argv[1])]:
    for code in json.loads(sys.argv[2]):
        for card in (-1, 1):
            fake.fake_fail(name.encode(), code, card)
            known, by_uuid = read_gpus(), read_gpus(["GPU-1", "GPU-0"])
            found[f"{name} {code} {card}"] = [
                driver_version(), [each.index for each in known], [each.index for each in by_uuid],
                [each.temperature_celsius for each in known],
            ]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What is read by function that fails, its error, and the card that it fails for (-1: both)."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True)
    codes = json.dumps([GPU_IS_LOST, NOT_SUPPORTED, UNKNOWN])
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(FUNCTIONS), codes], capture_output=True, text=True, check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


def test_both_cards_are_read_while_nothing_fails(answers: dict[str, list[Any]]) -> None:
    assert answers[f" {UNKNOWN} -1"] == ["600.00", [0, 1], [1, 0], [60, 60]]


def test_a_card_that_is_lost_leaves_the_other(answers: dict[str, list[Any]]) -> None:
    for function in ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetIndex"):
        assert answers[f"{function} {GPU_IS_LOST} 1"][1] == [0]
        assert answers[f"{function} {GPU_IS_LOST} -1"][1] == []
    assert answers[f"nvmlDeviceGetHandleByUUID {GPU_IS_LOST} 1"][2] == [0]


def test_a_figure_that_the_driver_does_not_give_is_left_out(answers: dict[str, list[Any]]) -> None:
    assert answers[f"nvmlDeviceGetTemperature {NOT_SUPPORTED} 1"][3] == [60, None]
    assert answers[f"nvmlSystemGetDriverVersion {UNKNOWN} -1"][0] is None
    assert answers[f"nvmlDeviceGetCount_v2 {UNKNOWN} -1"][1] == []
