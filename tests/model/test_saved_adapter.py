"""Opening saved adapters: every tensor of the files is in the model or named, every weight of the adapter comes from
the files, and training computes what peft computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftConfig
from peft.utils.peft_types import PeftType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.errors import TunedeckError, UsageError
from engine.extras.chat.sources import ChatSource, load_sources
from engine.extras.handover.merge import merge
from engine.journal.summary import summarise
from engine.journal.summary_text import result_rows
from engine.model.saved_adapter import PEFT_ERRORS, try_matrices
from tests.model.samples import batch_of, cpu, disturb, load, logits_of, run_spec, write_model
from tests.model.saved_adapters import WEIGHTS, foreign, lora, opened_by_peft, rewrite
from tests.train.run_helpers import make_spec, new_run, train, write_samples

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bases") / "llama", "llama")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bases") / "qwen2", "qwen2", tie_word_embeddings=True)


def renamed(state: State) -> State:
    longer = ("model.model.layers", "model.model.language_model.layers")
    return {name.replace(*longer): each for name, each in state.items()}


def without_layer(state: State) -> State:
    return {name: each for name, each in state.items() if ".layers.1.self_attn.q_proj" not in name}


def with_more(state: State) -> State:
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
    return {**state, name: torch.ones(4, 32)}


def narrower(state: State) -> State:
    return {name: each[..., :16].contiguous() if ".lora_A." in name else each for name, each in state.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed, 'names begin with "base_model.model.model.language_model" in the files'),
        (without_layer, "2 of the adapter's 8 weights are missing from the files"),
        (with_more, "1 of 9 tensors do not match a layer"),
        (narrower, "do not have the shapes"),
    ],
)
def test_an_adapter_that_does_not_fit_is_an_error_however_it_is_opened(
    tmp_path: Path, llama: Path, change: Callable[[State], State], said: str
) -> None:
    folder = rewrite(foreign(llama, tmp_path / "adapter", lora()), change)
    spec = run_spec(str(llama), adapter=str(folder))

    def chat_beside_another() -> object:
        fits = run_spec(str(llama), adapter=str(foreign(llama, tmp_path / "fits", lora())))
        return load_sources([ChatSource("fits", fits, None), ChatSource("odd", spec, None)], cpu(), lambda text: None)

    ways: list[Callable[[], object]] = [
        lambda: load(spec),
        lambda: load(run_spec(str(folder))),
        lambda: merge(folder, tmp_path / "merged", lambda text: None),
        chat_beside_another,
    ]
    for way in ways:
        with pytest.raises(UsageError) as caught:
            way()
        assert str(folder) in caught.value.found and said in caught.value.found


def test_every_tensor_is_in_the_account(tmp_path: Path, tied: Path) -> None:
    folder = foreign(tied, tmp_path / "adapter", lora(target_modules=["q_proj", "lm_head"]))
    base, account = load(run_spec(str(tied), adapter=str(folder))).accounts
    assert (base.source, base.tensors, base.loaded) == ("base", base.tensors, base.tensors)
    assert (account.source, account.files, account.tensors, account.loaded) == ("adapter", (WEIGHTS,), 7, 6)
    assert list(account.unread) == ["base_model.model.lm_head.base_layer.weight"]


def test_a_grown_vocabulary_is_told_from_another_base(tmp_path: Path, llama: Path) -> None:
    whole = ["embed_tokens", "lm_head"]
    folder = foreign(llama, tmp_path / "adapter", lora(modules_to_save=whole), rows=272)
    with pytest.raises(UsageError, match=r"272, 32.*264, 32.*added to the vocabulary") as caught:
        load(run_spec(str(llama), adapter=str(folder)))
    assert "model.add_tokens" in caught.value.fix


def test_an_adapter_without_safetensors_is_an_error(tmp_path: Path, llama: Path) -> None:
    folder = foreign(llama, tmp_path / "adapter", lora())
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"only adapter_model\.bin"):
        load(run_spec(str(llama), adapter=str(folder)))


OF_TYPE: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10}, "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1, "target_modules": None},
    "C3A": {"block_size": 8}, "FOURIERFT": {"n_frequency": 16}, "WAVEFT": {"n_frequency": 16}, "SHIRA": {"r": 2},
    "ROAD": {"group_size": 8}, "PSOFT": {"r": 8}, "OSF": {"effective_rank": 4}, "ADAMSS": {"r": 8},
    "LILY": {"r": 4, "num_B": 2, "stride_A": 1},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1]},
    "IA3": {"feedforward_modules": []}, "LORA": {}, "OFT": {"r": 0, "oft_block_size": 8},
    "VBLORA": {"vector_length": 8, "num_vectors": 8}, "PREFIX_TUNING": {"num_virtual_tokens": 2},
    "PROMPT_TUNING": {"num_virtual_tokens": 2}, "P_TUNING": {"num_virtual_tokens": 2},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2]},
}  # fmt: skip
"""What the config of a type needs besides the modules it is on."""


def config_of(kind: str) -> PeftConfig:
    """A config of an adapter of this type; pytest.skip where peft cannot make one without more than a model."""
    config_class: Any = peft.PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)]
    for modules in ({"target_modules": ["q_proj", "v_proj"]}, {}):
        try:
            config: PeftConfig = config_class(task_type="CAUSAL_LM", **modules, **OF_TYPE.get(kind, {}))
        except (TypeError, ValueError, ImportError):
            continue
        return config
    return pytest.skip("peft makes this config only with more than a model")


@pytest.mark.parametrize("kind", sorted(kind.value for kind in peft.PEFT_TYPE_TO_CONFIG_MAPPING))
def test_each_type_of_adapter_is_trained_as_peft_computes_it_or_is_an_error(
    tmp_path: Path, llama: Path, kind: str
) -> None:
    try:
        folder = foreign(llama, tmp_path / "adapter", config_of(kind))
    except (*PEFT_ERRORS, AssertionError) as error:
        pytest.skip(f"peft alone cannot make it: {error}")
    try:
        loaded = load(run_spec(str(llama), adapter=str(folder)))
    except TunedeckError as error:
        assert error.exit_code == 2 and error.fix
        return
    theirs, batch = opened_by_peft(llama, folder), batch_of(masked=0)
    given = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS, "labels": batch.labels_BS}
    loaded.model.eval()
    names = {name: each for name, each in loaded.model.named_parameters() if each.requires_grad}
    there = dict(theirs.named_parameters())
    ours = torch.autograd.grad(loaded.base(**given).loss, list(names.values()), allow_unused=True)
    expected = torch.autograd.grad(theirs(**given).loss, [there[name] for name in names], allow_unused=True)
    assert any(gradient is not None and bool(gradient.any()) for gradient in expected)
    for name, mine, gradient in zip(names, ours, expected, strict=True):
        zero = torch.zeros_like(names[name])
        both = (zero if each is None else each for each in (mine, gradient))
        torch.testing.assert_close(*both, rtol=1e-3, atol=1e-6, msg=name)
    loaded.save(tmp_path / "result")
    again = opened_by_peft(llama, tmp_path / "result")
    torch.testing.assert_close(logits_of(again, batch), logits_of(theirs, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [{"alora_invocation_tokens": [5, 6]}, {"lora_bias": True}])
def test_variants_of_lora_that_are_not_trained_are_errors(tmp_path: Path, llama: Path, change: dict[str, Any]) -> None:
    folder = foreign(llama, tmp_path / "adapter", lora(**change))
    with pytest.raises(UsageError, match="cannot be trained here"):
        load(run_spec(str(llama), adapter=str(folder)))


@pytest.mark.parametrize(
    ("change", "keeps_base", "adds_product"),
    [
        ({}, True, True),
        ({"use_rslora": True}, True, True),
        ({"init_lora_weights": "pissa"}, False, False),
        ({"init_lora_weights": "olora"}, False, False),
        ({"init_lora_weights": "gaussian"}, True, True),
        ({"use_dora": True}, True, False),
    ],
)
def test_what_an_adapter_does_to_its_base_is_computed(
    tmp_path: Path, llama: Path, change: dict[str, Any], keeps_base: bool, adds_product: bool
) -> None:
    assert try_matrices(foreign(llama, tmp_path / "adapter", lora(**change))) == (keeps_base, adds_product)


@pytest.mark.parametrize(
    ("change", "tied_head"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, False),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True}, False),
        ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, True),
    ],
)
def test_an_adapter_on_an_end_of_a_tied_base_is_saved_restored_and_merged(
    tmp_path: Path, tied: Path, change: dict[str, Any], tied_head: bool
) -> None:
    folder = foreign(tied, tmp_path / "adapter", lora(**change))
    spec, batch = run_spec(str(tied), adapter=str(folder)), batch_of()
    loaded = load(spec)
    disturb(loaded)
    loaded.save(tmp_path / "result")
    expected = logits_of(loaded.model, batch)
    assert torch.equal(logits_of(opened_by_peft(tied, tmp_path / "result"), batch), expected)
    resumed = load(spec)
    resumed.load_weights(tmp_path / "result")
    assert torch.equal(logits_of(resumed.model, batch), expected)
    merge(tmp_path / "result", tmp_path / "merged", lambda text: None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged, batch), expected, rtol=1e-5, atol=1e-5)
    assert (merged.lm_head.weight is merged.get_input_embeddings().weight) == tied_head


def test_modules_are_added_to_those_that_an_adapter_trains(tmp_path: Path, llama: Path) -> None:
    folder = foreign(llama, tmp_path / "adapter", lora(modules_to_save=["norm"]))
    plain = load(run_spec(str(llama), adapter=str(folder)))
    more = load(run_spec(str(llama), adapter=str(folder), method={"also_train": ["lm_head"]}))
    batch = batch_of()
    assert torch.equal(logits_of(more.model, batch), logits_of(plain.model, batch))
    assert {name for name, _ in more.trainable()} - {name for name, _ in plain.trainable()} == {"lm_head.weight"}
    disturb(more)
    more.save(tmp_path / "result")
    again = opened_by_peft(llama, tmp_path / "result")
    assert torch.equal(logits_of(again, batch), logits_of(more.model, batch))
    with pytest.raises(UsageError, match=r"q_proj, which already has matrices"):
        load(run_spec(str(llama), adapter=str(folder), method={"also_train": ["model.layers.0.self_attn.q_proj"]}))


def test_pissa_is_trained_as_it_is_and_a_chat_has_the_true_base(tmp_path: Path, llama: Path) -> None:
    folder = foreign(llama, tmp_path / "adapter", lora(init_lora_weights="pissa"))
    spec, batch = run_spec(str(llama), adapter=str(folder)), batch_of()
    loaded = load(spec)
    assert loaded.changed_base and not loaded.adapter_is_all
    torch.testing.assert_close(
        logits_of(loaded.model, batch), logits_of(opened_by_peft(llama, folder), batch), rtol=1e-5, atol=1e-5
    )
    sources = [ChatSource("base", spec, None, base=True), ChatSource("it", spec, None)]
    base, it = load_sources(sources, cpu(), lambda text: None)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32), batch)
    with base.active(), it.active():
        torch.testing.assert_close(logits_of(base.loaded.model, batch), expected)
        torch.testing.assert_close(logits_of(it.loaded.model, batch), logits_of(loaded.model, batch))


def test_an_adapter_of_a_chat_that_is_no_run_is_not_taken_for_the_base(tmp_path: Path, llama: Path) -> None:
    folders = [foreign(llama, tmp_path / name, lora(r=rank)) for name, rank in (("one", 4), ("two", 2))]
    specs = [run_spec(str(llama), adapter=str(folder)) for folder in folders]
    models = load_sources([ChatSource(spec.name, spec, None) for spec in specs], cpu(), lambda text: None)
    assert models[0].loaded is models[1].loaded
    batch = batch_of()
    for model, spec in zip(models, specs, strict=True):
        with model.active():
            torch.testing.assert_close(logits_of(model.loaded.model, batch), logits_of(load(spec).model, batch))


def test_the_account_of_a_base_names_what_its_class_does_not_read(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "llama")
    file = base / "model.safetensors"
    state = load_file(file)
    save_file({**state, "mtp.fc.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    (account,) = load(run_spec(str(base))).accounts
    assert (account.source, account.files) == ("base", ("model.safetensors",))
    assert (account.tensors, account.loaded) == (len(state) + 1, len(state))
    assert list(account.unread) == ["mtp.fc.weight"] and len(account.sentences()) == 1


def test_the_journal_and_show_have_the_account_of_base_and_adapter(tmp_path: Path, llama: Path) -> None:
    folder = foreign(llama, tmp_path / "adapter", lora())
    samples = write_samples(tmp_path / "samples.jsonl")
    model = {"id": str(llama), "tokenizer": None, "init": "pretrained", "adapter": str(folder)}
    spec = make_spec(
        samples, model=model, method={"kind": "lora"}, train={"max_steps": 2}, checkpoint={"every_steps": 1}
    )
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    accounts = [(event["source"], event["tensors"], event["loaded"]) for event in events if event["kind"] == "weights"]
    assert code == 0 and accounts == [("base", 21, 21), ("adapter", 8, 8), ("result", 8, 8)]
    shown = dict(result_rows(summarise(place)))
    assert shown["read: adapter"] == "8 of 8 tensors in 1 file" and shown["written: result"] == "8 tensors in 1 file"
