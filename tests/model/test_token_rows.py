"""Tokens of `model.add_tokens`: their rows are trained beside a frozen base, saved, merged, and opened again by peft
and transformers; what peft computes from them is what the engine computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.architecture.lookup import find_architecture
from engine.budget.predict.prediction import predict
from engine.config.schema.run import RunSpec
from engine.errors import UsageError
from engine.extras.handover.merge import merge
from engine.extras.simulate.step import simulate_step
from engine.model.tokenizer import load_tokenizer
from engine.model.trained import embedding_rows
from tests.budget.metered_step import GEMMA3, GPT2, LLAMA, QWEN2, folder_of, loaded_step, measured_step, run_spec
from tests.train.run_helpers import make_spec, new_run, train

MARKS = ["<|im_start|>", "<|im_end|>"]
CHATML: dict[str, Any] = {"chat_template": "chatml", "add_tokens": MARKS}
TIGHT = {"vocab_size": 264}
"""No spare row: the byte tokenizer has as many tokens."""


def cell(config: dict[str, Any], folder: Path, *, model: dict[str, Any] | None = None, **tables: Any) -> RunSpec:
    return run_spec(
        folder_of(config, folder), model={"add_tokens": MARKS, "dtype": "float32", **(model or {})},
        method=tables.pop("method", {"rank": 4}), **tables,
    )  # fmt: skip


@pytest.mark.parametrize("loss", ["plain", "chunked"])
@pytest.mark.parametrize("config", [QWEN2, {**LLAMA, **TIGHT}, {**GEMMA3, **TIGHT}], ids=["tied", "grown", "scaled"])
def test_loss_and_gradients_are_those_of_pefts_own_forward(config: dict[str, Any], loss: str, tmp_path: Path) -> None:
    with loaded_step(cell(config, tmp_path, train={"loss": loss})) as step:
        loaded = step.loaded
        rows = {name: each for name, each in loaded.trainable() if "trainable_tokens_delta" in name}
        assert len(rows) == (1 if config is QWEN2 or config["model_type"] == "gemma3_text" else 2)
        with torch.no_grad():
            for each in rows.values():
                each += torch.randn_like(each) / 10
        batch = step.batch(2, 24)
        batch.input_ids_BS[:, ::5] = batch.labels_BS[:, ::5] = loaded.tokenizer.convert_tokens_to_ids(MARKS[1])
        found = {}
        for side in ("ours", "peft"):
            loaded.model.zero_grad(set_to_none=True)
            if side == "peft":
                for module in loaded.model.modules():
                    if hasattr(module, "trained_ids_K"):
                        del module.__dict__["forward"], module._buffers["trained_ids_K"]
            total = step.loss(batch)
            total.backward()
            found[side] = [total.detach(), *(parameter.grad for _, parameter in loaded.trainable())]
        assert all(each is not None and each.abs().sum() > 0 for each in found["peft"][:1])
        for ours, pefts in zip(found["ours"], found["peft"], strict=True):
            torch.testing.assert_close(ours, pefts, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("loss", "checkpointing"), [("plain", True), ("chunked", False)])
@pytest.mark.parametrize(
    "config", [{**LLAMA, **TIGHT}, {**QWEN2, **TIGHT}, {**GPT2, **TIGHT}], ids=["llama", "qwen2", "gpt2"]
)
def test_the_memory_is_planned(config: dict[str, Any], loss: str, checkpointing: bool, tmp_path: Path) -> None:
    train = {"loss": loss, "gradient_checkpointing": checkpointing, "batch_size": 4}
    spec = cell(config, tmp_path, model={"dtype": "bfloat16"}, train=train)
    arch = find_architecture(spec)
    assert arch.vocab == 272
    assert -0.005 <= predict(arch, spec, rows=2, length=200).peak_bytes / measured_step(spec, 2, 200, 2)[1] - 1 <= 0.01


@pytest.mark.parametrize("config", [LLAMA, {**QWEN2, **TIGHT}], ids=["untied", "tied"])
def test_a_simulated_step_has_the_rows(config: dict[str, Any], tmp_path: Path) -> None:
    spec = cell(config, tmp_path, train={"batch_size": 4})
    found, arch = simulate_step(spec, rows=2, length=100), find_architecture(spec)
    assert -0.005 <= predict(arch, spec, rows=2, length=100).peak_bytes / found.peak_bytes - 1 <= 0.01


def test_spare_rows_are_used_before_the_embedding_grows(tmp_path: Path) -> None:
    spec = cell(LLAMA, tmp_path)
    assert find_architecture(spec).vocab == 600
    with loaded_step(spec) as step:
        assert embedding_rows(step.loaded.base) == 600 == step.loss.head.vocabulary
        learning = {name for name, _ in step.loaded.trainable() if "lora_" not in name}
        assert learning == {
            f"{part}.token_adapter.trainable_tokens_delta" for part in ("model.embed_tokens", "lm_head")
        }


CAPITALS = {"the capital of France?": "Paris", "the capital of Japan?": "Tokyo", "the capital of Peru?": "Lima"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "capitals.jsonl"
    file.write_text("".join(json.dumps({"prompt": ask, "completion": say}) + "\n" for ask, say in CAPITALS.items()))
    return file


def trained(rows: Path, folder: Path, **tables: Any) -> Any:
    spec = make_spec(
        rows,
        data={"sources": [{"name": "main", "path": str(rows)}], "max_length": 96},
        **{"train": {"max_steps": 3, "batch_size": 3, "learning_rate": 3e-3}, **tables},
    )
    place = new_run(folder / "runs", spec)
    code, events = train(place)
    assert code == 0, events[-1]
    return place


def logits_of(model: Any, tokenizer: Any) -> torch.Tensor:
    asked = [{"role": "user", "content": "the capital of France?"}]
    text = str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
    ids_BS = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        return torch.as_tensor(model.eval()(ids_BS).logits).float()


def test_an_adapter_holds_the_rows_and_opens_and_merges_with_them(rows: Path, tmp_path: Path) -> None:
    place = trained(rows, tmp_path, model=CHATML, method={"kind": "lora", "rank": 4})
    tokenizer: Any = AutoTokenizer.from_pretrained(place.adapter)
    ids = tokenizer.convert_tokens_to_ids(MARKS)
    assert ids == [264, 265] and tokenizer.encode("<|im_start|>", add_special_tokens=False) == ids[:1]
    assert "<|im_start|>" in tokenizer.chat_template
    assert 265 in json.loads((place.adapter / "generation_config.json").read_text())["eos_token_id"]
    saved = json.loads((place.adapter / "adapter_config.json").read_text())
    assert list(saved["trainable_token_indices"].values()) == [ids]  # builtin:tiny's head is tied

    base: Any = AutoModelForCausalLM.from_pretrained(place.adapter / "base")
    opened: Any = PeftModel.from_pretrained(base, str(place.adapter))
    expected = logits_of(opened, tokenizer)
    assert expected.shape[-1] == 272
    merge(place.adapter, tmp_path / "merged", lambda _: None)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged, AutoTokenizer.from_pretrained(tmp_path / "merged")), expected)
    fresh: Any = AutoModelForCausalLM.from_pretrained(place.adapter / "base")
    assert not torch.equal(merged.get_input_embeddings().weight[ids], fresh.get_input_embeddings().weight[ids])


def test_an_adapter_on_a_published_base_is_opened_by_pefts_auto_class(rows: Path, tmp_path: Path) -> None:
    """Its base has too few rows: peft's auto class resizes it to the tokenizer beside the adapter, as merging does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**{**{k: v for k, v in LLAMA.items() if k != "model_type"}, **TIGHT})).save_pretrained(
        tmp_path / "base"
    )
    model = {**CHATML, "id": str(tmp_path / "base"), "init": "pretrained"}
    place = trained(rows, tmp_path, model=model, method={"kind": "lora", "rank": 4})
    config = json.loads((place.adapter / "adapter_config.json").read_text())
    assert set(config["trainable_token_indices"]) == {"model.embed_tokens", "lm_head"}
    (place.adapter / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(tmp_path / "base")})
    )
    opened: Any = AutoPeftModelForCausalLM.from_pretrained(str(place.adapter))
    tokenizer: Any = AutoTokenizer.from_pretrained(place.adapter)
    merge(place.adapter, tmp_path / "merged", lambda _: None)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = logits_of(opened, tokenizer)
    torch.testing.assert_close(logits_of(merged, tokenizer)[..., : expected.shape[-1]], expected)

    again = trained(rows, tmp_path, model={"id": f"run:{place.path}", "init": "pretrained"}, method={"kind": "lora"})
    tokens = AutoTokenizer.from_pretrained(again.adapter).convert_tokens_to_ids(MARKS)
    assert tokens == [264, 265]


