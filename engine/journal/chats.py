"""Chats: a folder for each in `.chats` beside the runs, with the requests of whoever talks and the events of the
process that answers. A chat's folder has a run directory's file names, so it is claimed, followed and found alive as a
run is."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from engine.errors import DataError, EnvironmentProblem
from engine.journal.control import next_request_file
from engine.journal.directory import RunDirectory
from engine.journal.events import Event, EventTail
from engine.journal.files import held_draft, read_table, write_atomically
from engine.journal.liveness import running_engine

CHATS = ".chats"
"""The leading dot keeps the folder out of every list of runs."""

CHAT_FILE = "chat.json"
"""What was asked for: models, system prompt, settings."""

REQUESTS = ("ask", "again", "undo", "system", "set", "base", "stop", "end")
"""ask {text, images}; again: answer the last question again; undo; system {text}; set {settings of [generate]};
base: let the base answer the last question; stop: end the answer that is being written; end: end the process."""


def create_chat(runs_dir: Path, asked: dict[str, Any]) -> RunDirectory:
    """A new folder with `asked` in it. Raises EnvironmentProblem where it cannot be written."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = runs_dir / CHATS / f"{stamp}-{secrets.token_hex(2)}"
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(exist_ok=True)  # the folder of the runs is not made again where it was moved
        with held_draft(folder, folder.parent) as draft:
            draft.mkdir()
            (draft / "control").mkdir()
            write_atomically(draft / CHAT_FILE, json.dumps(asked, indent=2) + "\n")
            draft.rename(folder)
    except OSError as error:
        raise EnvironmentProblem(
            f"the chat cannot be stored in {folder.parent}: {error.strerror or error}",
            fix="choose another folder with --runs DIR or $TUNEDECK_RUNS",
        ) from error
    return RunDirectory(folder.absolute())


def read_asked(directory: RunDirectory) -> dict[str, Any]:
    """Raises DataError if the file is missing or damaged."""
    try:
        return read_table(directory.path / CHAT_FILE)
    except (OSError, ValueError) as error:
        raise DataError(f"{directory.path / CHAT_FILE} cannot be read: {error}", fix="start a new chat") from error


def list_chats(runs_dir: Path) -> list[RunDirectory]:
    """Newest first."""
    try:
        found = sorted((runs_dir / CHATS).iterdir(), reverse=True)
    except OSError:
        return []
    chats = [path for path in found if not path.name.startswith(".") and (path / CHAT_FILE).is_file()]
    return [RunDirectory(path.absolute()) for path in chats]


def is_answering(directory: RunDirectory) -> bool:
    """Whether the chat's process lives."""
    return running_engine(directory) is not None


def send_request(directory: RunDirectory, name: str, **fields: Any) -> None:
    """Raises ValueError for an unknown name, OSError where the folder cannot be written."""
    if name not in REQUESTS:
        raise ValueError(f"unknown request {name!r}; known: {', '.join(REQUESTS)}")
    path = next_request_file(directory.control, name)
    write_atomically(path, json.dumps({"request": name, **fields}) + "\n")


class ChatInbox:
    """Reads the requests to one chat's process; each is returned once, in order, and `stop` before all others."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._waiting: list[dict[str, Any]] = []

    def next(self) -> dict[str, Any] | None:
        """None if there is none. A `stop` while nothing is answered means nothing."""
        self._read()
        self._waiting = [each for each in self._waiting if each["request"] != "stop"]
        return self._waiting.pop(0) if self._waiting else None

    def must_stop(self) -> bool:
        """Whether the present answer should end. Fast enough for every token."""
        self._read()
        return any(each["request"] in ("stop", "end") for each in self._waiting)

    def _read(self) -> None:
        try:
            names = sorted(name for name in os.listdir(self._directory.control) if name.endswith(".json"))
        except OSError:
            return
        for name in names:
            path = self._directory.control / name
            try:
                found = read_table(path)
                path.unlink()
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                path.unlink(missing_ok=True)  # no request: it is ignored
                continue
            if found.get("request") in REQUESTS:
                self._waiting.append(found)


MOST_DETAILED = 50
"""Newest exchanges whose replies keep their prompts and the likelihoods of their tokens: a prompt holds the whole
conversation, and a chat may have thousands of turns."""


@dataclass
class Reply:
    """One model's answer to one question."""

    model: str
    text: str = ""
    pieces: list[tuple[str, float]] = field(default_factory=list)
    """(text with special tokens, likelihood from 0 to 1) of each token."""
    prompt: str = ""
    """As rendered, with special tokens."""
    stopped_by: str = ""
    """Empty while it is written."""
    seconds: float = 0.0
    tokens: int = 0


@dataclass
class Exchange:
    """A question and the answers to it, by model; `earlier` are answers that were asked for again."""

    question: str
    images: list[str] = field(default_factory=list)
    replies: dict[str, Reply] = field(default_factory=dict)
    earlier: list[dict[str, Reply]] = field(default_factory=list)


