"""Rows of preferences: of two answers to one prompt, one was chosen and one rejected; or single answers that are
desirable or not, for KTO, and the mismatched sequences from which the divergence of policy and reference is
estimated."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config.schema.data import PREFERENCE_FORMATS, UNPAIRED_FORMATS, Source
from engine.config.schema.recipe import Recipe
from engine.data.chat_template import common_length
from engine.data.conversations import ROLES, parsed
from engine.data.order import SampleOrder
from engine.data.records import Dropped, Record, SourceRows
from engine.data.tokens import IGNORED, Example, TokenData
from engine.errors import DataError


@dataclass(frozen=True)
class PreferenceRecord:
    """A pair; both sides begin with the same prompt."""

    chosen: Record
    rejected: Record
    is_dialogue: bool = False
    """Whether the sides were found in two texts that are dialogues."""


@dataclass(frozen=True)
class LabelledRecord:
    """An answer with its prompt, and whether it is desirable."""

    record: Record
    desirable: bool


JudgedRecord = PreferenceRecord | LabelledRecord


class Sides(NamedTuple):
    """The prompt and the two answers of a pair, each a text or a list of messages."""

    prompt: Any
    chosen: Any
    rejected: Any
    is_dialogue: bool = False
    """Whether the texts are dialogues with labels such as "Human:" and "Assistant:"."""


NO_PROMPT = "chosen and rejected share no prompt (name its column: columns.prompt)"
"""Reason for which a pair is dropped whose answers do not begin with the same question."""


def sides_of(values: dict[str, Any], opening: str = "") -> Sides | Dropped:
    """Return the sides of a pair. `values` are the columns chosen, rejected and perhaps prompt, input and history;
    `opening` is what the chat template writes before an answer.

    Without a prompt, chosen and rejected are whole dialogues, and the prompt is what both begin with, up to the end of
    the last turn that they share. Their beginning alone is not a prompt: answers may begin alike. With a prompt, chosen
    and rejected may still be whole conversations: those that begin with a turn of the user.
    """
    chosen, rejected = (_parsed_list(values[name]) for name in ("chosen", "rejected"))
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if value is None:
            return Dropped(f"{name} is missing")
        if not isinstance(value, str | list):
            return Dropped(f"{name} is neither text nor a list of messages")
    if isinstance(chosen, list) != isinstance(rejected, list):
        return Dropped("of chosen and rejected, one is text and one a list of messages")
    prompt = prompt_of(values)
    if isinstance(prompt, Dropped):
        return prompt
    if isinstance(chosen, list) and (prompt is None or _begins_with_prompt(chosen)):
        shared = _shared_messages(chosen, rejected)
        if not shared:
            return Dropped(NO_PROMPT)
        if not _is_answer(chosen[shared]) or not _is_answer(rejected[shared]):
            return Dropped("chosen and rejected have different questions")
        return Sides(chosen[:shared], chosen[shared:], rejected[shared:])
    if prompt is None:
        return _dialogue_sides(chosen, rejected, opening)
    return Sides(prompt, chosen, rejected)


def prompt_of(values: dict[str, Any]) -> Any:
    """The prompt of a row of preferences, with the column input behind a text, and the earlier rounds of the column
    history before it; None without a prompt, Dropped with the reason."""
    prompt, more, rounds = _parsed_list(values.get("prompt")), values.get("input"), rounds_of(values.get("history"))
    if isinstance(rounds, Dropped):
        return rounds
    prompt, more = (more, None) if prompt is None else (prompt, more)
    if more in (None, "") and not rounds:
        return prompt
    if not isinstance(prompt, str) or not isinstance(more or "", str):
        return Dropped("input or history with a prompt that is not text")
    question = "\n".join(part for part in (prompt, more) if part)
    if not rounds:
        return question
    roles = ("user", "assistant")
    return [{"role": role, "content": text}
            for pair in [*rounds, (question,)]
            for role, text in zip(roles, pair, strict=False)]  # fmt: skip


def _parsed_list(value: Any) -> Any:
    """A list that is written as JSON text, or of the one message that `value` is; anything else is unchanged."""
    found = parsed(value) if isinstance(value, str) and value.lstrip().startswith("[{") else value
    if isinstance(value, dict) and (value.get("role") or value.get("from")):
        return [value]
    return found if isinstance(found, list) else value


def _begins_with_prompt(messages: list[Any]) -> bool:
    first = messages[0] if messages else None
    role = (first.get("role") or first.get("from")) if isinstance(first, dict) else None
    return role in ("system", "user", "human", "developer")


def _shared_messages(chosen: list[Any], rejected: list[Any]) -> int:
    """Messages that both begin with; the last of each side is an answer."""
    most = min(len(chosen), len(rejected)) - 1
    return next((place for place in range(most) if chosen[place] != rejected[place]), max(0, most))


LABEL = r"(?:^|\n)[ \t]*(?:#{1,6}[ \t]*|\*\*)?(?:%s)(?:\*\*)?[ \t]*:(?:\*\*)?"
QUESTION_LABEL = re.compile(LABEL % "human|user|question|instruction|prompter|customer|q", re.IGNORECASE)
ANSWER_LABEL = re.compile(LABEL % "assistant|ai|bot|chatbot|chatgpt|gpt|model|response|answer|agent|a", re.IGNORECASE)
"""The labels before a question and an answer in a dialogue that is one text, such as "\\n\\nHuman:" and
"\\n\\nAssistant:" of Anthropic's."""


