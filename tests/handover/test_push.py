"""A finished run on a hub that runs on this machine: what arrives, what does not, and what happens after a break."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from engine.commands.train import finish_run
from engine.commands.wrong_usage import right_command
from engine.config.load import dump_run_spec, load_run_spec
from engine.config.schema.finish import Finish
from engine.errors import UsageError
from engine.extras.handover.card import is_untouched
from engine.extras.handover.hub import Item, collect, require_clean
from engine.journal.directory import RunDirectory
from engine.journal.evaluations import Evaluation, append_evaluation, now
from engine.journal.events import EventTail
from engine.launch.destinations import allow_typed
from tests.cli.conftest import Tunedeck
from tests.cli.conftest import tunedeck as _tunedeck
from tests.cli.outcome import assert_block
from tests.docs.blocks import ROOT
from tests.handover.hub_server import TOKEN, Hub, Repository, metadata_of, serving
from tests.handover.test_prepare import CHAT, write_chat_base
from tests.journal.waiting import until
from tests.train.run_helpers import make_spec, new_run, train, write_samples

tunedeck = _tunedeck
BASE = "owner/small-base"
LARGE = {"adapter_model.safetensors", "tokenizer.json"}
ADAPTER = {*LARGE, "adapter_config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A LoRA run on a base in a folder, with a score of each of four samples."""
    folder = tmp_path_factory.mktemp("push")
    base = write_chat_base(folder / "base")
    spec = make_spec(
        write_samples(folder / "samples.jsonl"),
        model={"id": str(base), "tokenizer": None, "init": "pretrained"},
        method={"kind": "lora", "rank": 3},
        data={"system_prompt": "A secret of the house.", "template_args": {"enable_thinking": False}},
        train={"max_steps": 4, "learning_rate": 0.05},
        checkpoint={"every_steps": 2},
    )
    run = new_run(folder / "runs", spec)
    assert train(run)[0] == 0
    run.kept_scores.mkdir(exist_ok=True)
    for step, values in ((0, [0.0, 0.0, 0.0, 1.0]), (4, [1.0, 1.0, 0.0, 1.0])):
        metrics = {"exact_match": sum(values) / 4}
        scored = Evaluation(time=now(), step=step, metrics=metrics, count=4, data="d", sources=["held"])
        append_evaluation(run, scored, {"exact_match": values})
    return run


@pytest.fixture
def finished(made: RunDirectory, tmp_path: Path) -> RunDirectory:
    run = tmp_path / "runs" / made.name
    shutil.copytree(made.path, run)
    return RunDirectory(run)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        address = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


def name_base(run: RunDirectory) -> None:
    """As if the base came from the hub."""
    config = run.adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": BASE}))


def base_of(run: RunDirectory) -> str:
    from engine.config.load import load_run_spec

    return load_run_spec(run.run_toml, own=True).recipe.model.id


def no_secret_in(repository: Repository, run: RunDirectory) -> None:
    words = [TOKEN, str(Path.home()) + "/", str(run.path), str(run.path.parent), base_of(run), "secret of the house"]
    for name, content in repository.files.items():
        assert [word for word in words if word.encode() in content] == [], name


