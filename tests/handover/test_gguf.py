"""What a converter left out is found when its file is read back, and one that fails is told in its own words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from engine.errors import EnvironmentProblem, UsageError
from engine.extras.handover.gguf import convert, find_converter, problems_of_gguf, read_gguf, require_quantizer
from engine.journal.liveness import identify
from tests.handover.small_converter import gguf
from tests.journal.waiting import until
from tests.model.samples import write_model

Metadata = dict[str, Any]


def write_gguf(path: Path, metadata: Metadata, tensors: dict[str, tuple[int, ...]]) -> Path:
    """A header without weights."""
    path.write_bytes(gguf(metadata, tensors))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(
        tmp_path_factory.mktemp("gguf") / "model", "qwen2", rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    return folder


def header_of(model: Path) -> tuple[Metadata, dict[str, tuple[int, ...]]]:
    """What a right converter writes."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    with safe_open(model / "model.safetensors", framework="pt") as opened:
        tensors = {
            name.replace("model.layers.", "blk."): tuple(opened.get_slice(name).get_shape())
            for name in sorted(opened.keys())
        }
    metadata = {
        "general.architecture": "qwen2", "qwen2.block_count": 2, "qwen2.rope.freq_base": 5e5,
        "tokenizer.ggml.tokens": tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))),
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    return metadata, tensors


def test_a_whole_file_has_no_problems(model: Path, tmp_path: Path) -> None:
    metadata, tensors = header_of(model)
    assert problems_of_gguf(read_gguf(write_gguf(tmp_path / "a.gguf", metadata, tensors)), model) == []


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("qwen2.block_count", 1, "1 layers of 2"),
        ("qwen2.rope.freq_base", 1e4, "rope base 10000.0, not 500000"),
        ("qwen2.rope.freq_base", None, "not set (10000)"),
        ("tokenizer.ggml.tokens", ["a", "b"], "a vocabulary of 2 tokens"),
        ("tokenizer.ggml.eos_token_id", 3, "end token 3, not 257"),
        ("tokenizer.chat_template", None, "the chat template is missing"),
    ],
)
def test_what_a_converter_left_out_is_told(model: Path, tmp_path: Path, key: str, value: Any, told: str) -> None:
    metadata, tensors = header_of(model)
    changed = {name: each for name, each in {**metadata, key: value}.items() if each is not None}
    (problem,) = problems_of_gguf(read_gguf(write_gguf(tmp_path / "a.gguf", changed, tensors)), model)
    assert told in problem


def test_layers_of_multi_token_prediction_are_counted(model: Path, tmp_path: Path) -> None:
    metadata, tensors = header_of(model)
    metadata |= {"qwen2.block_count": 3, "qwen2.nextn_predict_layers": 1}
    tensors["blk.2.nextn.enorm.weight"] = (8,)
    assert problems_of_gguf(read_gguf(write_gguf(tmp_path / "a.gguf", metadata, tensors)), model) == []
    del tensors["blk.2.nextn.enorm.weight"]
    problems = problems_of_gguf(read_gguf(write_gguf(tmp_path / "b.gguf", metadata, tensors)), model)
    assert problems == ["no tensors of blk.2"]


def test_lost_tensors_are_told(model: Path, tmp_path: Path) -> None:
    metadata, tensors = header_of(model)
    tensors.pop("blk.1.mlp.down_proj.weight")
    (problem,) = problems_of_gguf(read_gguf(write_gguf(tmp_path / "a.gguf", metadata, tensors)), model)
    assert "values" in problem


def test_a_file_that_is_cut_off_is_told(model: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "a.gguf", *header_of(model)).read_bytes()
    for cut in (b"", b"GGUX" + whole[4:], whole[: len(whole) // 2], whole[:-3]):
        (tmp_path / "cut.gguf").write_bytes(cut)
        with pytest.raises(EnvironmentProblem, match="truncated or not a GGUF"):
            read_gguf(tmp_path / "cut.gguf")


def test_a_converter_that_fails_leaves_nothing_and_is_quoted(tmp_path: Path) -> None:
    program = tmp_path / "converter"
    program.write_text('#!/bin/sh\necho half > "$3"\necho "Model QwenForCats is not supported" >&2\nexit 1\n')
    program.chmod(0o755)
    with pytest.raises(EnvironmentProblem, match="QwenForCats"):
        convert(find_converter(program), tmp_path, tmp_path / "out.gguf", "f16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converter"]


def test_a_checkout_of_llama_cpp_is_a_converter_and_a_folder_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a converter"):
        find_converter(tmp_path)
    (tmp_path / "convert_hf_to_gguf.py").touch()
    assert find_converter(tmp_path)[1:] == [str(tmp_path / "convert_hf_to_gguf.py")]


def test_types_of_few_bits_need_llama_quantize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    require_quantizer("q8_0")
    with pytest.raises(EnvironmentProblem, match="llama-quantize"):
        require_quantizer("Q4_K_M")
    for name, copied in (("converter", '"$1" "$3"'), ("llama-quantize", '"$1" "$2"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n/bin/cp {copied}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "model").write_text("weights")
    require_quantizer("Q4_K_M")
    convert([str(tmp_path / "converter")], tmp_path / "model", tmp_path / "out.gguf", "Q4_K_M")
    assert (tmp_path / "out.gguf").read_text() == "weights" and not list(tmp_path.glob(".*"))


STARTS_A_SERVER = """
import sys
from pathlib import Path
from engine.extras.handover.consumers import _process

with _process(["sleep", "1000"], Path(sys.argv[1])) as server:
    sys.stdout.write(f"{server.pid}\\n")
    sys.stdout.flush()
    sys.stdin.read()
"""


def test_a_server_ends_with_a_handover_that_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-c", STARTS_A_SERVER, str(tmp_path / "log")]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    ) as handover:
        assert handover.stdout is not None
        server = identify(int(handover.stdout.readline()))
        assert server is not None
        # It becomes the program once it is tied to the handover.
        until(lambda: Path(f"/proc/{server.pid}/cmdline").read_bytes() == b"sleep\x001000\x00")
        handover.send_signal(signal.SIGKILL)
        handover.communicate()
    until(lambda: identify(server.pid) != server)
