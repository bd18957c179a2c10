"""Command lines of other tools, in shell scripts, as the keys and values that their configuration files have."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from engine.config.check.aliases import FACTORY, TRL
from engine.errors import SpecError

SWIFT = "ms-swift"
TRAINERS = ("sft", "dpo", "kto", "orpo", "cpo", "grpo", "rloo", "ppo", "reward", "gkd", "nash_md", "online_dpo", "xpo")
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
MAX_WORDS = 2000


def read_command_line(text: str, label: str) -> tuple[str, str, dict[str, Any]]:
    """Return the tool, its trainer ("sft", "dpo", ...) and the options of the one training that a script starts.

    Variables that the script sets are filled in. Raises SpecError where no training, or more than one, is started.
    """
    starts = [start for words in _commands(text, label) if (start := _training(words)) is not None]
    if not starts:
        raise SpecError(
            [f"{label}: no command line of a training run was recognised"],
            fix="give a script that calls trl sft, python sft.py --…, llamafactory-cli train --… or swift sft",
        )
    if len(starts) > 1:
        raise SpecError(
            [f"{label}: the script starts {len(starts)} training runs"], fix="give a script that starts one of them"
        )
    tool, trainer, words = starts[0]
    return tool, trainer, _options(words)


def _commands(text: str, label: str) -> Iterator[list[str]]:
    """Yield the words of each command, with the variables that were assigned before it filled in."""
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a line of a longer quoted text, which starts no training
        if len(words) > MAX_WORDS:
            raise SpecError([f"{label}: a command has {len(words)} words; at most {MAX_WORDS} are supported"])
        words = [VARIABLE.sub(lambda hit: variables.get(hit[1], hit[0]), word) for word in words]
        while words and (pair := ASSIGNMENT.fullmatch(words[0])):
            variables[pair[1]] = pair[2]
            words = words[1:]
        if words:
            yield words


def _training(words: list[str]) -> tuple[str, str, list[str]] | None:
    """Return the tool, trainer and options of a command that trains; None for any other."""
    for index, word in enumerate(words):
        name, after = PurePosixPath(word).name, words[index + 1 :]
        if name in ("swift", "megatron") and after[:1] and after[0] in ("sft", "pt", "rlhf"):
            return SWIFT, after[0], after[1:]
        if name == "trl" and after[:1] and after[0] in TRAINERS:
            return TRL, after[0], after[1:]
        if name == "llamafactory-cli" and after[:1] == ["train"] and any(one.startswith("--") for one in after):
            return FACTORY, "train", after[1:]
        if (
            name.endswith(".py")
            and (stem := name[:-3]).startswith(TRAINERS)
            and any("=" in w or w.startswith("--") for w in after)
        ):
            return TRL, next(trainer for trainer in TRAINERS if stem.startswith(trainer)), after
    return None


def _options(words: list[str]) -> dict[str, Any]:
    """Return options as keys: `--key value`, `--key=value`, `--key a b c` as a list, `--flag` as true."""
    options: dict[str, Any] = {}
    key = ""
    for word in words:
        if word in ("&&", "||", "|", ";", "&", ">", ">>", "2>&1"):
            break
        if word.startswith("--"):
            key, separator, value = word[2:].partition("=")
            key = key.replace("-", "_")
            options[key] = [_scalar(value)] if separator else []
        elif key:
            options[key].append(_scalar(word))
    return {key: True if not values else values[0] if len(values) == 1 else values for key, values in options.items()}


def _scalar(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word.lower() in ("none", "null"):
        return None
    for kind in (int, float):
        if len(word) < 40:
            try:
                return kind(word)
            except ValueError:
                continue
    return word
