"""[finish] webhook and push: who hears of a run, only where its user said so, and never at the run's expense."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.config.files.trust import state_folder
from engine.config.load import dump_run_spec, load_run_spec, resolve, without_destinations
from engine.config.schema.finish import PUSH, WEBHOOK, Finish
from engine.config.stages import stage_specs
from engine.errors import EnvironmentProblem, SpecError
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.launch import destinations
from engine.launch.create_run import resolve_start
from engine.launch.destinations import (
    ALERTS,
    allow_typed,
    allowed,
    body_for,
    message_of,
    notes_on_destinations,
    webhook_url,
)
from engine.launch.start_options import StartOptions
from tests.train.run_helpers import make_spec, new_run, of_kind, train, write_samples

URL = "https://example.com/secret"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(destinations, "HAND_OVER_SECONDS", 60.0)  # returns at once when the message has arrived


@contextmanager
def listening(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The URL of a server on this machine, and what it has been sent."""
    heard: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/hook?key=secret", heard
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_with(folder: Path, url: str, **tables: Any) -> RunDirectory:
    return new_run(
        folder / "runs", make_spec(write_samples(folder / "samples.jsonl"), finish={"webhook": url}, **tables)
    )


def test_a_webhook_hears_of_the_end_once_its_user_has_typed_it(tmp_path: Path) -> None:
    with listening() as (url, heard):
        place = run_with(tmp_path, url, train={"max_steps": 1})
        assert train(place)[0] == 0 and heard == []  # a file named it
        allow_typed(Finish(webhook=url), [f"finish.webhook={url}"])
        place = run_with(tmp_path, url, train={"max_steps": 2})
        code, events = train(place)
    assert code == 0 and of_kind(events, "warning") == []
    [message] = heard
    assert {key: message[key] for key in ("schema", "event", "run", "status", "exit_code", "step")} == {
        "schema": 1, "event": "end", "run": place.name, "status": "done", "exit_code": 0, "step": 2,
    }  # fmt: skip
    assert message["text"].startswith(f"{place.name}: done, step 2 of 2, loss ")


def test_a_failure_is_told_with_its_words(tmp_path: Path) -> None:
    with listening() as (url, heard):
        allow_typed(Finish(webhook=url), [f"finish.webhook={url}"])
        place = run_with(tmp_path, url)
        (tmp_path / "samples.jsonl").unlink()
        code, _ = train(place)
    assert code == 5 and [(message["event"], message["status"], message["exit_code"]) for message in heard] == [
        ("failure", "failed", 5)
    ]
    assert "samples.jsonl" in heard[0]["text"] and "\n" not in heard[0]["text"]


@pytest.mark.parametrize(("status", "told"), [(404, "returned 404"), (302, "returned 302"), (None, "did not accept")])
def test_a_server_that_refuses_or_hangs_changes_nothing_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, told: str
) -> None:
    monkeypatch.setattr(destinations, "HAND_OVER_SECONDS", 60.0 if status else 0.2)
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, listening(status or 200) as (url, heard):
        url = url if status else f"http://127.0.0.1:{silent.getsockname()[1]}/secret"
        allow_typed(Finish(webhook=url), [f"finish.webhook={url}"])
        code, events = train(run_with(tmp_path, url, train={"max_steps": 1}))
    assert code == 0 and len(heard) == (2 if status else 0)
    [warning] = of_kind(events, "warning")
    assert warning["code"] == "webhook" and told in warning["text"] and "secret" not in json.dumps(warning)
    assert of_kind(events, "run_finished")[0]["status"] == "done"


def test_a_killed_engine_is_told_by_the_process_that_it_left(tmp_path: Path) -> None:
    with listening() as (url, heard):
        place = run_with(tmp_path, url)
        with EventWriter(place) as writer:
            writer.write("warning", code="gradient_spike", text="old", fix="")
            offset = place.events.stat().st_size
            writer.write("warning", code="gradient_spike", text="a spike <!channel>", fix="less", step=7)
            writer.write("warning", code="tracker", text="of no interest", fix="")
        gone = os.fork()
        if gone == 0:
            os._exit(0)
        os.waitpid(gone, 0)
        allow_typed(Finish(webhook=url), [f"finish.webhook={url}"])
        assert destinations.tell_webhook(place, gone, offset) == 0
    assert [(message["event"], message.get("code"), message["step"]) for message in heard] == [
        ("alert", "gradient_spike", 7), ("failure", None, 0),
    ]  # fmt: skip
    assert heard[1]["status"] == "killed" and heard[1]["exit_code"] == 137