def test_an_adapter_arrives_private_and_opens_with_peft(
    hub: Hub, finished: RunDirectory, tunedeck: Tunedeck, tmp_path: Path
) -> None:
    for name in ("optimizer.safetensors", "training_args.bin", "samples.jsonl", "engine.log", ".env"):
        (finished.adapter / name).write_text("not for others")
    done = tunedeck("push", "last", "capitals", "--yes", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["url"] == f"{hub.url}/me/capitals" and told["private"] and told["changed"]
    sent = hub.repositories["me/capitals"]
    assert sent.private and set(sent.files) == {*ADAPTER, "README.md"} == set(told["files"])
    assert told["files"]["tokenizer.json"] == len(sent.files["tokenizer.json"])
    assert any("folder on this machine" in note for note in told["notes"])
    no_secret_in(sent, finished)
    arrived = sent.write(tmp_path / "arrived")
    ids = torch.tensor([[5, 6, 7]])
    base = base_of(finished)
    ours, theirs = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)(input_ids=ids).logits
        for folder in (finished.adapter, arrived)
    )
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(arrived).chat_template == CHAT
    code = re.findall(r"```python\n(.*?)```", (arrived / "README.md").read_text(), re.DOTALL)[0]
    exec(code.replace("me/capitals", str(arrived)).replace("PATH OF THE BASE MODEL", base), {})  # the card's own words
    assert GenerationConfig.from_pretrained(arrived).eos_token_id is not None


def test_merged_replaces_the_adapter_and_opens_with_transformers(
    hub: Hub, finished: RunDirectory, tunedeck: Tunedeck, tmp_path: Path
) -> None:
    assert tunedeck("push", "last", "me/it", "--yes").code == 0
    done = tunedeck("push", "last", "me/it", "--merged", "--yes")
    assert "removes  adapter_config.json" in done.out and "removes  adapter_model.safetensors" in done.out, done.err
    sent = hub.repositories["me/it"]
    assert "adapter_config.json" not in sent.files and "model.safetensors" in sent.files
    no_secret_in(sent, finished)
    assert tunedeck("push", "last", "me/it", "--merged", "--yes", "--checkpoint", "2").code == 0
    assert (finished.path / "handover" / "checkpoint-2" / "merged").is_dir() and len(sent.commits) == 4
    assert tunedeck("push", "last", "me/it", "--merged", "--yes").code == 0
    opened = AutoModelForCausalLM.from_pretrained(sent.write(tmp_path / "arrived"))
    ours = AutoModelForCausalLM.from_pretrained(finished.path / "handover" / "merged")
    assert all(torch.equal(one, other) for one, other in zip(opened.parameters(), ours.parameters(), strict=True))


def test_a_run_that_is_done_pushes_by_itself_where_its_user_said_so(
    hub: Hub, finished: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "state"))
    finish = Finish(push="me/it", merge=True)
    spec = load_run_spec(finished.run_toml)
    spec = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"finish": finish})})
    finished.run_toml.write_text(dump_run_spec(spec))
    finish_run(finished.path)
    assert finished.merged.is_dir() and hub.repositories == {}  # a file named the repository
    allow_typed(finish, ["finish.push=me/it"])
    finish_run(finished.path)
    sent = hub.repositories["me/it"]
    assert sent.private and sent.files["model.safetensors"] == (finished.merged / "model.safetensors").read_bytes()
    no_secret_in(sent, finished)
    monkeypatch.delenv("HF_TOKEN")
    finish_run(finished.path)
    last = list(EventTail(finished.events).poll())[-1]
    assert last["kind"] == "warning" and last["code"] == "push" and "no hub token" in last["text"]
    assert last["fix"] == f"tunedeck push {finished.path} me/it --merged --yes"


