"""What files and config already show to be wrong is refused by every command that could lead to a run, in the same
words, before a run folder exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import make_run, write_profile, write_recipe
from tui.launch.choice import Choice
from tui.launch.evaluate import evaluate_choice

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
OWN_CODE = {**LLAMA, "model_type": "unheard_of", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
LORA = ('kind = "full"', 'kind = "lora"')


class Case(NamedTuple):
    """A recipe that the engine would refuse: words of the refusal, the config of its model (None: no folder), changes
    of the recipe's text and what is added to it; and the words of commands that refuse it for another reason."""

    words: str
    config: dict[str, object] | None = LLAMA
    changes: tuple[tuple[str, str], ...] = ()
    more: str = ""
    words_of: tuple[tuple[str, str], ...] = ()


CASES = {
    "family": Case("is a 't5' model, which is an encoder-decoder", {"model_type": "t5"}),
    "positions": Case("exceeds the 32 positions", {**LLAMA, "max_position_embeddings": 32}),
    "packing": Case(
        "data.packing = true, but mamba carries a state",
        {**LLAMA, "model_type": "mamba"},
        (("max_length = 64", "max_length = 64\npacking = true"),),
    ),
    "pattern": Case("lm_haed", changes=(('kind = "full"', 'kind = "full"\ntrain_only = ["lm_haed"]'),)),
    "feature": Case(
        "train.compile with method.dropout > 0: this version does not support",
        changes=((LORA[0], f"{LORA[1]}\ndropout = 0.1"), ("batch_size = 2", "batch_size = 2\ncompile = true")),
    ),
    "sharing": Case(
        "parallel.sequence = 2, but data.packing = true",
        changes=(
            ('name = "mine"', 'name = "mine"\nprofile = "here"'),
            ("max_length = 64", "max_length = 64\npacking = true"),
        ),
        more="\n[parallel]\nsequence = 2\n",
    ),
    "folder": Case("model does not exist", None),
    "layers": Case("layer_types", {**LLAMA, "sliding_window": 8, "layer_types": ["sliding_attention"]}),
    "stage": Case(
        "exceeds the 256 positions",
        more='\n[[stages]]\nname = "short"\n\n[[stages]]\nname = "long"\ndata = { max_length = 512 }\n',
        words_of=(("launch", "has stages, but slurm starts the ranks of a single stage"),),
    ),
    "reference": Case(
        'preference.reference = "adapter_off" with a continued adapter',
        changes=(LORA,),
        more='\n[[stages]]\nname = "imitate"\n\n[[stages]]\nname = "prefer"\nfrom = "imitate"\n'
        'method = { objective = "dpo" }\npreference = { reference = "adapter_off" }\n',
        words_of=(("launch", "has stages, but slurm starts the ranks of a single stage"),),
    ),
    "point": Case(
        "exceeds the 256 positions",
        more='\n[sweep]\n"data.max_length" = [64, 512]\n',
        words_of=tuple((name, "has a [sweep], which is several runs") for name in ("launch", "console")),
    ),
    "code": Case("needs its own Python code, which does not run by default", OWN_CODE),
}

COMMANDS = {
    "check": ("recipes", "check", "RECIPE"),
    "plan": ("plan", "-p", "PROFILE", "-r", "RECIPE"),
    "advise": ("advise", "-p", "PROFILE", "-r", "RECIPE"),
    "train": ("train", "-p", "PROFILE", "-r", "RECIPE"),
    "queue": ("queue", "add", "-p", "PROFILE", "-r", "RECIPE"),
    "launch": ("launch", "-p", "PROFILE", "-r", "RECIPE", "--slurm"),
}


def write_case(case: Case, folder: Path) -> tuple[Path, Path]:
    """Write the case's model, recipe and profile into a folder; returns the paths of profile and recipe."""
    if case.config is not None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(case.config))
    model = ('id = "builtin:tiny"', f'id = "{folder}/model"')
    recipe = write_recipe(folder, model, *case.changes, more=case.more)
    devices = (("memory_gib = 8.0", "memory_gib = 8.0\ncount = 2"),) if case.more.startswith("\n[parallel]") else ()
    hardware = folder / "profiles" / "hardware"  # where a recipe's key `profile` finds it
    hardware.mkdir(parents=True)
    return write_profile(hardware, *devices), recipe