def test_a_full_model_grows_and_learns_its_new_tokens(rows: Path, tmp_path: Path) -> None:
    place = trained(rows, tmp_path, model=CHATML, train={"max_steps": 60, "batch_size": 3, "learning_rate": 3e-3})
    opened: Any = AutoModelForCausalLM.from_pretrained(place.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(place.model)
    assert opened.config.vocab_size == 272
    said = []
    for question in CAPITALS:
        text = str(tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        ))  # fmt: skip
        ids_BS = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        written = opened.generate(ids_BS, max_new_tokens=12, do_sample=False)[0, ids_BS.shape[1] :]
        assert 265 in written.tolist()
        said.append(tokenizer.decode(written, skip_special_tokens=True))
    assert said == list(CAPITALS.values())


def test_a_named_template_without_its_tokens_says_how_they_are_added() -> None:
    spec = run_spec(model={"chat_template": "chatml"})
    with pytest.raises(UsageError) as caught:
        load_tokenizer(spec.recipe.model)
    assert """--set 'model.add_tokens=["<|im_start|>", "<|im_end|>"]'""" in caught.value.render()


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"kind": "full", "train_only": ["**.mlp"]}, "embed_tokens is frozen"),
        ({"rank": 4, "also_train": ["lm_head"]}, "only part of the added tokens"),
    ],
)
def test_rows_that_would_not_be_trained_are_refused(method: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said), loaded_step(cell(LLAMA, tmp_path, method=method)):
        pass