def _dialogue_sides(chosen: str, rejected: str, opening: str) -> Sides | Dropped:
    """The sides of two dialogues that are texts: the prompt ends behind the last label of an answer, or the last
    `opening` of the chat template, that both share."""
    shared = chosen[: common_length([chosen, rejected])]
    place, labels = shared.rfind(opening) + len(opening), [opening]
    if not opening or opening not in shared:
        asked = QUESTION_LABEL.search(shared)
        answered = ANSWER_LABEL.search(shared, asked.end()) if asked else None
        if asked is None or answered is None:
            return Dropped(NO_PROMPT)
        # Answers may have such words at the starts of lines, too: the dialogue's own labels are its first ones.
        labels = [found.group().strip() for found in (asked, answered)]
        place = max(found.end() for found in ANSWER_LABEL.finditer(shared) if found.group().strip() == labels[1])
    if any(_line_with(label, text[place:]) for label in labels for text in (chosen, rejected)):
        return Dropped("chosen and rejected differ in more than their last answer")
    return Sides(chosen[:place], chosen[place:], rejected[place:], is_dialogue=True)


def _line_with(label: str, text: str) -> bool:
    """Whether a line of `text` begins with `label`."""
    return any(line.lstrip().startswith(label.strip()) for line in text.split("\n"))


def _is_answer(message: Any) -> bool:
    """Whether a message is of the assistant, or of a role that is dropped with its own reason."""
    role = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
    return not isinstance(role, str) or ROLES.get(role.lower(), "assistant") == "assistant"


def rounds_of(history: Any) -> list[tuple[str, str]] | Dropped:
    """Return the earlier questions with their answers, from a list of pairs or its JSON text."""
    given = parsed(history) if isinstance(history, str) and history.strip() else history or []
    if not isinstance(given, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in given
    ):
        return Dropped("history is not a list of questions with their answers")
    return [(asked, answer) for asked, answer in given]