def test_the_card_says_what_was_trained(hub: Hub, finished: RunDirectory, tunedeck: Tunedeck) -> None:
    hub.repositories[BASE] = Repository(False, card={"license": "apache-2.0"})
    toml = finished.run_toml
    toml.write_text(toml.read_text().replace(f'id = "{base_of(finished)}"', f'id = "{BASE}"'))
    name_base(finished)
    assert tunedeck("push", "last", "me/it", "--yes").code == 0
    text = hub.repositories["me/it"].files["README.md"].decode()
    told = metadata_of(text)
    assert (told["base_model"], told["license"], told["library_name"]) == (BASE, "apache-2.0", "peft")
    assert (told["base_model_relation"], told["pipeline_tag"]) == ("adapter", "text-generation")
    assert told["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.75
    for words in (
        "| exact_match | 0.75 | 0.25 to 1 | 0.25 | held | 4 |",
        "| An answer ends with | `<eos>`, `<|im_end|>` |".replace("|im_end|", "\\|im_end\\|"),
        "`enable_thinking = false`", "enable_thinking=False", f'from_pretrained("{BASE}")',
        "| Data | main: 48 samples,", "LoRA, rank 3, alpha 6, on all-linear", "| transformers | ",
        "| Steps | 4 with 8 sequences each |",
    ):  # fmt: skip
        assert words in text, text
    assert is_untouched(text) and not is_untouched(text.replace("48", "49"))


def test_a_card_that_was_edited_on_the_hub_stays(hub: Hub, finished: RunDirectory, tunedeck: Tunedeck) -> None:
    assert tunedeck("push", "last", "it", "--yes").code == 0
    sent = hub.repositories["me/it"]
    again = tunedeck("push", "last", "it", "--yes")
    assert "is already up to date" in again.out and len(sent.commits) == 2 and "edited" not in again.out
    sent.files["README.md"] += b"Words of the owner.\n"
    assert "README.md was edited in the repository" in tunedeck("push", "last", "it", "--yes", "--checkpoint", "2").out
    assert sent.files["README.md"].endswith(b"Words of the owner.\n")
    weights = finished.checkpoint(2) / "weights" / "adapter_model.safetensors"
    assert sent.files["adapter_model.safetensors"] == weights.read_bytes()


def test_a_killed_push_is_finished_by_the_same_command(
    hub: Hub, finished: RunDirectory, tmp_path: Path, tunedeck: Tunedeck
) -> None:
    weights = (finished.adapter / "adapter_model.safetensors").read_bytes()
    held, release = threading.Event(), threading.Event()

    def hold(content: bytes) -> int:
        if content != weights:
            return 200
        held.set()
        release.wait(60)
        return 500  # the connection is gone: nothing is kept

    hub.before_upload = hold
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN,
    }  # fmt: skip
    command = [sys.executable, "-P", str(ROOT / "tunedeck.py"), "push", str(finished.path), "it", "--yes"]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL) as killed:
        assert held.wait(120)
        other = hashlib.sha256((finished.adapter / "tokenizer.json").read_bytes()).hexdigest()
        until(lambda: other in hub.large)
        killed.send_signal(signal.SIGKILL)
    release.set()
    assert hub.repositories["me/it"].files == {}  # not half of it
    hub.uploads.clear()
    hub.before_upload = lambda content: 200
    done = tunedeck("push", "last", "it", "--yes")
    assert done.code == 0, done.err
    assert hub.uploads == [hashlib.sha256(weights).hexdigest()]
    assert set(hub.repositories["me/it"].files) == {*ADAPTER, "README.md"}


def test_a_refused_upload_says_what_to_do(hub: Hub, finished: RunDirectory, tunedeck: Tunedeck) -> None:
    hub.before_upload = lambda content: 403
    refused = tunedeck("push", "last", "it", "--yes")
    assert refused.code == 6 and "adapter_model.safetensors (" in refused.out
    assert_block(
        refused.err, "no write access to me/it", "fix: log in with a token that has write access: hf auth login"
    )
    assert hub.repositories["me/it"].files == {}


