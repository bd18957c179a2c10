"""Model folders that no run can use are refused by every command in the same words, before there is a run folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.errors import UsageError
from engine.extras.handover.merge import merge
from engine.model.load import load_model
from engine.model.tokenizer import byte_tokenizer
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe
from tests.model.samples import cpu, run_spec
from tui.launch.choice import Choice
from tui.launch.evaluate import evaluate_choice

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
CARD = "---\nlicense: mit\nbase_model:\n- owner/whole-model\n---\n# A model\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in three shards, with its tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size="60KB")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def config_with(**keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


def quantised(method: str) -> Callable[[Path], None]:
    return config_with(quantization_config={"quant_method": method})


def remove(*patterns: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in [path for pattern in patterns for path in folder.glob(pattern)]:
            path.unlink()

    return change


def as_pickle(folder: Path) -> None:
    torch.save({"a": torch.zeros(2)}, folder / "pytorch_model.bin")
    remove("*.safetensors*")(folder)


def only(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        remove("*")(folder)
        for name in names:
            (folder / name).write_bytes(b"GGUF")

    return change


def as_adapter(folder: Path) -> None:
    adapted = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), LoraConfig(target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = "owner/its-base"
    remove("*")(folder)
    adapted.save_pretrained(str(folder))


def cut_off(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])


def without_header(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"")


def sentencepiece_only(folder: Path) -> None:
    remove("tokenizer*", "special*", "*.jinja")(folder)
    (folder / "tokenizer.model").write_bytes(b"a model of sentencepiece")


def consolidated(folder: Path) -> None:
    tensors = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
    remove("*.safetensors*")(folder)
    save_file(tensors, folder / "consolidated.safetensors")


class Case(NamedTuple):
    """What is done to the folder of a whole model, and words of the refusal and of its fix."""

    change: Callable[[Path], None]
    words: str
    fix: str


UNQUANTISED = "set model.id to the unquantised repository that it was made from, owner/whole-model"
AGAIN = "an unfinished download lacks files"

CASES = {
    "gptq": Case(quantised("gptq"), "are stored quantised (gptq), which cannot be trained", UNQUANTISED),
    "awq": Case(quantised("awq"), "are stored quantised (awq)", UNQUANTISED),
    "compressed": Case(quantised("compressed-tensors"), "are stored quantised (compressed-tensors)", UNQUANTISED),
    "bnb": Case(quantised("bitsandbytes"), "are stored quantised (bnb-4bit)", UNQUANTISED),
    "fp8 in full": Case(quantised("fp8"), 'method.kind = "full", but the weights', UNQUANTISED),
    "mxfp4 in full": Case(quantised("mxfp4"), "are stored in MXFP4", UNQUANTISED),
    "pickle": Case(as_pickle, "only pytorch_model.bin in", "save_pretrained"),
    "consolidated": Case(consolidated, "but neither model.safetensors nor model.safetensors.index.json", AGAIN),
    "onnx": Case(only("model.onnx"), "only ONNX files in the model folder", "in transformers format"),
    "gguf": Case(only("model.gguf"), "only GGUF files in the model folder", "in transformers format"),
    "no tokenizer": Case(remove("tokenizer*"), "no tokenizer in", "set model.tokenizer"),
    "settings of a tokenizer": Case(remove("tokenizer.json"), "no tokenizer in", "set model.tokenizer"),
    "missing shard": Case(remove("model-00002*"), "weight files are missing", AGAIN),
    "no index": Case(remove("*.index.json"), "but neither model.safetensors nor", AGAIN),
    "cut off": Case(cut_off, "is truncated: it has", AGAIN),
    "no header": Case(without_header, "is truncated or not a safetensors file", AGAIN),
    "unknown type": Case(
        config_with(model_type="lama"), "'lama', which the installed transformers does not support", "pip install"
    ),
    "adapter": Case(as_adapter, "holds an adapter, not a model", 'model.id = "owner/its-base" and model.adapter = "'),
    "empty": Case(remove("*"), "is empty", "download or export the model into it"),
    "only a tokenizer": Case(remove("config.json", "*.safetensors*"), "no config.json in the model folder", AGAIN),
}

COMMANDS = {
    "check": ("recipes", "check", "RECIPE"),
    "plan": ("plan", "-p", "PROFILE", "-r", "RECIPE"),
    "train": ("train", "-p", "PROFILE", "-r", "RECIPE"),
    "queue": ("queue", "add", "-p", "PROFILE", "-r", "RECIPE"),
}


def said(tunedeck: Tunedeck, folder: Path, *changes: tuple[str, str]) -> Iterator[tuple[str, str, int]]:
    """(who, what is said, exit code) of every command, and of the console."""
    start = '"builtin:tiny"\ntokenizer = "builtin:bytes"\ninit = "random"'
    recipe = write_recipe(folder, (start, f'"{folder / "model"}"'), *changes)
    profile = write_profile(folder)
    for name, words in COMMANDS.items():
        outcome = tunedeck(*({"PROFILE": profile, "RECIPE": recipe}.get(word, word) for word in words))
        yield name, " ".join(outcome.err.split()), outcome.code
    problems = evaluate_choice(Choice(str(profile), str(recipe))).problems
    yield "console", " ".join(problem.text for problem in problems), 2


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_no_run_can_use_is_refused_alike_by_all(
    tunedeck: Tunedeck, tmp_path: Path, model: Path, case: str
) -> None:
    (model / "README.md").write_text(CARD)
    CASES[case].change(model)
    if case == "empty":
        assert not list(model.iterdir())
    for who, words, code in said(tunedeck, tmp_path):
        assert CASES[case].words in words, who
        assert who == "console" or CASES[case].fix in words, who
        assert code == 2, who
    assert not (tmp_path / "runs").exists()


def test_a_whole_folder_is_refused_by_none(tunedeck: Tunedeck, tmp_path: Path, model: Path) -> None:
    found = {who: (words, code) for who, words, code in said(tunedeck, tmp_path) if who not in ("train", "queue")}
    assert found["check"][1] == found["plan"][1] == 0
    assert found["console"][0] == ""


def test_a_config_alone_is_planned_and_not_trained(tunedeck: Tunedeck, tmp_path: Path, model: Path) -> None:
    remove("*.safetensors*")(model)
    found = {who: (words, code) for who, words, code in said(tunedeck, tmp_path)}
    assert found["check"][1] == found["plan"][1] == 0
    for who in ("train", "queue"):
        assert found[who][1] == 2 and "no weights in" in found[who][0] and 'model.init = "random"' in found[who][0]
    assert not (tmp_path / "runs").exists()
    rehearsed = tunedeck("queue", "add", "-p", "here.toml", "-r", "mine.toml", "--set", "model.init=random")
    assert rehearsed.code == 0, rehearsed.err


def test_sentencepiece_alone_needs_what_reads_it(
    tunedeck: Tunedeck, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentencepiece_only(model)
    monkeypatch.setattr("engine.architecture.model_folder.find_spec", lambda name: None)
    for who, words, code in said(tunedeck, tmp_path):
        assert "sentencepiece, which reads it, is not installed" in words, who
        assert code == 2


BLOCK = 32
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1, the format of MXFP4 (OCP Microscaling Formats 1.0, section 5.3.3)."""


