"""The process of a chat: takes requests from the chat's folder, answers them with the models, and writes events there.

The events are the record. A process that is started again on the same folder goes on with the conversation that they
tell. It ends on request, on a signal, or after IDLE_SECONDS without a request, so that no forgotten chat keeps memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from engine.config.schema.recipe import Generate
from engine.errors import DataError, MemoryExhaustedError, TunedeckError, UsageError
from engine.extras.chat.answer import Conversation, Listener, Speaker
from engine.journal.chats import ChatInbox, ChatState, question_message
from engine.journal.control import calling_on_signal
from engine.journal.directory import RunDirectory
from engine.journal.events import EventTail, EventWriter, Journal, heartbeats
from engine.journal.liveness import claim

POLL_SECONDS = 0.03
"""How often requests are looked for while nothing is answered."""

FLUSH_SECONDS = 0.05
"""Least time between two events with tokens: a screen shows no more."""

IDLE_SECONDS = 30 * 60.0
"""A chat without a request for so long ends, and its memory is free."""


@dataclass(frozen=True)
class LoadedChat:
    """What loading makes: the models that answer each question, and the one that answers a request `base`."""

    speakers: list[Speaker]
    base: Speaker | None
    system: str | None
    device: str


@dataclass
class ChatProcess:
    """Answers the requests to one chat, one after another."""

    chat: LoadedChat
    journal: Journal
    inbox: ChatInbox
    state: ChatState
    idle_seconds: float = IDLE_SECONDS
    ending: str = ""
    """Why the process ends; empty while it goes on."""
    _asked_at: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Serve until the chat ends."""
        while not self.ending:
            request = self.inbox.next()
            if request is None:
                if time.monotonic() - self._asked_at > self.idle_seconds:
                    self.ending = f"no question for {self.idle_seconds / 60:.0f} minutes"
                time.sleep(POLL_SECONDS)
                continue
            try:
                self._obey(request)
            except (DataError, UsageError, MemoryExhaustedError) as error:
                self.write("chat_refused", text=error.render())
            self._asked_at = time.monotonic()

    def end_by_signal(self, number: int) -> None:
        """The answer that is being written is the last."""
        self.ending = f"signal {number}"

    def write(self, kind: str, **fields: Any) -> None:
        self.journal.write(kind, **fields)
        self.state.add([{"kind": kind, **fields}])

    def _obey(self, request: dict[str, Any]) -> None:
        name = request["request"]
        if name == "end":
            self.ending = "asked for"
        elif name == "undo":
            self.write("chat_undone")
        elif name == "system":
            self._change(self.state.settings, str(request.get("text") or "").strip() or None)
        elif name == "set":
            given = request.get("settings")
            self._change({**self.state.settings, **(given if isinstance(given, dict) else {})}, self.state.system)
        elif name == "base":
            self._answer_base()
        elif name == "again" and not self.state.exchanges:
            self.write("chat_refused", text="no question yet")
        else:
            self._ask(request)

    def _change(self, settings: dict[str, Any], system: str | None) -> None:
        try:
            checked = Generate.model_validate(settings)
        except ValueError as error:
            raise UsageError(
                f"{settings} are not settings of [generate]: {error}", fix="see docs/recipes.md"
            ) from error
        for speaker in [*self.chat.speakers, *([self.chat.base] if self.chat.base else [])]:
            speaker.settings = checked
        more = {"system": system} if system is not None else {}
        self.write("chat_settings", settings=checked.model_dump(mode="json"), **more)

    def _ask(self, request: dict[str, Any]) -> None:
        """Let every model answer; one after another, because they may share one base."""
        again = request["request"] == "again"
        images = [str(path) for path in request.get("images") or ()]
        text = self.state.exchanges[-1].question if again else str(request.get("text") or "")
        self.write("chat_question", text=text, images=images, again=again)
        for speaker in self.chat.speakers:
            if self._must_stop():
                break
            self._answer(speaker, speaker.model.label)
        self.write("chat_answered")

    def _must_stop(self) -> bool:
        return bool(self.ending) or self.inbox.must_stop()

    def _answer_base(self) -> None:
        """The base answers what the first model was asked, after the same turns, with the same draw."""
        if self.chat.base is None or not self.state.exchanges:
            self.write(
                "chat_refused",
                text="no base model is available: none of these models was loaded as an adapter on a base",
            )
            return
        self._answer(self.chat.base, self.state.models[0])
        self.write("chat_answered")

    def _answer(self, speaker: Speaker, history: str) -> None:
        """`history`: the model whose turns come before the question."""
        state, label = self.state, speaker.model.label
        conversation = Conversation(None if speaker.tokens.plain else state.system)
        if not speaker.tokens.plain:
            earlier = state.messages(history, len(state.exchanges) - 1)
            conversation.turns = [message for message in earlier if message["role"] != "system"]
        conversation.turns.append(question_message(state.exchanges[-1]))
        pieces = _Pieces(self.write, label)
        listener = Listener(pieces.begin, pieces.text, pieces.token, self._must_stop)
        try:
            answer = speaker.answer(conversation, state.draws - 1, listener)
        except (DataError, MemoryExhaustedError) as error:
            self.write("chat_refused", text=error.render())
            return
        pieces.flush()
        self.write(
            "chat_answer", model=label, text=answer.text, stopped_by=answer.stopped_by, seconds=answer.seconds,
            count=len(answer.token_ids),
        )  # fmt: skip


