"""Models whose config nests the language model beside a vision encoder are loaded, trained on text and saved in the
class that their config names: adapters, merged models and full models open on it, with every tensor of the base."""

from __future__ import annotations

import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import AutoPeftModel, PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.type_cell import write_tiny
from benchmarks.type_configs import tiny_config
from engine.architecture import classes
from engine.architecture.classes import why_not_text_alone
from engine.architecture.families import refuse_family
from engine.checks.run import problems_of_run
from engine.errors import UsageError
from engine.extras.handover.merge import merge
from engine.model.attention import attention_by_part
from engine.model.config import auto_class
from engine.model.decoder import hidden_states
from engine.model.head import find_head
from engine.model.loaded import LoadedModel
from engine.model.loss import make_loss
from engine.model.trained import outside_text
from engine.model.verify import verify_logits
from tests.model.samples import batch_of, cpu, disturb, load, logits_of, run_spec
from tests.nested_models import NEEDS_IMAGES, NESTED, write_nested

FIVE = ("qwen3_5", "llama4", "mllama", "mistral3", "qwen3_vl")
"""Those whose results are opened; the others differ from these in names only."""


class Saved(NamedTuple):
    """A base, and what training made of it: an adapter and a full model, both moved at random."""

    base: Path
    adapter: LoadedModel
    full: LoadedModel


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return {family: write_nested(tmp_path_factory.mktemp(family), family) for family in NESTED}


@pytest.fixture(scope="module", params=FIVE)
def saved(request: pytest.FixtureRequest, bases: dict[str, Path]) -> Saved:
    base = bases[request.param]
    (base / "preprocessor_config.json").write_text("{}")
    adapter, full = (load(run_spec(str(base), method={"kind": kind})) for kind in ("lora", "full"))
    for loaded, name in ((adapter, "adapter"), (full, "full")):
        disturb(loaded)
        loaded.save(base / name)
    return Saved(base, adapter, full)


def published(folder: Path) -> Any:
    """The model in a folder as transformers opens it, without the engine; fails if a weight is missing or left over."""
    found: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, report = found
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder's weight file by the names that they have there."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)


def named_class(folder: Path) -> tuple[str, list[str]]:
    config = json.loads((folder / "config.json").read_text())
    return config["model_type"], config["architectures"]


def test_an_adapter_opens_on_the_published_class_with_our_logits(saved: Saved) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        opened = PeftModel.from_pretrained(published(saved.base), saved.base / "adapter")
    ours = logits_of(saved.adapter.model, batch_of())
    torch.testing.assert_close(logits_of(opened, batch_of()), ours, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits_of(published(saved.base), batch_of()), ours, atol=1e-3)


def test_an_adapter_opens_with_the_auto_class_of_peft(saved: Saved) -> None:
    opened = AutoPeftModel.from_pretrained(str(saved.base / "adapter"), dtype=torch.float32)
    assert type(opened.get_base_model()).__name__ in named_class(saved.base)[1]
    ours = logits_of(saved.adapter.model, batch_of())
    torch.testing.assert_close(logits_of(opened, batch_of()), ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["lfm2_vl", "qwen3_vl"])
def test_an_adapter_of_a_published_config_opens_with_the_auto_class_of_peft(tmp_path: Path, kind: str) -> None:
    write_tiny(tiny_config(kind), tmp_path / "base")
    loaded = load(run_spec(str(tmp_path / "base"), method={"kind": "lora"}, dtype="float32"))
    disturb(loaded)
    loaded.save(tmp_path / "adapter")
    opened = AutoPeftModel.from_pretrained(str(tmp_path / "adapter"), dtype=torch.float32)
    ids = torch.arange(7, 19)[None]
    with torch.no_grad():
        ours, theirs = (model.eval()(input_ids=ids).logits for model in (loaded.model, opened))
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_a_merged_model_has_the_class_and_every_tensor_of_its_base(saved: Saved, tmp_path: Path) -> None:
    merge(saved.base / "adapter", tmp_path / "merged", lambda text: None)
    before, after = tensors(saved.base), tensors(tmp_path / "merged")
    assert {name: tensor.shape for name, tensor in after.items()} == {n: tensor.shape for n, tensor in before.items()}
    assert named_class(tmp_path / "merged") == named_class(saved.base)
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()
    ours = logits_of(saved.adapter.model, batch_of())
    torch.testing.assert_close(logits_of(published(tmp_path / "merged"), batch_of()), ours, rtol=1e-4, atol=1e-5)


