"""The chat in a terminal: sends each line to the chat's process, shows the answers as they come, and knows a few
commands that begin with a slash. The process goes on when the terminal is closed: `tunedeck chat --attach last`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from engine.commands.shared import print_progress, print_text
from engine.config.files.text import visible
from engine.errors import DataError, EnvironmentProblem, TunedeckError
from engine.journal.chats import ChatState, append_rows, conversations, is_answering, send_request
from engine.journal.directory import RunDirectory
from engine.journal.events import Event, EventTail
from engine.launch.other_processes import reap_chats
from engine.launch.process import log_tail

HELP = """/undo          forget the last question and its answer
/regen         answer the last question again
/system TEXT   set the system prompt; without TEXT, remove it
/set K=V       change a setting of [generate], such as temperature=0.8
/image FILE    show the model a picture with the next question
/base          let the base model answer the last question
/save [FILE]   append the conversation to FILE (conversations.jsonl), as a data source with format = "chat"
/leave         leave the chat running; to return: tunedeck chat --attach last
/quit          end the chat; same as Ctrl-D, or Ctrl-C while no answer is being written"""

POLL_SECONDS = 0.03
"""How often the events are read while an answer is written."""

ENDINGS = {"end": "", "length": " [generate.max_new_tokens reached]", "interrupt": " [interrupted]"}


class Interrupt:
    """Turns the first Ctrl-C during an answer into a request to stop, and the second into KeyboardInterrupt."""

    def __init__(self, request: Callable[[], None]) -> None:
        self._request, self._requested = request, False

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._requested = False
        previous = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        self._request()


class Talk:
    """Follows one chat: what its process writes is shown, what is typed is sent to it."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory, self._tail, self.state = directory, EventTail(directory.events), ChatState()
        self._images: list[str] = []
        self._writing = ""
        self._interrupt = Interrupt(lambda: send_request(directory, "stop"))

    def wait_until_ready(self) -> None:
        """Raises TunedeckError with the process's error and exit code if it ended instead."""
        while self.state.status in ("loading", "ended"):
            alive = is_answering(self._directory)
            fresh = self._read(shown=False)
            if not alive and not fresh:
                raise self._ended()
            time.sleep(POLL_SECONDS)

    def _read(self, *, shown: bool = True) -> list[Event]:
        """The new events, after they were shown."""
        events = self._tail.poll()
        for event in events:
            self.state.add([event])
            if event["kind"] in ("chat_note", "chat_refused"):
                print_progress(visible(event["text"], keep="\n"))
            elif shown:
                self._show(event)
        return events

    def _show(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "chat_prompt":
            several = len(self.state.models) > 1 or event["model"] not in self.state.models
            print_text("\n" * bool(self._writing))
            print_text(f"{visible(event['model'])}: " if several else "")
            self._writing = ""
        elif kind == "chat_tokens":
            self._writing += event["text"]
            print_text(event["text"])
        elif kind == "chat_answer":
            print_text(f"{ENDINGS.get(event['stopped_by'], '')}\n")
            self._writing = ""
        sys.stdout.flush()

    def _send(self, name: str, **fields: object) -> None:
        """Send a request and show what happens until it is done. Raises TunedeckError if the process ends."""
        send_request(self._directory, name, **fields)
        done = {"undo": "chat_undone", "system": "chat_settings", "set": "chat_settings"}.get(name, "chat_answered")
        with self._interrupt.watched():
            while True:
                alive = is_answering(self._directory)
                events = self._read()
                kinds = {event["kind"] for event in events}
                if done in kinds or ("chat_refused" in kinds and self.state.status == "ready"):
                    return
                if not alive and not events:
                    raise self._ended()
                time.sleep(POLL_SECONDS)

    def _ended(self) -> TunedeckError:
        reap_chats()
        for event in reversed(EventTail(self._directory.events).poll()):
            if event["kind"] == "chat_started":
                break
            if event["kind"] == "run_finished" and event["exit_code"]:
                found = TunedeckError(str(event.get("error") or "the chat ended"))
                found.exit_code = int(event["exit_code"])
                return found
        lines = "\n".join(log_tail(self._directory))
        return EnvironmentProblem(
            f"the process of the chat has ended\n{lines}".rstrip(),
            fix=f"continue it: tunedeck chat --attach {self._directory.name}",
        )

    def respond(self, line: str) -> bool:
        """Answer a question or obey a command; False leaves the chat."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if command in ("/quit", "/exit"):
            self.end()
            return False
        if command == "/leave":
            print_progress(f"the chat keeps running; continue it: tunedeck chat --attach {self._directory.name}")
            return False
        if command in ("/undo", "/regen", "/base") and not self.state.exchanges:
            print_progress("no question yet")
        elif command == "/undo":
            self._send("undo")
            print_progress("forgotten")
        elif command == "/regen":
            if not self.state.settings.get("temperature"):
                print_progress("greedy answers do not change; to sample: /set temperature=0.8")
            self._send("again")
        elif command == "/base":
            self._send("base")
        elif command == "/system":
            self._send("system", text=rest)
        elif command == "/set":
            self._set(rest)
        elif command == "/image":
            self._images.append(rest)
        elif command == "/save":
            self._save(Path(rest or "conversations.jsonl"))
        elif command.startswith("/"):
            print_progress(HELP if command == "/help" else f"unknown command {visible(command)}; /help lists all")
        elif line.strip():
            images, self._images = self._images, []
            self._send("ask", text=line, images=images)
        return True

    def _set(self, text: str) -> None:
        key, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            print_progress(f"/set {text}: expected a number, as in /set temperature=0.8")
            return
        self._send("set", settings={key.strip(): int(number) if number.is_integer() else number})

    def _save(self, path: Path) -> None:
        try:
            count = append_rows(path, conversations(self.state))
        except DataError as error:
            print_progress(error.render())
            return
        print_progress(f"{count} saved to {path}" if count else "nothing to save yet")

    def end(self) -> None:
        """End the chat's process."""
        send_request(self._directory, "end")


def talk(directory: RunDirectory) -> None:
    """Read lines until the input ends, /quit, /leave, or Ctrl-C. Raises TunedeckError if the process ends before."""
    chat = Talk(directory)
    try:
        chat.wait_until_ready()
    except KeyboardInterrupt:
        chat.end()
        return
    if sys.stdin.isatty():
        import readline  # noqa: F401  (input() edits lines with it)

        print_progress(f"{', '.join(chat.state.models)} (/help for commands)")
        for exchange in chat.state.exchanges:
            print_progress(f"> {visible(exchange.question)}")
            for reply in exchange.replies.values():
                print_progress(visible(reply.text, keep="\n\t"))
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
            if not chat.respond(line):
                return
        except (EOFError, KeyboardInterrupt):
            print_text("\n" if sys.stdin.isatty() else "")
            chat.end()
            return