def said_by(name: str, profile: Path, recipe: Path, tunedeck: Tunedeck) -> str:
    """What a command, or the console, says of the recipe."""
    if name == "console":
        return "\n".join(problem.text for problem in evaluate_choice(Choice(str(profile), str(recipe))).problems)
    places = {"PROFILE": profile, "RECIPE": recipe}
    return tunedeck(*(places.get(word, word) for word in COMMANDS[name])).err


@pytest.mark.parametrize("name", [*COMMANDS, "console"])
@pytest.mark.parametrize("case", CASES)
def test_every_way_to_a_run_refuses_it_before_there_is_a_folder(
    tunedeck: Tunedeck, tmp_path: Path, case: str, name: str
) -> None:
    profile, recipe = write_case(CASES[case], tmp_path)
    words = dict(CASES[case].words_of).get(name, CASES[case].words)
    assert words in said_by(name, profile, recipe, tunedeck)
    assert not (tmp_path / "runs").exists()


def test_a_models_own_code_is_no_problem_of_the_recipe_itself(tunedeck: Tunedeck, tmp_path: Path) -> None:
    _, recipe = write_case(CASES["code"], tmp_path)
    assert tunedeck("recipes", "check", recipe).code == 0


def test_a_resume_is_refused_in_the_same_words_and_leaves_the_run_as_it_was(tunedeck: Tunedeck, tmp_path: Path) -> None:
    run = make_run(tmp_path, write_recipe(tmp_path, ("max_length = 64", "max_length = 64\npacking = true")))
    before = run.run_toml.read_text()
    two = write_profile(tmp_path, ("memory_gib = 8.0", "memory_gib = 8.0\ncount = 2"), name="two")
    outcome = tunedeck("resume", run.path, "-p", two, "--set", "parallel.sequence=2")
    outcome.complains(2, CASES["sharing"].words)
    assert run.run_toml.read_text() == before


def test_a_sweep_whose_last_point_is_refused_leaves_no_run_of_the_others(tunedeck: Tunedeck, tmp_path: Path) -> None:
    more = '\n[[stages]]\nname = "only"\n\n[sweep]\n"data.max_length" = [64, 4096]\n'
    tunedeck("queue", "add", "-p", write_profile(tmp_path), "-r", write_recipe(tmp_path, more=more)).complains(
        2, "4096 exceeds the 2048 positions"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("key", ["sources", "validation"])
def test_the_console_says_of_missing_data_what_a_start_says(tunedeck: Tunedeck, tmp_path: Path, key: str) -> None:
    more = f'\n[[data.{key}]]\nname = "gone"\npath = "gone.jsonl"\n'
    profile, recipe = write_profile(tmp_path), write_recipe(tmp_path, more=more)
    evaluated = evaluate_choice(Choice(str(profile), str(recipe)))
    said = "source gone: " + str(tmp_path / "gone.jsonl") + " does not exist"
    assert said in [problem.text for problem in evaluated.problems]
    assert evaluated.start_refusal("start") and not evaluated.start_refusal("queue")
    tunedeck("train", "-p", profile, "-r", recipe).complains(5, said)


def test_the_adapter_of_a_run_is_no_reference_without_it(tunedeck: Tunedeck, tmp_path: Path) -> None:
    """Only the run that it starts from tells."""
    earlier = make_run(tmp_path, write_recipe(tmp_path, LORA))
    objective = '\n[preference]\nreference = "adapter_off"\n'
    learns = (LORA[0], f'{LORA[1]}\nobjective = "dpo"')
    goes_on = (('id = "builtin:tiny"', f'id = "run:{earlier.path}"'), ('init = "random"', 'init = "pretrained"'))
    recipe = write_recipe(tmp_path, learns, *goes_on, name="on", more=objective)
    words = CASES["reference"].words
    for name in ("check", "plan", "train"):
        assert words in said_by(name, write_profile(tmp_path), recipe, tunedeck)
    write_recipe(tmp_path, learns, name="on", more=objective)
    assert words not in said_by("plan", write_profile(tmp_path), recipe, tunedeck)
