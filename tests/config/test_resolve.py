"""Resolving run specs: finding files, the order in which settings override each other, and writing and reading
run.toml."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from engine.config.check.notes import notes_of, refuse_unsupported
from engine.config.files.document import key_lines
from engine.config.files.find import SHIPPED_FOLDER, find_spec_file, list_spec_files
from engine.config.files.trust import keep_limits
from engine.config.load import dump_run_spec, load_run_spec, load_spec_file, override, resolve
from engine.config.schema.run import Limits
from engine.config.sweep import sweep_points
from engine.errors import SpecError

RECIPE = """schema = 1
kind = "recipe"
name = "{name}"
[model]
id = "{model}"
[data]
[[data.sources]]
name = "qmsum"
path = "qmsum.jsonl"
[[data.sources]]
name = "arxiv.v2"
path = "arxiv.jsonl"
[train]
warmup_ratio = 0.1
seed = 7
"""
PROFILE = 'schema = 1\nkind = "profile"\nname = "{name}"\n[device]\nkind = "cpu"\nmemory_gib = 4.0\n{more}'


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(put(tmp_path / "team" / "mine.toml", RECIPE.format(name="mine", model="Qwen/Qwen2.5-0.5B")))


def problems(*arguments: Any, **keywords: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        resolve(*arguments, **keywords)
    return caught.value.problems


@pytest.mark.parametrize("kind", ["profile", "recipe"])
def test_every_shipped_file_checks_clean(kind: Any) -> None:
    shipped = [located for located in list_spec_files(kind) if located.origin == "shipped"]
    assert {"demo"} < {located.name for located in shipped}
    for located in shipped:
        table = load_spec_file(kind, located)
        assert [getattr(table, "title", ""), getattr(table, "notes", "")].count("") == 0


def test_shipped_recipes_have_no_dropout_and_run_on_their_profiles() -> None:
    for recipe in ("lora", "full", "attention-lora", "qlora"):
        spec = resolve("24gb", recipe).spec
        refuse_unsupported(spec)
        assert spec.recipe.method.dropout == 0.0
    refuse_unsupported(resolve("demo", "demo").spec)


def test_a_name_is_found_in_the_project_before_the_user_before_the_shipped(tmp_path: Path) -> None:
    assert find_spec_file("recipe", "lora").origin == "shipped"
    put(tmp_path / "config/profiles/recipes/lora.toml", "")
    assert find_spec_file("recipe", "lora").origin == "user"
    put(tmp_path / "profiles/recipes/lora.toml", "")
    assert find_spec_file("recipe", "lora").origin == "project"


def test_an_unknown_name_is_answered_with_the_nearest_and_the_known() -> None:
    (problem,) = problems("demo", "lroa")
    assert 'no recipe named "lroa"; did you mean lora?' in problem
    assert "attention-lora" in problem


def test_profile_recipe_and_set_problems_come_together(tmp_path: Path) -> None:
    put(tmp_path / "p.toml", PROFILE.format(name="p", more="count = 0"))
    put(tmp_path / "r.toml", RECIPE.format(name="r", model="a/b") + 'epochs = "x"')
    found = "\n".join(problems("p.toml", "r.toml", ["train.batch_size=no", "train.nonsense=1"]))
    for words in (
        "p.toml:7: device.count",
        "r.toml:16: train.epochs",
        "--set train.batch_size",
        "--set train.nonsense",
    ):
        assert words in found


def test_later_layers_win(tmp_path: Path, recipe: str) -> None:
    put(tmp_path / "p.toml", PROFILE.format(name="p", more="[overrides.train]\nseed = 8\nbatch_size = 4\n"))
    train = resolve("p.toml", recipe, ["train.batch_size=2"]).spec.recipe.train
    assert (train.warmup_ratio, train.seed, train.batch_size) == (0.1, 8, 2)


def test_an_override_that_changes_learning_is_told_and_one_that_does_not_is_not(tmp_path: Path, recipe: str) -> None:
    more = '[overrides.train]\ngradient_checkpointing = false\n[overrides.model]\ndtype = "float16"\n'
    put(tmp_path / "p.toml", PROFILE.format(name="p", more=more))
    (notice,) = resolve("p.toml", recipe).notices
    assert 'model.dtype = "float16" (was "auto")' in notice


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.learning_rate=1e-5", 1e-5),
        ("train.scheduler=linear", "linear"),
        ('train.scheduler="linear"', "linear"),
        ("train.betas=[0.8, 0.9]", [0.8, 0.9]),
        ("train.compile=true", True),
        ("model.id=org/a=b", "org/a=b"),
        ("data.sources.qmsum.enabled=false", False),
        ("data.sources.arxiv.v2.limit=5", 5),
        ('data.sources."arxiv.v2".limit=5', 5),
        ("data.sources.1.limit=5", 5),
        ("train.seed=", 0),
        ("train={seed=3}", 3),
    ],
)
def test_set_takes_toml_or_text_and_addresses_entries_by_name(recipe: str, text: str, expected: object) -> None:
    spec = resolve("demo", recipe, [text]).spec.recipe
    values = [
        spec.train.learning_rate,
        spec.train.scheduler,
        spec.train.betas,
        spec.train.compile,
        spec.model.id,
        spec.data.sources[0].enabled,
        spec.data.sources[1].limit,
        spec.train.seed,
    ]
    plain = resolve("demo", recipe).spec.recipe
    before = [
        plain.train.learning_rate,
        plain.train.scheduler,
        plain.train.betas,
        plain.train.compile,
        plain.model.id,
        plain.data.sources[0].enabled,
        plain.data.sources[1].limit,
        plain.train.seed,
    ]
    assert [new for new, old in zip(values, before, strict=True) if new != old] == [expected]


def test_set_reaches_the_profile_and_takes_the_place_of_an_exclusive_key(recipe: str) -> None:
    spec = resolve("demo", recipe, ["device.memory_gib=2", "train.warmup_steps=3", "data.sources.qmsum.hub=a/b"]).spec
    assert spec.profile.device.memory_gib == 2.0
    assert (spec.recipe.train.warmup_ratio, spec.recipe.train.warmup_steps) == (None, 3)
    assert (spec.recipe.data.sources[0].path, spec.recipe.data.sources[0].hub) == (None, "a/b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.seed", "no '='"),
        ("=3", "is not a key"),
        ("train..seed=3", "is not a key"),
        ("train.seed\nx=3", "is not a key"),
        ("data.sources.qmsun.limit=3", 'no entry named "qmsun"; did you mean qmsum?'),
        ("train.learning_rate=fast", '--set train.learning_rate: "fast" is text'),
        ("train.learning_rate.x=1", "--set train.learning_rate"),
        ("data.sources=x", "--set data.sources"),
        ("data.sources.qmsum=3", "--set data.sources"),
        ("model.id=", "--set model.id: missing"),
        ("name=x", "--name"),
        ("model.trust_remote_code=true", "remote code"),
        ("lora_r=4", "method.rank = 4"),
        ("model.quantize=nf4", "needs a CUDA device"),
        ("model.id=\x1b[31mred", "control character"),
        ("stages.x.train.seed=3", "stages"),
        ("method.exclude.x=3", "--set method.exclude"),
        ("stages=nan", "--set stages: nan"),
    ],
)
def test_a_bad_set_is_refused_and_named(recipe: str, text: str, words: str) -> None:
    found = problems("demo", recipe, [text])
    assert any(words in problem and problem.startswith("--set") for problem in found), found
    assert not any("\x1b" in problem or "\n" in problem for problem in found)


def test_bare_keys_reach_all_stages_and_named_ones_one(tmp_path: Path) -> None:
    stages = '[[stages]]\nname = "a"\ntrain = {seed = 1}\n[[stages]]\nname = "b"\ntrain = {seed = 2, epochs = 3.0}\n'
    put(tmp_path / "s.toml", RECIPE.format(name="s", model="a/b") + stages)
    bare = resolve("demo", "./s.toml", ["train.seed=9"]).spec.recipe
    assert [stage.train["seed"] for stage in bare.stages] + [bare.train.seed] == [9, 9, 9]
    one = resolve("demo", "./s.toml", ["stages.b.train.seed=9"]).spec.recipe
    assert [stage.train["seed"] for stage in one.stages] + [one.train.seed] == [1, 9, 7]


def test_paths_start_from_the_recipes_folder_or_the_working_directory(tmp_path: Path, recipe: str) -> None:
    sets = ["data.sources.arxiv.v2.path=typed.jsonl", "model.chat_template=chat.jinja", "model.adapter=./adapter"]
    spec = resolve("demo", recipe, sets).spec.recipe
    assert [source.path for source in spec.data.sources] == [
        str(tmp_path / "team/qmsum.jsonl"),
        str(tmp_path / "typed.jsonl"),
    ]
    assert (spec.model.chat_template, spec.model.adapter) == (str(tmp_path / "chat.jinja"), str(tmp_path / "adapter"))
    assert spec.model.id == "Qwen/Qwen2.5-0.5B"
    named = resolve("demo", "lora").spec.recipe
    assert named.data.sources[0].path == str(tmp_path / "data/train.jsonl")
    by_path = resolve("demo", str(SHIPPED_FOLDER / "recipes/lora.toml")).spec.recipe
    assert by_path == named


def test_a_model_folder_becomes_absolute_and_built_ins_and_runs_stay(tmp_path: Path) -> None:
    for model, expected in {
        "models/tiny": str(tmp_path / "team/models/tiny"),
        "./later": str(tmp_path / "team/later"),
        "builtin:tiny": "builtin:tiny",
        "run:a@best": "run:a@best",
        "org/name": "org/name",
    }.items():
        (tmp_path / "team/models/tiny").mkdir(parents=True, exist_ok=True)
        path = put(tmp_path / "team/m.toml", RECIPE.format(name="m", model=model))
        assert resolve("demo", str(path)).spec.recipe.model.id == expected
    assert resolve("demo", "demo").spec.recipe.data.sources[0].path == "builtin:dates"


def test_titles_are_made_visible(tmp_path: Path) -> None:
    title = 'title = "a\\u001b[31mb\\u202ec"\n'
    path = put(tmp_path / "t.toml", title + RECIPE.format(name="t", model="a/b"))
    assert resolve("demo", str(path)).spec.recipe.title == "a\\x1b[31mb\\u202ec"


def test_provenance_names_files_hashes_and_versions(recipe: str) -> None:
    provenance = resolve("demo", recipe, ["train.seed=3"]).spec.provenance
    assert (provenance.profile_file, provenance.recipe_file, provenance.set_) == (
        "shipped:demo",
        recipe,
        ["train.seed=3"],
    )
    assert len(provenance.profile_sha256) == len(provenance.recipe_sha256) == 64
    assert provenance.versions["torch"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "\x1b", "x" * 81, "-x"])
def test_a_run_name_that_is_no_folder_name_is_refused(name: str) -> None:
    assert problems("demo", "demo", name=name)[0].startswith("--name")


def test_a_run_spec_survives_being_written_and_read(tmp_path: Path, recipe: str) -> None:
    limits = Limits(max_hours=1.5, on_finish="echo 'a\"b'\n", devices=[2], trust_remote_code=True)
    spec = resolve("demo", recipe, ["data.system_prompt=Zeile\teins\u2028\x1b[0m"], limits=limits).spec
    path = put(tmp_path / "run.toml", dump_run_spec(spec))
    keep_limits(path, path.read_text())
    assert load_run_spec(path, own=True) == spec


@pytest.mark.parametrize(("kind", "rate"), [("lora", 2e-4), ("full", 2e-5)])
def test_the_default_learning_rate_is_the_methods_and_is_recorded(
    tmp_path: Path, recipe: str, kind: str, rate: float
) -> None:
    spec = resolve("demo", recipe, [f"method.kind={kind}"]).spec
    text = dump_run_spec(spec)
    assert f"learning_rate = {tomlkit.item(rate).as_string()}\n" in text
    assert spec.recipe.train.learning_rate == spec.recipe.train.peak_learning_rate == rate
    assert (
        resolve("demo", recipe, [f"method.kind={kind}", "train.learning_rate=0.5"]).spec.recipe.train.learning_rate
        == 0.5
    )
    recorded = put(tmp_path / "run.toml", text.replace(tomlkit.item(rate).as_string(), "0.0002"))
    assert load_run_spec(recorded).recipe.train.learning_rate == 2e-4, "as an earlier version recorded it"


def test_each_point_of_a_sweep_has_the_default_learning_rate_of_its_own_method(recipe: str) -> None:
    spec = resolve("demo", recipe, ['sweep={"method.kind" = ["lora", "full"]}']).spec
    assert [point.recipe.train.learning_rate for point in sweep_points(spec)] == [2e-4, 2e-5]


def test_a_strangers_run_spec_brings_no_limits(tmp_path: Path) -> None:
    spec = resolve("demo", "demo", limits=Limits(trust_remote_code=True, on_finish="rm -rf /")).spec
    assert load_run_spec(put(tmp_path / "run.toml", dump_run_spec(spec))).limits == Limits()


SETS: dict[str, list[Any]] = {
    "train.learning_rate": [1e-5, 3e-4, 1, 0.1 + 0.2],
    "train.eps": [1e-12, 5e-324],
    "train.micro_batch": ['"auto"', 1],
    "train.epochs": [0.5, 1e22],
    "train.betas": ["[0.9, 0.95]"],
    "train.max_steps": [2**53 + 1],
    "method.targets": ['["a.**", "ü"]'],
    "data.system_prompt": ['"a\\\\b\\"c"', '"日本\\n\\ttab"', "'''x'y'''", '"\\u0000\\u007f\\u0085\\r\\n"'],
    'sweep."train.seed"': ["[1, 2]"],
    "backoff.ladder": ['["cut"]', "[]"],
    "generate.temperature": [0.0, 1.7],
    "train.groups": ['[{match = "a", weight_decay = 0.1}, {match = "b", learning_rate = 1.0}]'],
    "data.sources.qmsum.columns": ['{prompt = "q.x", "completion" = "a b"}'],
    "model.chat_template": ['"{{ a }}\\n{% b %}"'],
    "stages": ['[{name = "a", train = {epochs = 1.0}}, {name = "b", from = "a"}]'],
    "trackers.tags": ['["x", "y"]'],
}


@pytest.mark.parametrize("seed", range(60))
def test_any_run_spec_survives_being_written_and_read(tmp_path: Path, recipe: str, seed: int) -> None:
    chance = random.Random(seed)
    keys = chance.sample(sorted(SETS), chance.randint(1, len(SETS)))
    spec = resolve("demo", recipe, [f"{key}={chance.choice(SETS[key])}" for key in keys]).spec
    text = dump_run_spec(spec)
    again = load_run_spec(put(tmp_path / "run.toml", text))
    assert again == spec
    assert dump_run_spec(again) == text


def test_a_broken_run_spec_names_its_lines(tmp_path: Path) -> None:
    text = dump_run_spec(resolve("demo", "demo").spec).replace("seed = 0", 'seed = "0"', 1)
    line = text[: text.index('seed = "0"')].count("\n") + 1
    with pytest.raises(SpecError, match=rf"run\.toml:{line}: recipe\.train\.seed"):
        load_run_spec(put(tmp_path / "run.toml", text))


def test_override_keeps_the_rest_and_adds_to_provenance(recipe: str) -> None:
    spec = resolve("demo", recipe, ["train.batch_size=8"], name="mine").spec
    more = override(spec, ["train.epochs=2"], profile="24gb").spec
    assert (more.name, more.recipe.train.batch_size, more.recipe.train.epochs) == ("mine", 8, 2.0)
    assert (more.profile.name, more.provenance.set_) == ("24gb", ["train.batch_size=8", "train.epochs=2"])
    assert override(spec, []).spec == spec


def test_override_refuses_what_resolve_refuses() -> None:
    spec = resolve("demo", "demo").spec
    with pytest.raises(SpecError, match=r"--set train\.epochs: "):
        override(spec, ["train.epochs=no"])


def test_keys_are_found_on_their_lines_in_every_notation() -> None:
    text = '# c\n"a.b" = """x\n# no\n"""\n[t.u]\nv.w = [ # c\n 1,\n {k = 2}, "]" ]\n'
    text += "[[l]]\nx = {a = {b = 1}}\n[[l]]\n[l.m]\nn = 1\n"
    lines = key_lines(text)
    expected = {
        ("a.b",): 2,
        ("t", "u"): 5,
        ("t", "u", "v", "w"): 6,
        ("t", "u", "v", "w", 0): 7,
        ("t", "u", "v", "w", 1, "k"): 8,
        ("t", "u", "v", "w", 2): 8,
        ("l", 0): 9,
        ("l", 0, "x", "a", "b"): 10,
        ("l", 1): 11,
        ("l", 1, "m", "n"): 13,
    }
    assert {place: lines.get(place) for place in expected} == expected


def test_a_warm_up_longer_than_the_run_is_said_before_the_start() -> None:
    (notice,) = notes_of(resolve("demo", "demo", ["train.max_steps=5"]).spec.recipe)
    assert notice == "train.warmup_steps = 20 is more than the run's 5 steps: the warm-up takes 4"
    assert notes_of(resolve("demo", "demo").spec.recipe) == []


def test_a_key_that_is_set_is_not_swept(recipe: str) -> None:
    swept = ['sweep."train.learning_rate"=[0.001, 0.01]', 'sweep."train.seed"=[1, 2]']
    found = resolve("demo", recipe, [*swept, "train.learning_rate=0.5"])
    assert found.spec.recipe.sweep == {"train.seed": [1, 2]} and found.spec.recipe.train.learning_rate == 0.5
    assert [text for text in found.notices if "swept" in text] == [
        "train.learning_rate is set with --set, so it is not swept"
    ]
    assert resolve("demo", recipe, [*swept, "sweep="]).spec.recipe.sweep == {}


def test_an_empty_table_is_no_value(recipe: str) -> None:
    (problem,) = problems("demo", recipe, ["train={}"])
    assert problem == "--set train: an empty table has no effect; an empty value restores the default: train="
