"""Fixes about prompts, templates, tokenizers and the processes that tokenise: what they say is done, and it helps."""

from __future__ import annotations

import json
import shlex
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from huggingface_hub import constants
from PIL import Image
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.config.schema.data import Data
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import RunSpec
from engine.data import chat_template, template_limits, workers
from engine.data.prompts import PromptTokens
from engine.errors import TunedeckError
from engine.extras.harness.harness import task_options
from engine.model.tokenizer import load_image_processor, load_tokenizer
from tests.budget.metered_step import run_spec
from tests.cli.conftest import Tunedeck
from tests.cli.test_fixes import own_files
from tests.fixes.conftest import Given
from tests.fixes.rows import Row, State, text_of, walk, was_given
from tests.fixes.test_models_and_rows import PLAIN, TURNS
from tests.fixes.test_settings import DATA, MODEL, PLAN, ROWS_PATH, at, model_of, rows_of
from tests.own_processors import write_own
from tests.train.run_helpers import make_spec, new_run, train, write_samples
from tests.vision_models import QWEN_TEMPLATE, make_tokenizer, write_qwen2_vl

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

WALKED = (
    "data/chat_template:_timeout", "data/workers:_in_processes", "data/prompts:ids: ask without /image",
    "data/prompts:ids: ask without that", "data/prompts:ids: use an image", "data/prompts:ids: set model.chat",
    "data/prompts:text", "data/order:__init__", "data/tokenise:prefix", "data/own_processor:of: remove",
    "config/files/trust:_append",
    "extras/harness/harness:task_options", "architecture/lookup:_refused: try again",
)  # fmt: skip
"""The fix texts that the tests below execute."""


def tokenizer_file(name: str, **changes: object) -> State:
    """A state with a tokenizer in the folder `plain`, in one of whose files keys have other values (None: none)."""

    def state(folder: Path) -> None:
        own_files(folder)
        if not (folder / "plain").exists():
            make_tokenizer((), "").save_pretrained(folder / "plain")
        file = folder / "plain" / name
        kept = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))

    return state


def with_end(folder: Path) -> None:
    file = folder / "plain" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": "<eos>"}))


def untemplated(folder: Path) -> None:
    own_files(folder)
    write_qwen2_vl(
        folder / "model", tokenizer=make_tokenizer(("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"), "")
    )