def test_without_token_network_or_name_it_says_what_to_do(
    hub: Hub, finished: RunDirectory, tunedeck: Tunedeck, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunedeck("push", "last", "a/b/c", "--yes").complains(2, "'a/b/c' is not a valid repository name")
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    tunedeck("push", "last", "it", "--yes").complains(
        6, "does not accept the token", "fix: log in with a token that has write access: hf auth login"
    )
    monkeypatch.delenv("HF_TOKEN")
    tunedeck("push", "last", "it", "--yes").complains(6, "no hub token", "or set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    tunedeck("push", "last", "it", "--yes").complains(6, "the hub does not respond", "repeat the command")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    tunedeck("push", "last", "it", "--yes").complains(6, "HF_HUB_OFFLINE is set", "fix: unset HF_HUB_OFFLINE")


def test_it_asks_and_public_is_said_aloud(
    hub: Hub, finished: RunDirectory, tunedeck: Tunedeck, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    tunedeck("push", "last", "it").complains(2, "there is no terminal", "fix: tunedeck push last it --yes")
    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    asked = tunedeck("push", "last", "it")
    assert asked.code == 130 and "send it to me/it? [y/N]" in asked.err and "adapter_model.safetensors (" in asked.out
    assert not hub.repositories
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert tunedeck("push", "last", "it", "--public").code == 0
    assert not hub.repositories["me/it"].private
    tunedeck("push", "last", "it", "--yes").complains(2, "me/it is public", "fix: add --public")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("adapter_config.json", '{"note": "/mnt/disk/base"}', "the path /mnt/disk/base at note"),
        ("generation_config.json", '{"a": {"b": ["C:\\\\Users\\\\me"]}}', "the path C:\\Users\\me at a.b"),
        ("chat_template.jinja", f"say {TOKEN}", "a token of the hub"),
        ("README.md", f"see {Path.home()}/notes", "the path"),
        ("adapter_config.json", '{"note": "trained from /mnt/disk/base, twice"}', "the path /mnt/disk/base at note"),
        ("adapter_config.json", '{"a": [{"b": "see file:///mnt/disk/x"}]}', "the path /mnt/disk/x at a.b"),
        ("config.json", '{"note": "copied from D:\\\\models\\\\x"}', "the path D:\\models\\x at note"),
        ("generation_config.json", '{"note": "(~/models/x)"}', "the path ~/models/x at note"),
        ("tokenizer_config.json", '{"chat_template": "read /etc/passwd"}', "the path /etc/passwd at chat_template"),
        ("config.json", '{"k": "AKIAIOSFODNN7EXAMPLE"}', "a key of AWS"),
        ("config.json", '{"k": "sk-proj-abcdefghijklmnop1234"}', "an API key (sk-)"),
        ("vocab.json", '{"k": "ghp_abcdefghijklmnopqrstuvwx0123456789"}', "a token of GitHub"),
        ("vocab.model", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA", "a private key"),
        ("modeling_x.py", "url = 'https://me:secret@example.com/x'", "a password in an address"),
        ("tokenizer.json", '{"vocab": {"%s": 1}}', "the path"),
    ],
)
def test_a_file_with_what_others_must_not_see_is_not_sent(tmp_path: Path, name: str, text: str, told: str) -> None:
    content = text % tmp_path if name == "tokenizer.json" else text
    with pytest.raises(UsageError, match="nothing was sent") as refused:
        require_clean([Item(name, content.encode())], [tmp_path])
    assert f"{name}: {told}" in refused.value.found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"a": "owner/model", "b": "https://huggingface.co/owner/model/blob", "c": "and/or/not"}'),
        ("tokenizer_config.json", '{"chat_template": "</tool/x> /no/such/path/here \\"/mnt/data/x\\""}'),
        ("config.json", '{"regex": "\\\\s+/\\\\w", "half": "1/2", "date": "2026/11/28"}'),
        ("modeling_x.py", "hf_quantization_config = task_specific_parameters_of_the_model"),
    ],
)
def test_what_is_no_path_and_no_secret_is_sent(tmp_path: Path, name: str, text: str) -> None:
    require_clean([Item(name, text.encode())], [tmp_path])