def test_slack_and_discord_get_their_shape_by_host_and_no_word_calls_a_channel(tmp_path: Path) -> None:
    message = {"event": "alert", "text": "a <!channel> & @everyone"}
    assert body_for("https://hooks.slack.com/services/T/B/x", message) == {"text": "a &lt;!channel&gt; &amp; @everyone"}
    for host in ("discord.com", "canary.discord.com", "discordapp.com"):
        body = body_for(f"https://{host}/api/webhooks/1/x", message)
        assert body == {"content": message["text"], "allowed_mentions": {"parse": []}}
    for host in ("example.com", "hooks.slack.com.example.com", "notdiscord.com"):
        assert body_for(f"https://{host}/", message) == message
    event = {"kind": "warning", "code": "plateau", "text": "x" * 5000, "fix": "", "time": "t", "step": 1}
    told = message_of(event, run_with(tmp_path, URL))
    assert told is not None and len(told["text"]) <= 1500


def test_only_what_this_command_line_says_is_allowed(tmp_path: Path) -> None:
    finish = Finish(webhook=URL, push="me/model", push_public=True)
    allow_typed(finish, ["train.max_steps=3", "finish.merge=true"])
    assert not allowed(finish, WEBHOOK) and not allowed(finish, PUSH)
    assert [note.partition(":")[0] for note in notes_on_destinations(finish)] == ["finish.webhook", "finish.push"]
    assert "--set finish.push='me/model' --set finish.push_public=true" in notes_on_destinations(finish)[1]
    allow_typed(finish, ["finish.push=me/model"])  # public because of a file
    assert not allowed(finish, PUSH)
    allow_typed(finish, ["finish.push=me/model", "finish.push_public=true"])
    assert allowed(finish, PUSH) and not allowed(Finish(push="me/model"), PUSH)
    assert "me/model, public" in notes_on_destinations(finish)[1]
    shutil.rmtree(state_folder())
    assert not allowed(finish, PUSH)


def test_a_recipe_of_somebody_else_makes_nobody_send(tmp_path: Path) -> None:
    recipe = tmp_path / "theirs.toml"
    recipe.write_text(
        f'[model]\nid = "builtin:tiny"\n[[data.sources]]\nname = "a"\npath = "a.jsonl"\n[finish]\nwebhook = "{URL}"\n'
    )
    spec = resolve_start(StartOptions(profile="demo", recipe=str(recipe))).spec
    assert spec.recipe.finish.webhook == URL and not allowed(spec.recipe.finish, WEBHOOK)
    run_spec = tmp_path / "run.toml"
    typed = spec.provenance.model_copy(update={"set_": [f"finish.webhook={URL}"]})
    run_spec.write_text(dump_run_spec(spec.model_copy(update={"provenance": typed})))
    spec = resolve_start(StartOptions(run_spec=run_spec)).spec
    assert not allowed(spec.recipe.finish, WEBHOOK)
    shown = dump_run_spec(without_destinations(load_run_spec(run_spec)))
    assert "webhook" not in shown and "example.com" not in shown
    own = StartOptions(profile="demo", recipe=str(recipe), overrides=[f"finish.webhook={URL}"])
    assert allowed(resolve_start(own).spec.recipe.finish, WEBHOOK)
    assert URL not in (state_folder() / "destinations").read_text()