def as_fp8(folder: Path) -> dict[str, Tensor]:
    """Store the linear layers in FP8 blocks, as DeepSeek V3 does; returns the values that they then have."""
    values: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored: dict[str, Tensor] = {}
        for name, weight in load_file(file).items():
            if "_proj" not in name:
                stored[name] = weight
                continue
            rows, columns = weight.shape
            blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            stored[name] = (blocks / scales).to(torch.float8_e4m3fn).reshape(rows, columns)
            stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
            values[name] = (stored[name].float().reshape(blocks.shape) * scales).reshape(rows, columns)
        save_file(stored, file, metadata={"format": "pt"})
    remove("*.index.json")(folder)
    names = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    config_with(quantization_config={"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})(folder)
    return values


def as_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Store a tiny gpt-oss with its experts in MXFP4, as published; returns the values that they then have."""
    sizes = {**SIZES, "intermediate_size": 32, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2}
    remove("model*", "config.json")(folder)
    GptOssForCausalLM(GptOssConfig(**sizes)).save_pretrained(folder)
    stored, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith("_proj")]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        digits = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
        exact = torch.tensor(FP4)[digits] * torch.exp2(scales.float() - 127)[..., None]
        values[name] = exact.reshape(experts, outputs, inputs).transpose(1, 2)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantised("mxfp4")(folder)
    return values


@pytest.mark.parametrize("store", [as_fp8, as_mxfp4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_reads_quantised_files_as_the_numbers_they_stand_for(
    model: Path, store: Callable[[Path], dict[str, Tensor]], dtype: str
) -> None:
    values = store(model)
    spec = run_spec(str(model), method={"kind": "lora", "targets": "attention"}, dtype=dtype)
    loaded = load_model(spec, cpu(), byte_tokenizer())
    found = {name.replace(".base_layer", ""): value for name, value in loaded.base.named_parameters()}
    assert len(values) >= 4
    for name, exact in values.items():
        assert found[name].dtype == getattr(torch, dtype)
        assert torch.allclose(found[name].float(), exact, rtol=2**-7, atol=0.0), name
    loss = loaded.model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    loss.backward()
    assert all(parameter.grad is not None for _, parameter in loaded.trainable())


def test_full_fine_tuning_of_quantised_files_is_refused_whatever_was_planned(model: Path) -> None:
    as_mxfp4(model)
    with pytest.raises(UsageError, match="stored in MXFP4"):
        load_model(run_spec(str(model), method={"kind": "full"}), cpu(), byte_tokenizer())


def test_a_run_on_fp8_says_what_is_loaded_and_its_adapter_is_not_merged(
    tunedeck: Tunedeck, tmp_path: Path, model: Path
) -> None:
    as_fp8(model)
    found = {who: (words, code) for who, words, code in said(tunedeck, tmp_path, ('kind = "full"', 'kind = "lora"'))}
    assert found["check"][1] == 0 and "stored in FP8 and loaded dequantised" in found["check"][0]
    assert found["plan"][1] == found["train"][1] == 0
    assert "stored in FP8 and loaded dequantised" in found["plan"][0]
    (adapter,) = (tmp_path / "runs").glob("*/adapter")
    with pytest.raises(UsageError, match="stored quantised"):
        merge(adapter, tmp_path / "merged", lambda text: None)
