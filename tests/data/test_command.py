"""`tunedeck data`: its text for a person, and its JSON for a script."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.commands.data import escape, histogram_lines, print_report, report_document
from engine.data.prepare import prepare_data
from engine.errors import UsageError
from tests.data.specs import CHATML, run_spec, tokenizer
from tui.launch.samples import sample_lines

ROOT = Path(__file__).parents[2]
NASTY = [{"prompt": "[bold]a\x1b[31m\n", "completion": "[/]b\u202e"}, {"prompt": "p", "completion": None}]


def test_the_report_marks_what_is_learned_and_escapes_what_the_data_say(
    jsonl: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = run_spec({"sources": [{"name": "a", "path": jsonl(NASTY), "template": "none"}]})
    print_report(prepare_data(spec, tokenizer()), tokenizer(), [0])
    shown = capsys.readouterr().out
    assert "[bold]a\\x1b[31m\\n" in shown
    assert "⟦[/]b\\u202e<eos>⟧" in shown
    assert "\x1b" not in shown
    assert "dropped from a: 1 x completion is missing" in shown


def test_chat_samples_show_special_tokens(jsonl: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}]
    spec = run_spec({"sources": [{"name": "a", "path": jsonl(rows)}]})
    print_report(prepare_data(spec, tokenizer(CHATML)), tokenizer(CHATML), [0])
    shown = capsys.readouterr().out
    assert "<user>assistant\\n" in shown
    assert "⟦yo<end>⟧" in shown


def test_json_is_one_document_with_the_samples_pieces(jsonl: Callable[..., str]) -> None:
    spec = run_spec({"sources": [{"name": "a", "path": jsonl(NASTY), "template": "none"}]})
    document = json.loads(json.dumps(report_document(prepare_data(spec, tokenizer()), tokenizer(), [0])))
    (sample,) = document["samples"]
    assert "".join(piece["text"] for piece in sample["pieces"] if piece["learned"]) == "[/]b\u202e<eos>"
    assert document["sources"][0]["dropped"] == {"completion is missing": 1}
    assert document["parts"][0]["rows"] == 1


def test_a_bar_that_holds_anything_is_seen() -> None:
    lines = histogram_lines([(1, 10, 10_000), (11, 20, 1), (21, 30, 0)], bar="#")
    assert [line.count("#") for line in lines] == [40, 1, 0]


def test_control_characters_become_visible_and_letters_stay() -> None:
    assert escape("née\t\u200b日本") == "née\\t\\u200b日本"


def test_the_command_runs_the_demo_recipe_without_loading_a_model_or_datasets(tmp_path: Path) -> None:
    code = (
        "import sys; from engine.cli import app\n"
        "app(['data', '-r', 'demo', '--show', '1', '--json'], standalone_mode=False)\n"
        "sys.exit(' '.join({'peft', 'datasets', 'pandas'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"][0]["pieces"][1]["learned"] is True


def test_of_a_recipe_with_stages_the_data_of_each_are_shown(jsonl: Callable[..., str], tmp_path: Path) -> None:
    pairs = [
        {"prompt": "a", "chosen": "good", "rejected": "bad"},
        {"prompt": "a", "chosen": "b" * 3000, "rejected": "c"},
    ]
    answers, preferences = jsonl([{"prompt": "a", "completion": "good"}]), jsonl(pairs, "pairs.jsonl")
    recipe = tmp_path / "two.toml"
    recipe.write_text(f"""
model = {{ id = "builtin:tiny", tokenizer = "builtin:bytes", init = "random" }}
method = {{ kind = "full" }}
data = {{ max_length = 64, sources = [{{ name = "answers", path = "{answers}" }}] }}
train = {{ max_steps = 1 }}

[[stages]]
name = "imitate"

[[stages]]
name = "prefer"
from = "imitate"
method = {{ objective = "dpo" }}
data = {{ sources = [{{ name = "pairs", path = "{preferences}" }}] }}
""")

    def call(*words: str) -> str:
        found = CliRunner().invoke(app, ["data", "-r", str(recipe), *words])
        if found.exception is not None:
            raise found.exception
        return found.output

    shown = call()
    assert (
        shown.index("stage imitate") < shown.index("⟦good") < shown.index("stage prefer") < shown.index("rejected of")
    )
    assert "longer than data.max_length (chosen)" in shown and "indexing errors" not in shown
    assert "answers" not in call("--stage", "prefer")
    assert call("--prepare").count("are in the cache") == 2
    report = json.loads(call("--json"))
    lines = [line.plain for line in sample_lines(report, 80, ascii_only=False, letters=True)]
    assert list(report["stages"]) == ["imitate", "prefer"] and lines.index("stage imitate") < lines.index(
        "stage prefer"
    )
    for words, fix in ((("--find", "bad"), "add --stage prefer"), (("--stage", "other"), "leave out --stage")):
        with pytest.raises(UsageError) as refused:
            call(*words)
        assert refused.value.fix == fix


def test_data_of_a_recipe_for_gpus_are_shown_on_any_machine(jsonl: Callable[..., str]) -> None:
    """The shipped recipe with a 4-bit base, which no simulated device has."""
    model = ["--set", "model.id=builtin:tiny", "--set", "model.tokenizer=builtin:bytes"]
    data = ["--set", f"data.sources.main.path={jsonl([{'prompt': 'p', 'completion': 'c'}])}"]
    done = CliRunner().invoke(app, ["data", "-r", "qlora", *model, *data, "--show", "1"])
    assert done.exit_code == 0, done.output
    assert "⟦c" in done.output