def test_a_variable_keeps_the_url_out_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", URL)
    assert webhook_url(Finish(webhook="$HOOK")) == URL
    monkeypatch.setenv("HOOK", "file:///etc/passwd")
    with pytest.raises(EnvironmentProblem, match=r"\$HOOK is not set to a URL"):
        webhook_url(Finish(webhook="$HOOK"))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("finish.webhook=ftp://a/b", "finish.webhook"),
        ("finish.webhook=http://", "finish.webhook"),
        ("finish.push=model", "OWNER/NAME"),
        ("finish.push_public=true", "finish.push is needed"),
        ('stages=[{name = "a", finish = {push = "me/model"}}]', "set it for the whole run"),
    ],
)
def test_what_is_no_destination_is_refused(override: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        resolve("demo", "demo", [override])


def test_stages_leave_the_end_to_the_whole_run() -> None:
    spec = resolve(
        "demo",
        "demo",
        ['stages=[{name = "a", finish = {merge = true}}]', "method.kind=lora", f"finish.webhook={URL}"],
    ).spec
    assert [stage.recipe.finish for stage in stage_specs(spec)] == [Finish(merge=True)]
    assert spec.recipe.finish.webhook == URL


@pytest.mark.parametrize("code", sorted(ALERTS))
def test_an_alert_is_told_with_what_to_do_and_is_one_that_an_engine_writes(tmp_path: Path, code: str) -> None:
    run = RunDirectory(tmp_path / "20261120T205800Z-mine")
    event = {"kind": "warning", "time": "2026-11-20T20:58:00.123Z", "code": code, "text": "it is so", "fix": "do this"}
    told = message_of({**event, "stage": "one", "step": 3}, run)
    assert told is not None and (told["event"], told["code"], told["step"]) == ("alert", code, 3)
    assert told["text"] == f"{run.name}, stage one: it is so; do this"
    assert message_of({**event, "code": f"{code}_not"}, run) is None
    sources = [
        path.read_text("utf-8")
        for path in Path(next(iter(engine.__path__))).glob("**/*.py")
        if path.name != "destinations.py"
    ]
    assert any(f'"{code}"' in text for text in sources)


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("127.0.0.1", True), ("::1", True), ("0.0.0.0", True), ("10.1.2.3", True), ("172.16.0.1", True),
        ("192.168.1.1", True), ("169.254.169.254", True), ("fe80::1%eth0", True), ("fd00:ec2::254", True),
        ("100.100.100.200", True), ("168.63.129.16", True), ("::ffff:127.0.0.1", True), ("2002:7f00:1::", True),
        ("224.0.0.1", True), ("93.184.215.14", False), ("2606:4700::1111", False),
    ],
)  # fmt: skip
def test_addresses_of_this_machine_its_network_and_of_cloud_metadata_are_inside(address: str, inside: bool) -> None:
    assert destinations.is_inside(address) is inside


def lead(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let each name lead to an address."""
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))],
    )


def test_a_name_that_leads_inside_is_used_only_if_it_did_so_when_it_was_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = {"event": "end", "text": "done"}
    with listening() as (url, heard):
        named = url.replace("127.0.0.1", "hook.example.com")
        finish, typed = Finish(webhook=named), [f"finish.webhook={named}"]
        lead(monkeypatch, "93.184.215.14")
        allow_typed(finish, typed)
        assert allowed(finish, WEBHOOK) and not destinations.may_lead_inside(finish)
        lead(monkeypatch, "127.0.0.1")
        problem = destinations.send(named, message, inside=destinations.may_lead_inside(finish))
        assert "resolves to 127.0.0.1" in problem and "--set finish.webhook=URL" in problem and heard == []
        allow_typed(finish, typed)
        assert destinations.send(named, message, inside=destinations.may_lead_inside(finish)) == ""
    assert heard == [message]


def test_a_variable_of_the_environment_is_no_typed_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as (url, heard):
        monkeypatch.setenv("HOOK", "https://hook.example.com")
        finish = Finish(webhook="$HOOK")
        lead(monkeypatch, "93.184.215.14")
        allow_typed(finish, ["finish.webhook=$HOOK"])
        lead(monkeypatch, "127.0.0.1")
        monkeypatch.setenv("HOOK", url)
        problem = destinations.send(webhook_url(finish), {}, inside=destinations.may_lead_inside(finish))
        assert "resolves to 127.0.0.1" in problem and heard == []