class _Pieces:
    """Collects what is generated and writes it a few times a second."""

    def __init__(self, write: Callable[..., None], model: str) -> None:
        self._write, self._model = write, model
        self._text, self._at = "", 0.0
        self._tokens: list[tuple[str, float]] = []

    def begin(self, prompt: str, tokens: int) -> None:
        self._text, self._tokens = "", []
        self._write("chat_prompt", model=self._model, text=prompt, tokens=tokens)

    def text(self, text: str) -> None:
        self._text += text
        if time.monotonic() - self._at >= FLUSH_SECONDS:
            self.flush()

    def token(self, text: str, likelihood: float) -> None:
        self._tokens.append((text, round(likelihood, 4)))

    def flush(self) -> None:
        if self._text or self._tokens:
            self._write("chat_tokens", model=self._model, text=self._text, pieces=[list(each) for each in self._tokens])
        self._text, self._tokens, self._at = "", [], time.monotonic()


def serve(
    directory: RunDirectory,
    names: list[str],
    load: Callable[[ExitStack, Callable[[str], None]], LoadedChat],
) -> int:
    """Be the process of a chat until it ends; returns the exit code. `load` opens the device for the stack's life, and
    calls the function it is given with sentences for the user."""
    state = ChatState()
    state.add(EventTail(directory.events).poll())
    with claim(directory), EventWriter(directory) as writer, heartbeats(writer), ExitStack() as stack:
        journal = Journal(writer)
        began = time.monotonic()
        journal.write("chat_started", pid=os.getpid(), models=names)
        try:
            chat = load(stack, lambda text: journal.write("chat_note", text=text))
            process = ChatProcess(chat, journal, ChatInbox(directory), state)
            _tell_ready(process, time.monotonic() - began)
            with calling_on_signal(process.end_by_signal):
                process.run()
        except TunedeckError as error:
            journal.write("run_finished", status="failed", exit_code=error.exit_code, result=None, error=error.render())
            return error.exit_code
        journal.write("run_finished", status="done", exit_code=0, result=None, reason=process.ending)
        return 0


def _tell_ready(process: ChatProcess, seconds: float) -> None:
    """A chat that is taken up again keeps the system prompt and the settings that it had."""
    chat, state = process.chat, process.state
    taken_up = bool(state.settings)
    system = state.system if taken_up else chat.system
    settings = state.settings if taken_up else chat.speakers[0].settings.model_dump(mode="json")
    labels = [speaker.model.label for speaker in chat.speakers]
    plain = [speaker.model.label for speaker in chat.speakers if speaker.tokens.plain]
    process.write(
        "chat_ready", models=labels, settings=settings, plain=plain, device=chat.device, seconds=round(seconds, 2),
        base=chat.base.model.label if chat.base is not None else "",
        images=any(speaker.tokens.images is not None for speaker in chat.speakers),
        **({"system": system} if system is not None else {}),
    )  # fmt: skip
    for speaker in [*chat.speakers, *([chat.base] if chat.base else [])]:
        speaker.settings = Generate.model_validate(settings)