def other_objective(
    source: Source, rows: SourceRows, fields: dict[str, str], judged: str | None, table: str = "data.sources"
) -> DataError:
    """For rows of preferences without their objective (`judged` None), or rows that an objective cannot learn from.
    `fields` maps our columns to the source's, `table` holds the source."""
    found = f"source {source.name}: the columns are {', '.join(rows.columns)}"
    if judged == "pairs":
        return DataError(
            f'{found}, but method.objective = "dpo" needs pairs',
            expected="columns chosen and rejected, optionally prompt",
            fix='set them in the source, such as columns = {chosen = "better", rejected = "worse"}'
            + ("; or, for answers with labels, add --set preference.loss=kto" if "label" in rows.columns else ""),
        )
    if judged == "unpaired":
        return DataError(
            f'{found}, but preference.loss = "kto" needs single answers with labels',
            expected="columns prompt, completion and label (true or false); or chosen and rejected",
            fix='set them in the source, such as columns = {completion = "answer", label = "good"}',
        )
    if "chosen" not in fields:
        return DataError(
            f'{found}: answers with labels, but method.objective = "sft" trains on every answer',
            expected='method.objective = "dpo" with preference.loss = "kto"',
            fix="add --set method.objective=dpo --set preference.loss=kto",
        )
    column, kind = f'messages = "{fields["chosen"]}"', "chat"
    if "prompt" in fields:
        column, kind = f'prompt = "{fields["prompt"]}", completion = "{fields["chosen"]}"', "prompt-completion"
    imitate = [f"{table}.{source.name}.columns={{{column}}}", f"{table}.{source.name}.format={kind}"]
    options = " ".join(f"--set {shlex.quote(option)}" for option in imitate)
    if table == "evaluate.sources":
        return DataError(
            f"{found}: preferences, but scoring needs answers",
            expected="prompts with completions, or conversations",
            fix=f"to score it on the chosen answers, add {options}",
        )
    return DataError(
        f'{found}: preferences, but method.objective = "sft" trains on answers',
        expected='method.objective = "dpo"',
        fix=f"add --set method.objective=dpo; or, to train on the chosen answers: {options}",
    )


def preference_notice(columns: Sequence[str], source: Source, format_name: str, read: Sequence[str]) -> str | None:
    """What is said of a source whose rows hold preferences, of which the columns `read` are imitated; None if they hold
    none, or are learned as such."""
    if format_name in (*PREFERENCE_FORMATS, *UNPAIRED_FORMATS):
        return None
    if {"chosen", "rejected"} <= set(columns):
        return (
            f"source {source.name}: the rows are preferences (chosen, rejected), but only method.objective = "
            f'"dpo" uses both: {", ".join(read)} {"is" if len(read) == 1 else "are"} read, and the rejected '
            "answers have no effect"
        )
    if format_name == "prompt-completion" and "label" in columns:
        return (
            f'source {source.name}: the column label is only used by preference.loss = "kto"; training uses '
            "every completion, whatever its label"
        )
    return None


NEEDS = (("completion", "label"), ("messages", "label"), ("conversations", "label"))
"""Columns of such rows, of which a source has one set."""

WORDS = {"true": True, "1": True, "false": False, "0": False}


def desirable_of(label: Any) -> bool | Dropped:
    """true and false, 1 and 0, or these as text."""
    if label is None:
        return Dropped("label is missing")
    found = WORDS.get(f"{label:g}" if isinstance(label, float) else str(label).strip().lower())
    return found if found is not None else Dropped("label is neither true nor false")


def answer_of(values: dict[str, Any]) -> dict[str, Any] | Dropped:
    """`values` with a prompt and a completion: of a conversation, its last turn is the completion."""
    turns = values.get("messages", values.get("conversations"))
    if values.get("prompt") is None and isinstance(values.get("completion"), list):
        turns = values["completion"]
    if turns is None:
        return values
    turns = parsed(turns) if isinstance(turns, str) else turns
    if isinstance(turns, Dropped):
        return turns
    if not isinstance(turns, list) or len(turns) < 2:
        return Dropped("the conversation has no prompt and answer")
    return {**values, "prompt": turns[:-1], "completion": turns[-1:]}


def first_partners(weights: NDArray[np.float64], *, seed: int, shuffle: bool, batch_size: int) -> NDArray[np.int64]:
    """For each sample the one whose answer it is mismatched with, int64[samples]: within each step of the first epoch,
    that of the sample before it, and for the first sample that of the last (as TRL's KTOTrainer within its batches).
    Pairs stay the same in later epochs, so that the reference's log-probabilities can be computed once."""
    drawn = SampleOrder(weights, seed=seed, shuffle=shuffle, batch_size=batch_size).epoch(0)
    order = list(dict.fromkeys([*drawn.tolist(), *range(len(weights))]))
    starts = list(range(0, len(order), batch_size))
    if len(starts) > 1 and len(order) - starts[-1] == 1:
        starts.pop()  # a sample alone would be matched with its own answer
    partners = np.empty(len(order), np.int64)
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        partners[order[start:stop]] = np.roll(order[start:stop], 1)
    return partners


