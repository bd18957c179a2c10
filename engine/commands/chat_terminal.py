"""The chat in a terminal: reads a line, streams the answer of each model, and knows a few commands that begin with a
slash."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from engine.commands.shared import print_progress
from engine.config.files.text import visible
from engine.errors import DataError, MemoryExhaustedError

if TYPE_CHECKING:
    from engine.chat.answer import Speaker
    from engine.chat.conversation import Conversation

HELP = """/undo          forget the last question and its answer
/regen         answer the last question again
/system TEXT   another system prompt; without TEXT none
/save [FILE]   append the conversation to FILE (conversations.jsonl), a data source of the format chat
/quit          end; so do Ctrl-D, and Ctrl-C where no answer is being written"""


class Interrupt:
    """Turns the first Ctrl-C during an answer into a request to stop, and the second into KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.requested = False
        previous = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Talk:
    """One conversation per model: all get the same questions, each keeps its own answers."""

    def __init__(self, speakers: list[Speaker], system: str | None) -> None:
        from engine.chat.conversation import Conversation

        self._speakers = speakers
        self._conversations: list[Conversation] = [Conversation(system) for _ in speakers]
        self._draw = 0

    def respond(self, line: str) -> bool:
        """Answer a question or obey a command; False ends the chat."""
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command == "/undo":
            questions = [conversation.undo() for conversation in self._conversations]
            print_progress("nothing to undo" if questions[0] is None else "forgotten")
        elif command == "/regen":
            self._regenerate()
        elif command == "/system":
            for conversation in self._conversations:
                conversation.system = rest.strip() or None
        elif command == "/save":
            self._save(Path(rest.strip() or "conversations.jsonl"))
        elif command.startswith("/"):
            print_progress(HELP)
        elif line.strip():
            self._ask(line)
        return True

    def _regenerate(self) -> None:
        questions = [conversation.undo() for conversation in self._conversations]
        if questions[0] is None:
            print_progress("nothing to answer again")
            return
        if all(speaker.settings.temperature == 0.0 for speaker in self._speakers):
            print_progress("greedy answers do not change; to sample, start with --set generate.temperature=0.8")
        self._ask(questions[0])

    def _save(self, path: Path) -> None:
        from engine.chat.conversation import save_conversations

        try:
            count = save_conversations(path, self._conversations)
        except DataError as error:
            print_progress(error.render())
            return
        print_progress(f"{count} saved in {path}" if count else "nothing to save yet")

    def _ask(self, question: str) -> None:
        interrupt = Interrupt()
        for speaker, conversation in zip(self._speakers, self._conversations, strict=True):
            if interrupt.requested:
                print_progress(f"{speaker.model.label}: not asked")
            if speaker.tokens.plain:
                conversation.turns.clear()  # each text is continued by itself
            conversation.ask(question)
            if len(self._speakers) > 1:
                sys.stdout.write(f"{visible(speaker.model.label)}: ")
            with interrupt.watched():
                answered = self._answer(speaker, conversation, interrupt)
            if not answered:
                conversation.undo()
        self._draw += 1

    def _answer(self, speaker: Speaker, conversation: Conversation, interrupt: Interrupt) -> bool:
        """Whether there is an answer, which may have been interrupted."""
        try:
            answer = speaker.answer(conversation, self._draw, _write, lambda: interrupt.requested)
        except (DataError, MemoryExhaustedError) as error:
            print_progress(error.render())
            return False
        ending = {"end": "", "length": " [generate.max_new_tokens reached]", "interrupt": " [interrupted]"}
        sys.stdout.write(f"{ending[answer.stopped_by]}\n")
        sys.stdout.flush()
        conversation.answered(answer.text)
        return True


def _write(text: str) -> None:
    sys.stdout.write(visible(text, keep="\n\t"))
    sys.stdout.flush()


def talk(speakers: list[Speaker], system: str | None) -> None:
    """Read lines until the input ends, /quit, or Ctrl-C."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (input() edits lines with it)

        print_progress(f"{', '.join(speaker.model.label for speaker in speakers)} (/help for commands)")
    conversation = Talk(speakers, system)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
            if not conversation.respond(line):
                return
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n" if sys.stdin.isatty() else "")
            return