ROWS = {
    "data/tokenise:_end": Row(
        tokenizer_file("tokenizer_config.json", eos_token=None), DATA + PLAIN, DATA + PLAIN, with_end
    ),
    "data/prepare:prepare_sources": Row(
        own_files, "eval builtin:tiny -p mine -r r.toml --set 'evaluate.sources=[{name=\"x\", path=\"data.jsonl\", "
        "enabled=false}]'",
        "eval builtin:tiny -p mine -r r.toml --set 'evaluate.sources=[{name=\"x\", path=\"data.jsonl\"}]'",
    ),
    "data/prompts:__init__": Row(
        untemplated, "chat ./model -p demo --prompt x", "chat ./model --plain -p demo --prompt x"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("key", "row"), ROWS.items(), ids=ROWS)
def test_what_a_fix_says_is_right(key: str, row: Row, tunedeck: Tunedeck, tmp_path: Path, given: Given) -> None:
    walk(key, row, tunedeck, tmp_path, given)


def test_an_epoch_has_samples_once_the_weight_is_raised(tmp_path: Path, given: Given) -> None:
    spec = make_spec(write_samples(tmp_path / "rows.jsonl", count=8), train={"max_steps": 1})
    (source,) = spec.recipe.data.sources
    for weight in (0.01, 1.0):
        data = spec.recipe.data.model_copy(update={"sources": [source.model_copy(update={"weight": weight})]})
        run = new_run(tmp_path / "runs", spec.model_copy(update={"recipe": with_data(spec, data)}))
        assert (train(run)[0] == 0) is (weight == 1.0)
        assert was_given(text_of("data/order:__init__"), given)


def with_data(spec: RunSpec, data: Data) -> Recipe:
    return spec.recipe.model_copy(update={"data": data})


def test_conversations_are_taken_of_a_tokenizer_that_changes_a_text(
    tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of(*[{"messages": TURNS}] * 4)(tmp_path)
    call = PreTrainedTokenizerFast.__call__

    def changing(self: Any, text: Any, *rest: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        """As a tokenizer of a model's own code may do."""
        given = text.upper() if add_special_tokens and isinstance(text, str) else text
        return call(self, given, *rest, add_special_tokens=add_special_tokens, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", changing)
    assert tunedeck(*shlex.split(DATA + at("data.sources.main.template", "none"))).code == 5
    assert was_given(text_of("data/tokenise:prefix"), given), given
    assert tunedeck(*DATA.split(), *ROWS_PATH.split()).code == 0


def test_a_template_that_ends_is_used_instead(
    tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of(*[{"messages": TURNS}] * 4)(tmp_path)
    template_limits._place.process.close()
    for module in (template_limits, chat_template):
        monkeypatch.setattr(module, "RENDER_CPU_SECONDS", 0.05)
    for name, text in (("endless", ENDLESS), ("ends", QWEN_TEMPLATE)):
        (tmp_path / f"{name}.jinja").write_text(text)
    command = (*DATA.split(), *ROWS_PATH.split(), "--set")
    assert tunedeck(*command, "model.chat_template=endless.jinja").code == 5
    assert was_given(text_of("data/chat_template:_timeout"), given), given
    assert tunedeck(*command, "model.chat_template=ends.jinja").code == 0


def test_rows_are_tokenised_in_fewer_processes_after_one_was_killed(
    tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of(*[{"prompt": f"{n} plus 1", "completion": str(n + 1)} for n in range(3000)])(tmp_path)
    in_order = workers._in_order

    def killed(*arguments: Any) -> Any:
        pieces = in_order(*arguments)
        yield next(pieces)
        for child in psutil.Process().children():
            with suppress(psutil.ZombieProcess):
                if "fork_server" not in " ".join(child.cmdline()):  # which other tests start their processes from
                    child.kill()
        yield from pieces

    monkeypatch.setattr(workers, "_in_order", killed)
    command = (*DATA.split(), *ROWS_PATH.split(), "--set")
    assert tunedeck(*command, "data.workers=2").code == 6
    assert was_given(text_of("data/workers:_in_processes"), given), given
    assert tunedeck(*command, "data.workers=0").code == 0


def said(*parts: str | Path) -> list[dict[str, Any]]:
    """One user's message of texts and images."""
    shown = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": str(p)} for p in parts]
    return [{"role": "user", "content": shown}]


def test_prompts_with_images_are_asked_as_the_fixes_say(tmp_path: Path, given: Given) -> None:
    folder = write_qwen2_vl(tmp_path / "model")
    spec = run_spec(str(folder), model={"tokenizer": None, "init": "pretrained"})
    tokenizer = load_tokenizer(spec.recipe.model)
    images = load_image_processor(spec.model_copy(), tokenizer) or _chat_images(spec, tokenizer)
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no picture")
    picture, broken = tmp_path / "a.png", tmp_path / "b.png"

    def tokens(seen: Any = images) -> PromptTokens:
        return PromptTokens("it", tokenizer, spec, plain=False, think=None, images=seen)

    def refused(key: str, asked: PromptTokens, messages: list[dict[str, Any]]) -> None:
        with pytest.raises(TunedeckError):
            asked.ids(messages)
        assert was_given(text_of(key), given), given
        given.clear()

    refused("data/prompts:ids: ask without /image", tokens(None), said(picture, "what?"))
    assert tokens(None).ids([{"role": "user", "content": "what?"}])
    refused("data/prompts:ids: use an image", tokens(), said(broken, "what?"))
    assert tokens().ids(said(picture, "what?"))
    refused("data/prompts:ids: ask without that", tokens(), said(picture, "what is <|image_pad|>?"))
    published, tokenizer.chat_template = tokenizer.chat_template, "{% for m in messages %}<{{ m.role }}>{% endfor %}"
    refused("data/prompts:ids: set model.chat", tokens(), said(picture, "what?"))
    tokenizer.chat_template = published
    assert tokens().ids(said(picture, "what?"))


def _chat_images(spec: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    from engine.model.tokenizer import load_chat_processor

    return load_chat_processor(spec, tokenizer)


SHORT_ONLY = (
    "{% for m in messages %}{% if m.content | length > 4 or loop.length > 1 %}{{ raise_exception('too much') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


def test_what_a_template_refuses_is_asked_without_what_it_refuses(given: Given) -> None:
    """Regression: where there was no system prompt, the fix said to leave it out."""
    tokenizer = make_tokenizer((), SHORT_ONLY)

    def text(messages: list[dict[str, Any]], *, plain: bool = False) -> str:
        return PromptTokens("it", tokenizer, run_spec(), plain=plain, think=None).text(messages)

    asked = {"role": "user", "content": "hi"}
    with pytest.raises(TunedeckError) as caught:
        text([{"role": "system", "content": "be kind"}, asked])
    assert was_given(text_of("data/prompts:text"), given)
    assert caught.value.fix.startswith("leave out the system prompt") and text([asked]) == "hi"
    long = [asked, {"role": "assistant", "content": "yes"}, asked]
    with pytest.raises(TunedeckError) as caught:
        text(long)
    assert caught.value.fix == "use --plain" and text(long, plain=True) == "hi"


@pytest.mark.parametrize("family", ["internvl", "qwen3_vl"])
def test_a_processor_has_its_own_tokenizer_again(family: str, tmp_path: Path, given: Given) -> None:
    """Regression: where the other tokenizer has no token for an image, the fix was to choose another model."""
    folder = write_own(tmp_path / "model", family)
    other = run_spec(str(folder), model={"tokenizer": "builtin:bytes", "init": "pretrained"})
    with pytest.raises(TunedeckError):
        _chat_images(other, load_tokenizer(other.recipe.model))
    assert was_given(text_of("data/own_processor:of: remove"), given), given
    own = run_spec(str(folder), model={"tokenizer": None, "init": "pretrained"})
    assert _chat_images(own, load_tokenizer(own.recipe.model)) is not None


def test_what_is_allowed_is_recorded_in_a_folder_that_can_be_written(
    tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_files(tmp_path)
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "r.toml" / "below"))
    command = shlex.split("queue add -p mine -r r.toml" + at("finish.webhook", "https://127.0.0.1/told"))
    assert tunedeck(*command).code == 6
    assert was_given(text_of("config/files/trust:_append"), given), given
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "folder"))
    assert tunedeck(*command).code == 0


def test_tasks_are_asked_without_a_template_where_there_is_none(given: Given) -> None:
    asked = run_spec().recipe.evaluate
    with pytest.raises(TunedeckError) as caught:
        task_options(asked.model_copy(update={"harness_template": "on"}), has_template=False)
    assert was_given(text_of("extras/harness/harness:task_options"), given)
    value = caught.value.fix.partition("=")[2]
    off = asked.model_copy(update={"harness_template": value})
    assert task_options(off, has_template=False)["apply_chat_template"] is False


class Busy(BaseHTTPRequestHandler):
    """A hub that answers 503 to everything."""

    def do_HEAD(self) -> None:
        self.send_response(503)
        self.end_headers()

    do_GET = do_HEAD


def test_a_folder_is_used_while_the_hub_is_busy(
    tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of()(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client's waits between its tries
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        refused = tunedeck(*shlex.split(PLAN + at("model.id", "owner/name")))
        server.shutdown()
    assert refused.code == 6
    assert was_given(text_of("architecture/lookup:_refused: try again"), given), (given, refused.err)
    assert tunedeck(*shlex.split(PLAN + MODEL)).code == 0