def test_full_fine_tuning_on_text_saves_the_whole_model_with_its_vision_encoder_as_it_was(saved: Saved) -> None:
    before, after = tensors(saved.base), tensors(saved.base / "full")
    assert {name: tensor.shape for name, tensor in after.items()} == {n: tensor.shape for n, tensor in before.items()}
    assert named_class(saved.base / "full") == named_class(saved.base)
    assert (saved.base / "full" / "preprocessor_config.json").is_file()
    assert torch.equal(logits_of(published(saved.base / "full"), batch_of()), logits_of(saved.full.model, batch_of()))
    kept = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    frozen = sum(not parameter.requires_grad for parameter in saved.full.model.parameters())
    assert len(kept) == frozen > 0


@pytest.mark.parametrize("family", NESTED)
def test_text_alone_trains_what_text_uses_and_nothing_else(bases: dict[str, Path], family: str) -> None:
    """Of Mllama's decoder, text uses no layer of cross-attention."""
    for kind in ("lora", "full"):
        loaded = load(run_spec(str(bases[family]), method={"kind": kind}))
        disturb(loaded)
        make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=5, device=cpu())(
            batch_of()
        ).backward()
        learning = dict(loaded.trainable())
        assert learning and all(each.grad is not None and bool(each.grad.any()) for each in learning.values())
        assert all(each.grad is None for each in loaded.model.parameters() if not each.requires_grad)
        assert not any("vision" in name or "visual" in name or "projector" in name for name in learning)


@pytest.mark.parametrize("family", NESTED)
def test_the_loss_is_computed_from_the_logits_of_the_whole_class(bases: dict[str, Path], family: str) -> None:
    loaded, batch = load(run_spec(str(bases[family]))), batch_of()
    assert type(loaded.base).__name__ in named_class(bases[family])[1]
    verify_logits(loaded, find_head(loaded.base), loaded.device)
    loaded.model.eval()
    with torch.no_grad():
        ours = find_head(loaded.base).logits(hidden_states(loaded, batch))
    seen = batch.attention_mask_BS == 1
    torch.testing.assert_close(ours[seen], logits_of(loaded.model, batch)[seen], rtol=1e-5, atol=1e-6)


def test_a_class_that_needs_images_is_refused_by_a_row_of_text(tmp_path: Path) -> None:
    loaded = load(run_spec(str(write_nested(tmp_path, "idefics", **NEEDS_IMAGES))))
    with pytest.raises(UsageError, match="IdeficsForVisionText2Text cannot run on text alone"):
        verify_logits(loaded, find_head(loaded.base), loaded.device)


def test_a_head_that_changes_logits_in_an_unknown_way_is_refused(bases: dict[str, Path]) -> None:
    loaded = load(run_spec(str(bases["mistral3"])))
    loaded.base.register_forward_hook(lambda module, given, made: made.__setitem__("logits", made.logits.tanh()))
    with pytest.raises(UsageError, match="the logits of mistral3 are not the output of its decoder and head"):
        verify_logits(loaded, find_head(loaded.base), loaded.device)


def test_patterns_reach_into_the_vision_encoder(bases: dict[str, Path]) -> None:
    targets = ["model.visual.blocks.*.attn.qkv", "model.language_model.**.q_proj"]
    adapted = load(run_spec(str(bases["qwen3_vl"]), method={"targets": targets})).coverage.adapted
    assert adapted == {"attn.qkv": 2, "self_attn.q_proj": 2}
    method = {"kind": "full", "train_only": ["model.vision_tower"]}
    learning = dict(load(run_spec(str(bases["internvl"]), method=method)).trainable())
    assert learning and all(name.startswith("model.vision_tower.") for name in learning)