@dataclass
class ChatState:
    """What a chat's events say; both its process, when it starts again, and whoever shows the chat read it."""

    status: str = "loading"
    """loading, ready, answering or ended."""
    models: list[str] = field(default_factory=list)
    base: str = ""
    """The model that answers a request `base`; empty if there is none."""
    plain: list[str] = field(default_factory=list)
    """Models that continue a text, outside the chat template."""
    takes_images: bool = False
    exchanges: list[Exchange] = field(default_factory=list)
    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str = ""
    draws: int = 0
    """Answers asked for so far: sampling depends on this number and the seed."""

    def add(self, events: Iterable[Event]) -> bool:
        """Take further events; returns whether there were any that count."""
        changed = False
        for event in events:
            handler = getattr(self, f"_on_{event['kind']}", None)
            if handler is not None:
                handler(event)
                changed = True
        return changed

    def _on_chat_started(self, event: Event) -> None:
        self.status, self.error, self.notes = "loading", "", []

    def _on_chat_ready(self, event: Event) -> None:
        self.status, self.models = "ready", list(event["models"])
        self.base, self.plain = str(event.get("base") or ""), list(event.get("plain") or ())
        self.takes_images = bool(event.get("images"))
        self.settings, self.system = dict(event.get("settings") or {}), event.get("system")

    def _on_chat_note(self, event: Event) -> None:
        self.notes.append(str(event["text"]))

    def _on_chat_refused(self, event: Event) -> None:
        self.notes.append(str(event["text"]))
        if self.status == "answering":
            self.status = "ready"

    def _on_chat_question(self, event: Event) -> None:
        self.status, self.draws = "answering", self.draws + 1
        if event.get("again") and self.exchanges:
            last = self.exchanges[-1]
            last.earlier.append(last.replies)
            last.replies = {}
        else:
            self.exchanges.append(Exchange(event["text"], list(event.get("images") or ())))
            self._forget_details()

    def _forget_details(self) -> None:
        for exchange in self.exchanges[-1 - MOST_DETAILED : -MOST_DETAILED]:
            for reply in (reply for replies in (exchange.replies, *exchange.earlier) for reply in replies.values()):
                reply.prompt, reply.pieces = "", []

    def _on_chat_prompt(self, event: Event) -> None:
        self.status = "answering"
        if self.exchanges:
            model = str(event["model"])
            self.exchanges[-1].replies[model] = Reply(model, prompt=str(event["text"]))

    def _on_chat_tokens(self, event: Event) -> None:
        reply = self._reply(event)
        if reply is not None:
            reply.text += str(event["text"])
            reply.pieces += _pieces(event.get("pieces"))

    def _on_chat_answer(self, event: Event) -> None:
        reply = self._reply(event)
        if reply is not None:
            reply.text, reply.stopped_by = str(event["text"]), str(event["stopped_by"])
            reply.seconds, reply.tokens = float(event["seconds"]), int(event["count"])

    def _on_chat_answered(self, event: Event) -> None:
        self.status = "ready"

    def _on_chat_undone(self, event: Event) -> None:
        del self.exchanges[-1:]

    def _on_chat_settings(self, event: Event) -> None:
        self.settings, self.system = dict(event["settings"]), event.get("system")

    def _on_run_finished(self, event: Event) -> None:
        self.status, self.error = "ended", str(event.get("error") or event.get("reason") or "")

    def _reply(self, event: Event) -> Reply | None:
        return self.exchanges[-1].replies.get(str(event["model"])) if self.exchanges else None

    def messages(self, model: str, upto: int | None = None) -> list[dict[str, Any]]:
        """The conversation of one model, with the system prompt; of the first `upto` exchanges, None for all. Questions
        without its answer are left out."""
        plain = model in self.plain
        found: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system and not plain else []
        for exchange in self.exchanges[:upto]:
            reply = exchange.replies.get(model)
            if reply is not None and reply.stopped_by:
                found += [question_message(exchange), {"role": "assistant", "content": reply.text}]
        return found


def _pieces(value: Any) -> list[tuple[str, float]]:
    """Of an event that may be damaged: pairs of a text and a number alone."""
    pairs = [each for each in value if isinstance(each, list) and len(each) == 2] if isinstance(value, list) else []
    return [(text, float(share)) for text, share in pairs if isinstance(text, str) and isinstance(share, int | float)]


def question_message(exchange: Exchange) -> dict[str, Any]:
    """The user's turn; images come first, as in image-chat rows."""
    if not exchange.images:
        return {"role": "user", "content": exchange.question}
    images = [{"type": "image", "image": path} for path in exchange.images]
    return {"role": "user", "content": [*images, {"type": "text", "text": exchange.question}]}


def read_chat(directory: RunDirectory) -> ChatState:
    """Raises OSError if the events cannot be read."""
    state = ChatState()
    state.add(EventTail(directory.events).poll())
    alive = is_answering(directory)
    if state.status == "ended" and alive:
        state.status = "loading"  # taken up again, and its first event is not written yet
    elif not alive:
        state.status = "ended"
    return state


def conversations(state: ChatState) -> Iterator[dict[str, Any]]:
    """A row of the chat format for each model that has answered: a data source."""
    for model in state.models:
        messages = state.messages(model)
        if any(message["role"] == "assistant" for message in messages):
            yield {"messages": messages}


def preference(state: ChatState, chosen: str, rejected: str) -> dict[str, Any]:
    """A row of the preference format for the last question: `chosen` and `rejected` are answers to it. The prompt has
    the turns before it of the first model."""
    model = state.models[0]
    if model in state.plain:
        return {"prompt": state.exchanges[-1].question, "chosen": chosen, "rejected": rejected}
    prompt = [*state.messages(model, len(state.exchanges) - 1), question_message(state.exchanges[-1])]
    sides = {"chosen": chosen, "rejected": rejected}
    return {"prompt": prompt, **{side: [{"role": "assistant", "content": text}] for side, text in sides.items()}}


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Append rows to a JSON Lines file, all or none; returns their number. Raises DataError if it cannot be
    written."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:
            _append_whole(file, "".join(lines).encode())
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}", fix="choose another file") from error
    return len(lines)


def _append_whole(file: FileIO, data: bytes) -> None:
    """Append in one call, which a kill does not cut in two, and take back what a full disk has cut."""
    size = file.seek(0, os.SEEK_END)
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        data = b"\n" + data
    try:
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())
    except OSError:
        file.truncate(size)
        raise