def test_metadata_of_weights_are_looked_into(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt", "from": "in /mnt/disk/base"})
    with pytest.raises(UsageError, match="the path /mnt/disk/base at from"):
        require_clean([Item("model.safetensors", tmp_path / "model.safetensors")], [])
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(UsageError, match="not a safetensors file"):
        require_clean([Item("model.safetensors", tmp_path / "model.safetensors")], [])


READERS = {
    "push": ["me/it", "--yes"], "merge": [], "handover": ["--vllm"], "chat": ["--prompt", "x"], "eval": [],
    "export": ["--weights", "--out", "x.tunedeck"],
}  # fmt: skip
"""Commands that read a result, with what they need besides the run."""


@pytest.mark.parametrize("command", READERS)
def test_a_link_that_leaves_the_run_is_rejected_by_name(
    hub: Hub, finished: RunDirectory, tunedeck: Tunedeck, tmp_path: Path, command: str
) -> None:
    key = tmp_path / "id_rsa"
    key.write_text("a private key")
    for folder in (finished.adapter, finished.checkpoint(4) / "weights"):
        (folder / "vocab.model").symlink_to(key)
    refused = tunedeck(command, "last", *READERS[command])
    refused.complains(2, "vocab.model links to a path outside the run's folder")
    for folder in (finished.adapter, finished.checkpoint(4) / "weights"):
        (folder / "vocab.model").unlink()
        os.mkfifo(folder / "vocab.model")
    tunedeck(command, "last", *READERS[command]).complains(2, "vocab.model is not a regular file")
    assert hub.repositories == {}


def test_links_inside_the_run_are_sent_as_files(hub: Hub, finished: RunDirectory, tunedeck: Tunedeck) -> None:
    weights = finished.adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.rename(finished.path / "shared.safetensors")
    weights.symlink_to("../shared.safetensors")
    assert tunedeck("push", "last", "it", "--yes").code == 0
    assert hub.repositories["me/it"].files["adapter_model.safetensors"] == content


@pytest.mark.parametrize("place", ["GET /api/whoami-v2", "GET /api/models/me/it", "POST /api/repos/create", "preupload",
                                   "objects/batch", "PUT /large", "/commit/main"])  # fmt: skip
def test_a_hub_that_hangs_ends_the_push(
    hub: Hub, finished: RunDirectory, tunedeck: Tunedeck, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    release = threading.Event()
    for name in ("ANSWER_SECONDS", "COMMIT_SECONDS"):
        monkeypatch.setattr(f"engine.extras.handover.hub.{name}", 0.3)
    monkeypatch.setattr("engine.extras.handover.hub.MOST_TIMEOUTS", 1)
    hub.on_request = lambda request: None if place not in request else (release.wait(), None)[1]
    try:
        ended = tunedeck("push", "last", "it", "--yes")
        assert ended.code == 6
        assert_block(ended.err, "the hub did not respond within 0.3 s", "repeat the command")
        assert all(repository.files == {} for repository in hub.repositories.values())
    finally:
        release.set()


def test_a_push_ends_after_its_limit_in_any_case(
    hub: Hub, finished: RunDirectory, tunedeck: Tunedeck, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr("engine.extras.handover.hub.SENDING_SECONDS", 0.5)
    hub.on_request = lambda request: None if "PUT" not in request else (release.wait(), None)[1]
    try:
        ended = tunedeck("push", "last", "it", "--yes")
        assert ended.code == 6
        assert_block(ended.err, "the upload did not finish within", "repeat the command")
    finally:
        release.set()


def test_words_for_the_same_thing_are_answered_with_push() -> None:
    for given, meant in ((["last", "me/it"], "push last me/it"), (["last"], "push last OWNER/NAME")):
        assert right_command("No such command 'upload'.", ["upload", *given]) == f"tunedeck {meant}"


def test_folders_of_this_machine_are_taken_out_of_configs(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"base_model_name_or_path": str(tmp_path), "_name_or_path": BASE}))
    sent = {item.path: json.loads(item.read()) for item in collect(tmp_path)}
    assert sent["adapter_config.json"] == {"base_model_name_or_path": None, "_name_or_path": BASE}
    assert sent["tokenizer_config.json"] == {"_name_or_path": BASE}
