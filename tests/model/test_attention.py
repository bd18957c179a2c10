"""Which attention kernel is chosen. Packages are replaced by stand-ins in another process, and the card by an object
with three methods.

transformers checks only once per process which packages are installed, so each set of packages is tested in a process
of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config.attention import flash_kernels

PACKAGES = {
    "flash-attn": ("flash_attn", "2.8.3"),
    "flash-attn-3": ("flash_attn_interface", "3.0.0"),
    "flash-attn-4": ("flash_attn", "4.0.0b36"),
}
"""Distributions by the module that they install; version 2 and version 4 share one."""

CHOOSE = """
import json, sys, torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1  # before transformers looks
from transformers import AutoConfig
from engine.errors import TunedeckError
from engine.model.attention import choose_attention
class Card:
    torch_device, name = torch.device("cuda", 0), "a card"
for asked, family, capability, deterministic in json.loads(sys.argv[1]):
    torch.cuda.get_device_capability = lambda *_: divmod(round(10 * capability), 10)
    config = AutoConfig.for_model(family)
    try:
        found = choose_attention(config, asked, Card(), torch.bfloat16, deterministic=deterministic)
        print(json.dumps({"name": found.name, "notices": found.notices}))
    except TunedeckError as error:
        print(json.dumps({"error": error.render()}))
"""


def install(folder: Path, distribution: str, body: str = "") -> None:
    """Write a look-alike of a distribution: the module with its submodules, and the metadata that names it."""
    module, version = PACKAGES[distribution]
    package = folder / module / "cute" if distribution == "flash-attn-4" else folder / module
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n{body}")
    (folder / module / "__init__.py").touch()
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{module}\n")
    (info / "RECORD").write_text(f"{module}/__init__.py,,\n")


def choose(folder: Path, *questions: tuple[str, str, float], deterministic: bool = False) -> list[dict[str, Any]]:
    """The kernels chosen for (model.attention, family, compute capability), one answer for each question, from a new
    process that finds the stand-ins in `folder`."""
    root = Path(__file__).parents[2]
    asked = json.dumps([(*question, deterministic) for question in questions])
    finished = subprocess.run(
        [sys.executable, "-P", "-c", CHOOSE, asked],
        env={"PYTHONPATH": f"{folder}:{root}", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in finished.stdout.splitlines()]


def test_flash_attn_4_alone_is_not_taken_for_version_2(tmp_path: Path) -> None:
    install(tmp_path, "flash-attn-4")
    on_hopper, on_ampere, named = choose(
        tmp_path, ("auto", "llama", 9.0), ("auto", "llama", 8.0), ("flash_attention_2", "llama", 9.0)
    )
    assert on_hopper == {"name": "flash_attention_4", "notices": []}
    # It has no backward pass for Ampere; what is installed and does not fit the card is no news.
    assert on_ampere == {"name": "sdpa", "notices": []}
    assert "flash-attn, which is not installed" in named["error"]


def test_the_best_of_several_is_chosen_and_any_can_be_named(tmp_path: Path) -> None:
    for distribution in PACKAGES:
        install(tmp_path, distribution)
    on_hopper, on_blackwell, named, with_sinks = choose(
        tmp_path,
        ("auto", "llama", 9.0),
        ("flash", "llama", 10.0),
        ("flash_attention_2", "llama", 9.0),
        ("auto", "gpt_oss", 8.0),
    )
    assert on_hopper["name"] == "flash_attention_3"
    assert on_blackwell["name"] == "flash_attention_4"
    assert named["name"] == "flash_attention_2"
    # transformers would fetch another kernel from the hub in version 2's place.
    assert with_sinks["name"] == "eager"


def test_the_widest_heads_of_a_model_whose_layers_differ_decide(tmp_path: Path) -> None:
    install(tmp_path, "flash-attn", "def flash_attn_varlen_func(q, k, v): pass\n")
    chosen, named = choose(tmp_path, ("auto", "gemma4_text", 8.0), ("flash_attention_2", "gemma4_text", 8.0))
    assert chosen["name"] == "sdpa"
    assert "gemma4_text has 512" in named["error"]


def test_a_package_built_for_another_torch_is_passed_over_and_said(tmp_path: Path) -> None:
    install(tmp_path, "flash-attn", "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEab')")
    chosen, named = choose(tmp_path, ("auto", "llama", 8.0), ("flash_attention_2", "llama", 8.0))
    assert chosen["name"] == "sdpa"
    assert "flash_attention_2 is not used" in chosen["notices"][0] and "undefined symbol" in chosen["notices"][0]
    assert "undefined symbol" in named["error"] and 'model.attention = "auto"' in named["error"]


def test_a_deterministic_run_gets_a_kernel_with_a_deterministic_backward_pass(tmp_path: Path) -> None:
    install(tmp_path, "flash-attn", "def flash_attn_varlen_func(q, k, v): pass\n")
    install(tmp_path, "flash-attn-4", "def flash_attn_varlen_func(q, k, v, deterministic=False): pass\n")
    on_hopper, old, named = choose(
        tmp_path,
        ("auto", "llama", 9.0),
        ("auto", "llama", 12.0),
        ("flash_attention_2", "llama", 8.0),
        deterministic=True,
    )
    assert on_hopper["name"] == "flash_attention_4"
    assert old["name"] == "sdpa" and "no deterministic backward pass here (flash-attn-4)" in old["notices"][0]
    assert "no deterministic backward pass here (flash-attn)" in named["error"]


@pytest.mark.parametrize(
    ("capability", "best"),
    [(7.5, None), (8.6, "flash_attention_2"), (9.0, "flash_attention_3"), (12.0, "flash_attention_4")],
)
def test_each_generation_of_cards_has_its_kernel(capability: float, best: str | None) -> None:
    assert next(iter(flash_kernels(capability)), None) == best