class MismatchedData(TokenData):
    """Row i is the prompt of row i of `data`, and the answer of row `partners[i]`, cut to `max_length` tokens."""

    def __init__(self, data: TokenData, partners: NDArray[np.int64], max_length: int) -> None:
        """Raises DataError for a single sample."""
        if len(data) < 2:
            raise DataError(
                "KTO estimates the distance to the reference model by pairing prompts with answers of other "
                f"samples, but {data.source_names[0] if data.source_names else 'the data'} has only one sample "
                "left",
                expected="at least two samples, both in the training and in the held-out data",
            )
        super().__init__(
            data.columns,
            data.documents,
            source_names=data.source_names,
            source_fingerprints=data.source_fingerprints,
            images=data.pixels,  # those of the prompts: answers have none
        )
        self.partners = partners
        own = self.lengths
        self.answer_starts = np.fromiter((self._first_target(row) for row in range(len(own))), np.int32, len(own))
        """The number of tokens of each row's own prompt."""
        whole = self.answer_starts + (own - self.answer_starts)[partners]
        self.lengths = np.minimum(whole, max_length).astype(np.int32)
        self.target_counts = self.target_counts[partners]
        for row in np.flatnonzero(whole > max_length):
            self.target_counts[row] = np.count_nonzero(self[int(row)].labels != IGNORED)

    def __getitem__(self, row: int) -> Example:
        prompt, _ = self._document(int(self.documents[row]))
        partner = int(self.partners[row])
        ids, targets = self._document(int(self.documents[partner]))
        start, answer = int(self.answer_starts[row]), int(self.answer_starts[partner])
        cut = slice(int(self.lengths[row]))
        found = np.concatenate([prompt[:start], ids[answer:]])[cut]
        learned = np.concatenate([np.zeros(start, np.bool_), targets[answer:]])[cut]
        return Example(found, np.where(learned, found, np.int32(IGNORED)), None)

    def _first_target(self, row: int) -> int:
        _, targets = self._document(int(self.documents[row]))
        return int(targets.argmax())


def add_mismatched(data: TokenData, recipe: Recipe, *, in_steps: bool) -> None:
    """For KTO, set `data.mismatched`: with answers of the same step of the first epoch, or of all of `data`. Raises
    DataError for a single sample."""
    if not recipe.learns_preferences or recipe.learns_pairs:
        return
    shuffle, batch = recipe.data.shuffle and in_steps, recipe.train.batch_size if in_steps else len(data)
    partners = first_partners(data.weights, seed=recipe.train.seed, shuffle=shuffle, batch_size=batch)
    data.mismatched = MismatchedData(data, partners, recipe.data.max_length)


FEWEST, MOST = 1.0, 4 / 3
"""Between which the weighted desirable answers should be for each weighted undesirable one (Ethayarajh et al. 2024,
eq. 9)."""


def balance_notice(data: TokenData, recipe: Recipe) -> str | None:
    """What is said of labels that are unevenly weighted; None if they are not, or no labels are learned."""
    if data.mismatched is None:
        return None
    asked, good = recipe.preference, int(data.desirable.sum())
    bad = len(data) - good
    found = f"{good:,} answers are desirable and {bad:,} undesirable"
    if not good or not bad:
        return f"{found}: KTO needs both kinds of answers"
    ratio = asked.desirable_weight * good / (asked.undesirable_weight * bad)
    if FEWEST <= ratio <= MOST:
        return None
    low, high = (bad * asked.undesirable_weight * bound / good for bound in (FEWEST, MOST))
    change = f"preference.desirable_weight between {low:.3g} and {high:.3g}"
    if ratio > MOST:
        low, high = (good * asked.desirable_weight / (bound * bad) for bound in (MOST, FEWEST))
        change = f"preference.undesirable_weight between {low:.3g} and {high:.3g}"
    return f"{found}, weighted {ratio:.3g} to 1, where 1 to {MOST:.3g} is advised: set {change}"
