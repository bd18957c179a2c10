"""Configurations of other tools, written for these tests, as recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli
from typer.testing import CliRunner, Result

from engine.cli import app
from engine.config.check.aliases import KEY_ALIASES
from engine.config.check.no_counterpart import NEUTRAL, WITH_EFFECT, WITHOUT_EFFECT
from engine.errors import SpecError, TunedeckError
from engine.extras.imports.convert import draft_of, recipe_text
from engine.extras.imports.draft import globs_of

AXOLOTL = """\
base_model: org/base
load_in_8bit: false
load_in_4bit: true
adapter: qlora
datasets:
  - path: org/rows
    type: alpaca
    split: train[:10%]
  - path: ./mine/talks.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mapping: {role: from, content: value}
val_set_size: 0.05
sequence_len: 1024
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_target_modules: 'model.layers.[\\d]+.(self_attn|mlp).(q|up)_proj'
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: true
flash_attention: true
warmup_steps: 0.1
wandb_project:
saves_per_epoch: 1
"""
FACTORY = """\
model_name_or_path: org/base
trust_remote_code: true
stage: dpo
do_train: true
finetuning_type: lora
lora_target: q_proj,v_proj
pref_beta: 0.2
pref_loss: sigmoid
dataset: pairs, more
template: llama3
cutoff_len: 4096
max_samples: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 2.0
lr_scheduler_type: cosine
bf16: true
deepspeed: ds/ds_z2_config.json
"""
FACTORY_V1 = """\
model: org/base
peft_config: {name: lora, r: 8, lora_alpha: 16, target_modules: all}
quant_config: {name: bnb, quantization_bit: 4}
dist_config: {name: fsdp2, dcp_path: null}
train_dataset: data/rows.yaml
micro_batch_size: 2
cutoff_len: 512
max_steps: 10
"""
TRL = """\
model_name_or_path: org/base
dataset_name: org/pairs
dataset_train_split: train_prefs
dataset_test_split: test_prefs
eval_strategy: steps
eval_steps: 50
beta: 0.05
loss_type: sigmoid
torch_dtype: bfloat16
learning_rate: 5.0e-7
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
per_device_train_batch_size: 4
num_train_epochs: 1
max_steps: -1
"""
TORCHTUNE = """\
# tune download org/Base-8B --output-dir /tmp/Base-8B
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3.lora_llama3_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 8
  lora_alpha: 16
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/t.model, max_seq_len: null}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/Base-8B/}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: True}
batch_size: 2
gradient_accumulation_steps: 8
optimizer: {_component_: torch.optim.AdamW, fused: True, lr: 3e-4}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
epochs: 1
clip_grad_norm: null
dtype: bf16
device: cuda
"""


SWIFT = """\
model: org/base
tuner_type: lora
dataset: ['org/rows#500', 'data/rows.jsonl']
split_dataset_ratio: 0.01
system: Be brief.
max_length: 1024
lr: 1e-4
lr_warmup_fraction: 0.05
freeze_vit: true
freeze_aligner: false
loss_scale: last_round
padding_free: true
"""
NEMO = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 8, ckpt_every_steps: 100, num_epochs: 2}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: org/base
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, target_modules: '*_proj', dim: 8, alpha: 32}
dataset: {_target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset, path_or_dataset: data/rows.jsonl}
dataloader: {shuffle: false}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5, weight_decay: 0.01}
lr_scheduler: {lr_decay_style: cosine, min_lr: 1.0e-6}
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    info = {"pairs": {"file_name": "pairs.json", "ranking": True}, "more": {"hf_hub_url": "org/more", "ranking": True}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "data/rows.yaml").write_text("rows:\n  path: data/rows.json\n  source: local\n  converter: alpaca\n")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def imported(text: str, *options: str) -> tuple[dict[str, Any], str]:
    """The tables of the recipe, which passes the check, and what the command printed."""
    Path("theirs.yml").write_text(text)
    done = run("recipes", "import", "theirs.yml", *options)
    assert done.exit_code == 0, done.exception
    assert run("recipes", "check", "theirs").exit_code == 0
    return tomli.loads(Path("config/profiles/recipes/theirs.toml").read_text()), done.stdout


def refused(text: str) -> str:
    Path("theirs.yml").write_text(text)
    error = run("recipes", "import", "theirs.yml").exception
    assert isinstance(error, TunedeckError) and error.exit_code == 2
    assert not Path("config/profiles/recipes/theirs.toml").exists()
    return error.render()


def test_axolotl() -> None:
    recipe, said = imported(AXOLOTL, "--devices", "2")
    assert recipe["model"] == {"id": "org/base", "quantize": "nf4", "dtype": "auto", "attention": "auto"}
    assert recipe["method"]["targets"] == [
        f"model.layers.*.{block}.{name}_proj" for block in ("self_attn", "mlp") for name in ("q", "up")
    ]
    assert recipe["data"]["sources"] == [
        {"name": "rows", "hub": "org/rows", "split": "train[:10%]", "format": "alpaca", "template": "alpaca"},
        {"name": "talks.jsonl", "path": "mine/talks.jsonl", "format": "sharegpt"},
    ]
    train = recipe["train"]
    assert (train["batch_size"], train["learning_rate"], train["warmup_ratio"]) == (16, 2e-4, 0.1)
    assert train["optimizer"] == "adamw_8bit" and recipe["data"]["packing"] is True
    assert recipe["checkpoint"]["per_epoch"] == 1 and "checkpoint.per_epoch = 1  (saves_per_epoch)" in said
    assert "keys without a value in that file:\n  wandb_project" in said
    assert said.endswith("next: tunedeck plan -p 24gb -r theirs\n")


def test_llama_factory_with_its_list_of_data_sets() -> None:
    recipe, said = imported(FACTORY)
    assert recipe["method"] == {"objective": "dpo", "kind": "lora", "targets": ["q_proj", "v_proj"], "rank": 8}
    assert recipe["preference"] == {"beta": 0.2, "loss": "dpo"}
    assert recipe["data"]["sources"] == [
        {"name": "pairs", "path": "data/pairs.json", "format": "preference", "limit": 500},
        {"name": "more", "hub": "org/more", "format": "preference", "limit": 500},
    ]
    assert recipe["parallel"] == {"strategy": "sharded", "shard": "gradients"}
    assert recipe["train"]["learning_rate"] == 5e-5 and "train.learning_rate = 5e-05  (LLaMA-Factory's default)" in said
    assert "trust_remote_code  (remote code is allowed only by --trust-remote-code" in said
    assert "add --devices N" in said
    assert "add --devices N" not in imported(FACTORY, "--devices", "1", "--force")[1]


def test_llama_factory_v1() -> None:
    recipe, _ = imported(FACTORY_V1)
    assert recipe["model"] == {"id": "org/base", "quantize": "nf4"}
    assert recipe["method"] == {"kind": "lora", "rank": 8, "alpha": 16, "targets": "all-linear"}
    assert recipe["data"]["sources"] == [{"name": "rows", "path": "data/rows.json", "format": "alpaca"}]
    assert recipe["train"] == {"batch_size": 2, "max_steps": 10, "scheduler": "constant", "learning_rate": 1e-4}


def test_trl() -> None:
    recipe, _ = imported(TRL)
    assert recipe["method"] == {"objective": "dpo", "kind": "full"}
    assert recipe["preference"] == {"beta": 0.05, "loss": "dpo"}
    assert recipe["train"]["min_learning_rate"] == pytest.approx(5e-8)
    assert recipe["data"]["validation"][0]["split"] == "test_prefs"
    assert "max_steps" not in recipe["train"] and recipe["eval"]["every_steps"] == 50


PLAIN_TRL = TRL.replace("loss_type: sigmoid\n", "").replace("precompute_ref_log_probs: true\n", "")


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        (PLAIN_TRL + "output_dir: out/mistral-7b-orpo\n", "orpo"),
        ("# accelerate launch scripts/orpo.py --config FILE\n" + PLAIN_TRL, "orpo"),
        (PLAIN_TRL + "desirable_weight: 0.5\nloss_type: kto\n", "kto"),
        (PLAIN_TRL + "run_name: kto-1\n", "kto"),
        (PLAIN_TRL, None),
        (PLAIN_TRL + "run_name: dpo-after-orpo\n", None),
        (
            AXOLOTL.replace("val_set_size", "rl: kto\nkto_undesirable_weight: 2.0\nval_set_size").replace(
                "true", "false"
            ),
            "kto",
        ),
        (FACTORY.replace("stage: dpo", "stage: kto").replace("pref_loss: sigmoid\n", ""), "kto"),
    ],
)
def test_the_loss_of_preferences_is_told_by_its_keys_or_the_name_of_the_run(text: str, loss: str | None) -> None:
    recipe, said = imported(text)
    assert recipe["method"]["objective"] == "dpo" and recipe["preference"].get("loss") == loss
    assert ("DPO is used" in said) == (loss is None)
    assert {source["format"] for source in recipe["data"]["sources"]} == {"auto" if loss == "kto" else "preference"}


def test_pairs_about_images() -> None:
    info = {"pairs": {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt", "columns": {
        "messages": "conversations", "chosen": "better", "rejected": "rejected", "images": "images"}}}  # fmt: skip
    Path("data/dataset_info.json").write_text(json.dumps(info))
    recipe, _ = imported(FACTORY.replace("pairs, more", "pairs"))
    (source,) = recipe["data"]["sources"]
    assert source["format"] == "image-preference"
    assert source["columns"] == {"prompt": "conversations", "chosen": "better"}
    del info["pairs"]["ranking"]
    info["pairs"]["columns"] = {"messages": "conversations", "kto_tag": "good", "images": "images"}
    Path("data/dataset_info.json").write_text(json.dumps(info))
    labelled = FACTORY.replace("pairs, more", "pairs").replace("stage: dpo", "stage: kto")
    (source,) = imported(labelled.replace("pref_loss: sigmoid\n", ""), "--force")[0]["data"]["sources"]
    assert source["format"] == "image-unpaired-preference"
    assert source["columns"] == {"messages": "conversations", "label": "good"}
    text = AXOLOTL.replace("val_set_size", "rl: dpo\nprocessor_type: AutoProcessor\nval_set_size")
    recipe, _ = imported(text.replace("sample_packing: true", "sample_packing: false"), "--force")
    assert {source["format"] for source in recipe["data"]["sources"]} == {"image-preference"}


def test_torchtune_takes_the_hub_id_of_its_comment() -> None:
    recipe, said = imported(TORCHTUNE)
    assert recipe["model"] == {"id": "org/Base-8B", "dtype": "bfloat16"}
    assert recipe["method"]["targets"] == ["o_proj", "q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    assert recipe["method"]["adapter_dtype"] == "bfloat16"
    (source,) = recipe["data"]["sources"]
    assert (source["hub"], source["format"], source["template"]) == ("yahma/alpaca-cleaned", "alpaca", "alpaca-chat")
    assert recipe["train"] == {
        "batch_size": 16, "optimizer": "adamw", "scheduler": "cosine", "epochs": 1, "learning_rate": 3e-4,
        "warmup_steps": 100, "weight_decay": 0.01, "max_grad_norm": 0.0,
    }  # fmt: skip
    assert recipe["data"]["loss_on"] == "all" and "does not truncate" in said


@pytest.mark.parametrize("text", [AXOLOTL, FACTORY, FACTORY_V1, TRL, TORCHTUNE, SWIFT, NEMO])
def test_every_key_of_the_file_is_accounted_for(text: str) -> None:
    _, said = imported(text)
    keys = [line.partition(":")[0] for line in text.splitlines() if line[0].isalpha()]
    assert keys and [key for key in keys if key not in said] == []


def test_blanks_are_listed_and_the_next_step_is_to_fill_them_in() -> None:
    text = AXOLOTL.replace("org/rows", "/home/someone/rows.jsonl") + "new_feature: 7\n"
    recipe, said = imported(text)
    assert recipe["data"]["sources"][0]["path"] == "data/rows.jsonl"
    listed = said.partition("to fill in:\n")[2]
    assert "is an absolute path" in listed and "new_feature" in listed and "next: fill in" in listed
    head = Path("config/profiles/recipes/theirs.toml").read_text().partition("schema")[0]
    assert "# To fill in: new_feature" in head and "# Left out: tf32" in head


def test_a_value_that_our_key_does_not_take_is_a_blank_unless_the_key_changes_nothing_that_is_trained() -> None:
    _, said = imported(AXOLOTL.replace("lr_scheduler: cosine", "lr_scheduler: rex\nattn_implementation: xformers"))
    assert 'lr_scheduler  ("rex": ' in said.partition("to fill in:")[2]
    assert 'attn_implementation  ("xformers"' in said.partition("left out:")[2].partition("to fill in:")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\n", "do not match a supported tool"),
        ("- 1\n", "no keys with values"),
        ("distributed_type: FSDP\nnum_processes: 2\n", "a launch configuration of Accelerate"),
        (AXOLOTL + "rl: grpo\n", "training on rewards"),
        (AXOLOTL + "qat: {weight_dtype: int4}\n", "quantisation-aware"),
        (AXOLOTL + "seed: 1\nseed: 2\n", "seed occurs twice"),
        (AXOLOTL + "a: !!python/object/apply:os.system ['true']\n", "a tag"),
        (AXOLOTL + "a: &x [1]\nb: [*x, *x]\n", "an alias"),
        (AXOLOTL + "a: " + "[" * 500 + "]" * 500, "nested too deeply"),
        (AXOLOTL + "a: [1\n", "not YAML"),
        (AXOLOTL + "test_datasets: 5\n", "a list is needed"),
        (TRL + "dataset_mixture: {datasets: [5]}\n", "an entry with keys is needed"),
        (TRL + "dataset_mixer: [1]\n", "keys with values are needed"),
        (FACTORY.replace("stage: dpo", "stage: [dpo]"), "a word is needed"),
        (TORCHTUNE.replace("['q_proj', 'v_proj', 'output_proj']", "5"), "a list is needed"),
        (AXOLOTL + "a: 2024-99-99\n", "not YAML"),
        (FACTORY.replace("stage: dpo", "stage: rm"), "training on rewards"),
        (TRL + "num_generations: 8\n", "training on rewards"),
        (AXOLOTL.replace("adapter: qlora", ""), "cannot be trained in full"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    assert words in refused(text)


def test_a_link_is_refused_and_a_second_import_needs_force() -> None:
    imported(AXOLOTL)
    assert "exists" in str(run("recipes", "import", "theirs.yml").exception)
    assert run("recipes", "import", "theirs.yml", "--force").exit_code == 0
    Path("link.yml").symlink_to("theirs.yml")
    assert "symbolic link" in str(run("recipes", "import", "link.yml").exception)


def test_a_list_of_data_sets_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/theirs.yml").write_text(FACTORY + "dataset_dir: ../data\n")
    assert "dataset.pairs" in draft_of(tmp_path / "in/theirs.yml").blanks


def test_what_a_file_says_cannot_break_out_of_the_comments(tmp_path: Path) -> None:
    (tmp_path / "theirs.yml").write_text(AXOLOTL + 'evil: "x\\n[limits]\\ny = 1"\n"odd\\n[limits]": 1\n')
    text = recipe_text(draft_of(tmp_path / "theirs.yml"), "theirs.yml\n[limits]")
    assert "limits" not in tomli.loads(text)


@pytest.mark.parametrize(
    ("pattern", "globs"),
    [
        (r"^model.layers.\d+.(a|b)$", ["model.layers.*.a", "model.layers.*.b"]),
        (r"x.(wrapped.)?(mlp|attn).y", ["x.wrapped.mlp.y", "x.wrapped.attn.y", "x.mlp.y", "x.attn.y"]),
        (r"^model.language_model.*", ["model.language_model"]),
        (r"layers.4[4-9]+.gate", []),
        (r"a{2}", []),
    ],
)
def test_simple_expressions_become_globs(pattern: str, globs: list[str]) -> None:
    assert globs_of(pattern) == globs


def test_a_template_longer_than_a_path_can_be_is_planned() -> None:
    template = "{% for m in messages %}" + "{{ m.content }}" * 300 + "{% endfor %}"
    recipe, _ = imported(TRL + f'chat_template: "{template}"\n')
    assert recipe["model"]["chat_template"] == template
    with pytest.raises(SpecError):
        draft_of(Path("nothing.yml"))


KEPT_OUT = {key: reason for reason, keys in WITHOUT_EFFECT.items() for key in keys.split()}


@pytest.mark.parametrize("line", ["foo: false", "foo: 7", "neftune_noise_alpha: 5", "load_in_8bit: true",
                                  "min_sample_len: 9", "group_by_length: true", "optim_args: x=1",
                                  "added_tokens_overrides: {4: <m>}", "lora_rank_pattern: {q_proj: 4}"])  # fmt: skip
def test_a_key_that_may_change_what_is_trained_is_a_blank(line: str) -> None:
    _, said = imported(AXOLOTL.replace("load_in_8bit: false\n", "") + line + "\n")
    assert f"  {line.partition(':')[0]}  (" in said.partition("to fill in:\n")[2]


def test_the_layers_that_get_adapters_are_kept() -> None:
    recipe, _ = imported(AXOLOTL + "peft_layers_to_transform: [0, 1, 5]\n")
    assert recipe["method"]["layers"] == [0, 1, 5]


def test_special_tokens_other_than_padding_are_kept() -> None:
    recipe, _ = imported(AXOLOTL + "special_tokens: {eos_token: <|im_end|>, bos_token: <s>, pad_token: <pad>}\n")
    assert recipe["model"]["special_tokens"] == {"eos": "<|im_end|>", "bos": "<s>"}
    Path("config/profiles/recipes/theirs.toml").unlink()
    recipe, _ = imported(TRL + "eos_token: <|im_end|>\n")
    assert recipe["model"]["special_tokens"] == {"eos": "<|im_end|>"}


@pytest.mark.parametrize(
    ("keys", "frozen"),
    [
        ("freeze_vision_tower: true\nfreeze_multi_modal_projector: true\n", ["vision", "projector"]),
        ("freeze_vision_tower: false\nfreeze_language_model: true\n", ["projector", "language"]),
    ],
)
def test_frozen_parts_of_a_full_training_keep_their_names(keys: str, frozen: list[str]) -> None:
    Path("data/dataset_info.json").write_text('{"pairs": {"file_name": "pairs.json"}}')
    text = "model_name_or_path: org/vlm\nstage: sft\ndo_train: true\nfinetuning_type: full\ndataset: pairs\n"
    recipe, said = imported(f"{text}template: qwen2_vl\ncutoff_len: 512\nnum_train_epochs: 1\n{keys}")
    assert recipe["method"]["freeze"] == frozen and "freeze" not in said.partition("to fill in:\n")[2]


@pytest.mark.parametrize("line", ["neftune_noise_alpha: 0", "min_sample_len: 2", "special_tokens: {pad_token: </s>}"])
def test_a_value_that_changes_nothing_is_left_out(line: str) -> None:
    _, said = imported(AXOLOTL + line + "\n")
    assert "to fill in" not in said and f"  {line.partition(':')[0]}  (" in said.partition("left out:\n")[2]


def test_no_key_is_both_left_out_and_asked_about() -> None:
    asked = {key for keys in WITH_EFFECT.values() for key in keys.split()}
    assert not asked & KEPT_OUT.keys() and not asked & KEY_ALIASES.keys() and set(NEUTRAL) <= asked


def test_other_tools_defaults_are_written_into_the_recipe() -> None:
    bare = "base_model: org/base\nsequence_len: 512\ndatasets: [{path: a/b, type: completion}]\nlearning_rate: 1e-5\n"
    recipe, _ = imported(bare)
    assert recipe["train"]["warmup_ratio"] == 0.03 and recipe["train"]["batch_size"] == 1
    assert (recipe["train"]["rounding"], recipe["train"]["state_dtype"]) == ("nearest", "bfloat16")
    recipe, _ = imported("model_name_or_path: a/b\ndataset_name: c/d\nlearning_rate: 2e-4\nuse_peft: true\n", "--force")
    assert recipe["method"] == {
        "kind": "lora",
        "targets": ["q_proj", "v_proj"],
        "rank": 16,
        "alpha": 32,
        "dropout": 0.05,
    }
    assert recipe["data"]["loss_on"] == "all" and recipe["data"]["over_length"] == "truncate"
    assert recipe["train"]["batch_size"] == 8
    recipe, _ = imported(
        FACTORY.replace("stage: dpo", "stage: sft").replace("pref_", "#") + "mask_history: true\n", "--force"
    )
    assert recipe["data"]["loss_on"] == "last" and recipe["data"]["over_length"] == "truncate"


def test_a_constant_schedule_of_the_trainer_has_no_warm_up() -> None:
    text = FACTORY.replace("lr_scheduler_type: cosine", "lr_scheduler_type: constant\nwarmup_ratio: 0.1")
    recipe, said = imported(text)
    assert "warmup_ratio" not in recipe["train"] and 'warmup_ratio  (its schedule "constant" has no warm-up' in said


def test_lora_plus_becomes_a_group_of_parameters() -> None:
    recipe, _ = imported(AXOLOTL + "loraplus_lr_ratio: 16\n")
    (group,) = recipe["train"]["groups"]
    assert group == {"match": "**lora_B**", "learning_rate": pytest.approx(3.2e-3)}


def test_a_folder_beside_the_file_is_a_path_and_a_project_turns_its_tracker_on(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    text = "base_model: org/base\nsequence_len: 9\ndatasets: [{path: notes, type: completion}]\nwandb_project: p\n"
    recipe, _ = imported(text + "learning_rate: 1e-5\n")
    assert recipe["data"]["sources"][0]["path"] == "notes"
    assert recipe["trackers"] == {"use": ["wandb"], "project": "p"}


def test_modules_are_named_as_the_model_has_them() -> None:
    text = AXOLOTL.replace("org/base", "google/gemma-3-4b-it").replace(
        "model.layers.[\\d]+.(self_attn|mlp).(q|up)_proj",
        "model.language_model.layers.[\\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
    )
    recipe, said = imported(text)
    assert len(recipe["method"]["targets"]) == 7 and "check: no problem" in said and "plan on 24gb: fits" in said
    assert "these names match nothing in the model" in said
    text = AXOLOTL.replace("org/base", "meta-llama/Llama-3.2-1B") + "lora_modules_to_save: [embed_tokens, lm_head]\n"
    recipe, said = imported(
        text.replace("[\\d]+", "*").replace("(self_attn|mlp).(q|up)_proj", "self_attn.q_proj"), "--force"
    )
    assert recipe["method"]["also_train"] == ["**.embed_tokens", "**.lm_head"] and "check: no problem" in said


def test_the_query_of_preferences_stays_part_of_the_prompt() -> None:
    info = {"pairs": {"file_name": "pairs.json", "ranking": True, "columns": {
        "prompt": "question", "query": "context", "chosen": "chosen", "rejected": "rejected"}}}  # fmt: skip
    Path("data/dataset_info.json").write_text(json.dumps(info))
    recipe, _ = imported(FACTORY.replace("pairs, more", "pairs"))
    assert recipe["data"]["sources"][0]["columns"] == {"instruction": "question", "input": "context"}


def test_swift() -> None:
    recipe, said = imported(SWIFT)
    assert recipe["method"]["rank"] == 8 and recipe["method"]["alpha"] == 32 and recipe["method"]["dropout"] == 0.05
    assert "freeze" not in recipe["method"] and "freeze_vit and freeze_aligner  (the base is frozen" in said
    assert recipe["data"]["sources"][0]["limit"] == 500 and recipe["data"]["sources"][1]["path"] == "data/rows.jsonl"
    assert recipe["data"]["loss_on"] == "last" and recipe["data"]["over_length"] == "drop"
    assert recipe["train"]["batch_size"] == 16 and recipe["train"]["weight_decay"] == 0.1
    assert "dataset.org/rows  (a data set on ModelScope" in said


def test_nemo_automodel() -> None:
    recipe, said = imported(NEMO)
    assert recipe["method"] == {"kind": "lora", "rank": 8, "alpha": 32, "targets": ["*_proj"], "dropout": 0.0}
    assert recipe["train"]["batch_size"] == 64 and recipe["train"]["min_learning_rate"] == 1e-6
    assert recipe["data"]["shuffle"] is False and recipe["data"]["sources"][0]["format"] == "chat"
    assert "to fill in" not in said


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "MODEL=org/base\nCUDA_VISIBLE_DEVICES=0 \\\nswift sft --model $MODEL --tuner_type lora \\\n"
            "  --dataset 'a/b#5' 'c/d' --lora_rank 4 --learning_rate 1e-4\n",
            {"tool": "ms-swift", "id": "org/base", "rank": 4},
        ),
        (
            "accelerate launch trl/scripts/sft.py --model_name_or_path org/base --dataset_name a/b \\\n"
            "  --use_peft --lora_r 4\n",
            {"tool": "TRL", "id": "org/base", "rank": 4},
        ),
        (
            "llamafactory-cli train --stage sft --model_name_or_path org/base --dataset more --lora_rank 4\n",
            {"tool": "LLaMA-Factory", "id": "org/base", "rank": 4},
        ),
    ],
)
def test_command_lines(script: str, expected: dict[str, Any]) -> None:
    Path("theirs.sh").write_text("#!/bin/bash\nset -e\n" + script)
    done = run("recipes", "import", "theirs.sh", "--to", "made.toml")
    assert done.exit_code == 0, done.exception
    recipe = tomli.loads(Path("made.toml").read_text())
    assert done.stdout.startswith(f"{expected['tool']}'s configuration, mapped:")
    assert (recipe["model"]["id"], recipe["method"]["rank"]) == (expected["id"], expected["rank"])


def test_a_script_without_or_with_several_trainings_is_an_error() -> None:
    for text in ("echo hi\n", "swift sft --model a --tuner_type lora\n" * 2):
        Path("theirs.sh").write_text(text)
        error = run("recipes", "import", "theirs.sh").exception
        assert isinstance(error, TunedeckError) and error.exit_code == 2


def test_name_and_to_say_where_the_recipe_is_written() -> None:
    Path("theirs.yml").write_text(AXOLOTL)
    assert run("recipes", "import", "theirs.yml", "--name", "mine").exit_code == 0
    assert Path("config/profiles/recipes/mine.toml").exists()
    assert run("recipes", "import", "theirs.yml", "--to", "there.toml").exit_code == 0
    assert run("recipes", "import", "there.toml", "--name", "copy").exit_code == 0
    assert Path("config/profiles/recipes/copy.toml").read_bytes() == Path("there.toml").read_bytes()
    for wrong in (("--name", "Not OK"), ("--name", "a", "--to", "b.toml")):
        assert isinstance(run("recipes", "import", "theirs.yml", *wrong).exception, TunedeckError)