def test_a_nested_config_that_names_a_text_class_stays_a_text_model(bases: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((bases["qwen3_5"] / "config.json").read_text()) | {"architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(run_spec(str(tmp_path), tokenizer="builtin:bytes", init="random"))
    assert type(loaded.base).__name__ == "Qwen3_5ForCausalLM"
    assert not outside_text(loaded.base)


def test_a_config_without_a_class_keeps_the_vision_encoder(bases: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((bases["llama4"] / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(run_spec(str(tmp_path), tokenizer="builtin:bytes", init="random"))
    assert type(loaded.base).__name__ == "Llama4ForConditionalGeneration"


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("blip", "cannot be trained on text alone: it needs pixel_values in every sample"),
        ("idefics", "cannot be trained on text alone: it needs an image in every sample"),
        ("florence2", "is an encoder-decoder"),
        ("clip", "is not a causal language model"),
    ],
)
def test_a_class_that_cannot_learn_from_text_is_refused_by_its_files(
    model_type: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    problems = problems_of_run(run_spec(str(tmp_path), tokenizer="builtin:bytes"))
    assert [words in problem and "choose another model.id" in problem for problem in problems] == [True]


@pytest.mark.parametrize("part", ["timm_wrapper", "gemma3n_vision"])
def test_a_vision_encoder_of_a_package_that_is_missing_is_refused_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(classes, "find_spec", lambda name: None if name == "timm" else find_spec(name))
    config = {"model_type": "gemma3n", "vision_config": {"model_type": part}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = problems_of_run(run_spec(str(tmp_path), tokenizer="builtin:bytes"))
    assert "timm, which is not installed; pip install timm" in problem


def test_check_and_load_refuse_a_model_that_predicts_no_text_in_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    spec = run_spec(str(tmp_path), tokenizer="builtin:bytes")
    with pytest.raises(UsageError) as refusal:
        load(spec)
    assert problems_of_run(spec) == [f"{refusal.value.found}; {refusal.value.fix}"]


@pytest.mark.parametrize("family", NESTED)
def test_the_files_of_a_class_that_takes_text_tell_nothing_against_it(bases: dict[str, Path], family: str) -> None:
    assert problems_of_run(run_spec(str(bases[family]))) == []
    model_type, (name,) = named_class(bases[family])
    assert why_not_text_alone(name, model_type) is None


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"model_type": "chameleon"}, "changes the logits of some tokens after its head"),
        ({"model_type": "modernbert-decoder"}, "computes its logits with a second layer before its head"),
        ({"model_type": "cpmant"}, "lets tokens attend to later ones"),
        ({"model_type": "gemma4_assistant"}, "drafts tokens from the states of another model"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "does not produce text"),
    ],
)
def test_what_gives_no_text_of_one_head_is_refused_by_its_files(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        classes.refuse_class(facts, "owner/name")


def test_logits_cut_by_rows_are_not_taken_for_changed_ones() -> None:
    """xLSTM assigns its logits in slices."""
    assert why_not_text_alone("xLSTMForCausalLM", "xlstm") is None


def test_a_decoder_by_its_class_with_bidirectional_attention_is_refused() -> None:
    with pytest.raises(UsageError, match="use_bidirectional_attention"):
        refuse_family({"model_type": "gemma3_text", "use_bidirectional_attention": True}, run_spec("owner/name").recipe)


def test_an_encoder_without_the_kernel_computes_attention_itself() -> None:
    """Gemma 4 E4B: transformers would refuse the whole model for its audio encoder."""
    small = {"num_hidden_layers": 1, "hidden_size": 64, "layer_types": ["full_attention"], "num_kv_shared_layers": 0}
    config = AutoConfig.for_model("gemma4", text_config=small, audio_config={"num_hidden_layers": 1})
    told = attention_by_part(config, "sdpa")
    with torch.device("meta"):
        model = auto_class(config).from_config(config, attn_implementation=told)
    kernels = {key: getattr(model.config, key)._attn_implementation for key in ("text_config", "audio_config")}
    assert kernels == {"text_config": "sdpa", "audio_config": "eager"}
    assert attention_by_part(config.text_config, "sdpa") == "sdpa"
    with_flash = attention_by_part(config, "flash_attention_2")
    assert isinstance(with_flash, dict) and with_flash["audio_config"] == "eager"
