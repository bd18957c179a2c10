"""A recipe that is being made from another tool's configuration, with an account of every key of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.check.aliases import (
    ACCUMULATION,
    BETAS,
    CHOICE_ALIASES,
    DEEPSPEED,
    KEY_ALIASES,
    PER_DEVICE,
    first_number,
    shard_of,
)
from engine.config.check.no_counterpart import ASKED_ABOUT, CANNOT_IMPORT, LEFT_OUT, NEUTRAL
from engine.config.files.text import quoted
from engine.errors import SpecError

OFF: tuple[Any, ...] = (None, False, "", "none", "None", [], {})

SAME_NAME = {
    **dict.fromkeys(("learning_rate", "weight_decay", "warmup_ratio", "warmup_steps", "max_grad_norm"), "train"),
    **dict.fromkeys(("gradient_checkpointing", "seed", "max_steps", "epochs", "compile", "optimizer"), "train"),
    **dict.fromkeys(("label_smoothing",), "train"),
    **dict.fromkeys(("max_length", "packing", "shuffle", "image_max_pixels", "image_min_pixels"), "data"),
    **dict.fromkeys(("dtype",), "model"),
}
"""Keys that other tools spell as we do, to our table."""

PATTERNS = ("method.targets", "method.train_only", "method.exclude")
EXPRESSION = re.compile(r"[\\()\[^$+|]|\.\*")
"""What only a regular expression has, of the names of modules."""

MAX_GLOBS, MAX_EXPRESSION = 100, 1000
"""Globs that an expression may become, and its characters."""
HEADS = ("lm_head", "output", "embed_out")
"""Names of the layer that computes the logits."""

STRATEGIES = {
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "eval.per_epoch"),
    **dict.fromkeys(("save_strategy",), "checkpoint.per_epoch"),
}
"""The Trainer's keys that say "epoch", "steps" or "no", to ours."""

HARMLESS = (
    *("model.attention", "model.kernels", "data.workers", "parallel", "trackers", "eval", "checkpoint"),
    *("train.loss", "train.compile", "train.gradient_checkpointing", "train.activation_offload", "train.mlp_tiles"),
    *("train.optimizer_offload", "train.log_every_steps", "train.seed", "train.deterministic"),
)
"""Our keys and tables that change nothing about what is trained, beyond the order of sums and of samples."""


def globs_of(pattern: str) -> list[str]:
    """Globs for a regular expression of literal text, numbers, `.*`, optional groups and groups of alternatives; none
    where it has more than that, or is too long."""
    if len(pattern) > MAX_EXPRESSION:
        return []
    text = pattern.removeprefix("^").removesuffix("$")
    text = re.sub(r"\[\\d\]\+|\\d\+|\[0-9\]\+", "\0", text).replace("\\.", ".")
    if text.endswith(".*"):
        text = text[:-2].rstrip(".")
    found = [text.replace(".*", "\1")]
    for _ in range(8):
        if not any("(" in one for one in found) or len(found) > MAX_GLOBS:
            break
        found = [variant for one in found for variant in _alternatives(one)]
    if any(re.search(r"[\\()\[\]|+^$?{}]", one) for one in found):
        return []
    return [one.replace("\0", "*").replace("\1", "**") for one in found]


def _alternatives(text: str) -> list[str]:
    """`text` with its first innermost group replaced by each alternative, and by nothing where it is optional."""
    group = re.search(r"\((?:\?:)?([^()]*)\)(\?)?", text)
    if group is None:
        return [text]
    words = [*group[1].split("|"), *([""] if group[2] else [])]
    return [text[: group.start()] + word + text[group.end() :] for word in words]


@dataclass
class Draft:
    tool: str
    theirs: dict[str, Any]
    """Their keys that have no account yet."""
    devices: int = 1
    dataset_info: dict[str, Any] = field(default_factory=dict)
    """LLaMA-Factory's data sets by name."""
    unbounded_length: bool = False
    """Whether the file cuts samples at no length."""
    has_images: bool = False
    """Whether the file says that all its data have images."""
    text: str = ""
    """The file itself: torchtune names a model's hub id in a comment only."""
    said: dict[str, Any] = field(default_factory=dict)
    """Their keys as the file has them, also those that have an account."""
    folders: tuple[Path, ...] = ()
    """Where a relative path of the file may lead: the working directory and the file's folder."""
    trainer: str = ""
    """The trainer that a command line names, such as "dpo"."""
    recipe: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    """Our dotted key to their key, or to the words for their default."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Their key to the reason."""
    blanks: dict[str, str] = field(default_factory=dict)
    """What has to be filled in or looked at: our or their key to the reason."""
    empty: list[str] = field(default_factory=list)
    with_others: list[str] = field(default_factory=list)
    """Their keys that had a part in what another key was mapped to, such as the split of a data set."""
    notes: list[str] = field(default_factory=list)
    rounds_weights: bool = False
    """Whether the tool trains the weights themselves in bfloat16, so that each update is rounded to it."""

    def __post_init__(self) -> None:
        self.said = dict(self.theirs)

    def take(self, key: str) -> Any:
        """Their value, which the caller accounts for; None if they do not have it."""
        return self.theirs.pop(key, None)

    def take_named(self, key: str) -> str:
        """Remove their key, which the caller has read, and return its name."""
        self.theirs.pop(key, None)
        return key

    def settle_account(self, keys: Iterable[str]) -> None:
        """See that each of their keys is in one of the lists."""
        named = " ".join([*self.origin.values(), *self.left_out, *self.blanks, *self.empty])
        words = set(re.findall(r"\w+", named))
        self.with_others = [key for key in keys if key not in words and key not in self.empty]

    def set(self, ours: str, value: Any, theirs: str) -> None:
        *tables, key = ours.split(".")
        table = self.recipe
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = value
        self.origin[ours] = theirs

    def get(self, ours: str) -> Any:
        table, key = ours.split(".")
        return self.recipe.get(table, {}).get(key)

    def default(self, ours: str, value: Any) -> None:
        """Their default, where it is not ours and the file does not say."""
        if self.get(ours) is None and not any(key == ours for key in self.origin):
            self.set(ours, value, f"{self.tool}'s default")

    def leave(self, key: str, reason: str) -> None:
        self.left_out[key] = reason

    def refuse(self, key: str, value: Any, reason: str) -> None:
        raise SpecError([f"{key} = {quoted(value)}: {reason}"], fix="nothing was imported")

    def take_batch(self, default_rows: int) -> None:
        """Set train.batch_size from sequences per device, accumulation and devices; the micro-batch stays automatic.

        `default_rows`: what the tool takes where the file gives no number of sequences per device.
        """
        used = [key for key in (*PER_DEVICE, *ACCUMULATION) if self.theirs.get(key) is not None]
        rows, steps = first_number(self.theirs, PER_DEVICE), first_number(self.theirs, ACCUMULATION)
        for key in used:
            value = self.theirs.pop(key)
            if first_number({key: value}, (key,)) is None:
                self.blanks[key] = f"{quoted(value)} is not a number of sequences: set train.batch_size"
        if self.blanks.keys() & set(used) or self.get("train.batch_size") is not None:
            return
        words = [*used] if used else [f"{self.tool}'s default"]
        self.set(
            "train.batch_size", (rows or default_rows) * (steps or 1) * self.devices, " x ".join([*words, "devices"])
        )

    def take_rest(self) -> None:
        """Account for every key that is left."""
        if any(key in self.theirs for key in BETAS):
            betas = [self.take(BETAS[0]) or 0.9, self.take(BETAS[1]) or 0.999]
            self.set("train.betas", betas, " and ".join(BETAS))
        for theirs, ours in STRATEGIES.items():
            if (value := self.take(theirs)) == "epoch" and self.get(ours) is None:
                self.set(ours, 1, theirs)
            elif value is not None:
                self.leave(theirs, f"{quoted(value)}: set a number of steps, or disable it")
        for key in list(self.theirs):
            self._take_one(key, self.theirs.pop(key))

    def _take_one(self, key: str, value: Any) -> None:
        name = key.rpartition(".")[2].lower().replace("-", "_")
        row = KEY_ALIASES.get(name)
        if value is None or value in ("", [], {}):
            self.empty.append(key)
        elif name in CANNOT_IMPORT:
            if value not in OFF:
                self.refuse(key, value, CANNOT_IMPORT[name])
            self.leave(key, f"off; {CANNOT_IMPORT[name]}")
        elif name in DEEPSPEED or name in ("fsdp", "fsdp_config"):
            self._shard(key, value)
        elif row is not None and ".NAME." not in row.key:
            self.translate(key, value, row.key, row.value(value))
        elif name in SAME_NAME:
            self.translate(key, value, f"{SAME_NAME[name]}.{name}", value)
        elif name in LEFT_OUT:
            self.leave(key, ("off; " if value is False else "") + LEFT_OUT[name])
        elif name in ASKED_ABOUT:
            self.ask_unless_neutral(key, value, ASKED_ABOUT[name], NEUTRAL.get(name, ()))
        else:
            self.blanks[key] = f"{quoted(value)}: unknown key; check whether it affects training"

    def ask_unless_neutral(self, key: str, value: Any, reason: str, neutral: Sequence[Any]) -> None:
        """Leave `key` out where its value is off, or one of `neutral`, which change nothing; else ask the user."""
        if value in OFF or value in neutral:
            self.leave(key, f"{quoted(value)} has no effect here; {reason}")
        else:
            self.blanks[key] = f"{quoted(value)}: {reason}"

    def translate(self, key: str, theirs: Any, ours: str, value: Any) -> None:
        """Set our key to their value. A value for which ours has no counterpart becomes a blank."""
        if isinstance(value, str):
            value = CHOICE_ALIASES.get(ours, {}).get(value, value)
        if ours == "train.max_steps" and isinstance(value, (int, float)) and value <= 0:
            return self.leave(key, f"{quoted(theirs)}: the number of epochs is used")
        if ours == "eval.every_steps" and (value is None or (isinstance(value, (int, float)) and value <= 0)):
            return self.leave(key, f"{quoted(theirs)}: no steps between evaluations")
        if ours == "train.warmup_steps" and isinstance(value, float) and value < 1:
            ours = "train.warmup_ratio"
        if ours == "train.gradient_checkpointing" and isinstance(value, str):
            if value == "offload":
                self.set("train.activation_offload", True, key)
            value = True
        if ours == "method.also_train" and isinstance(value, list):
            value = [name if "*" in str(name) else f"**.{name}" for name in value]
        if ours == "method.targets" and isinstance(value, list):
            value = self._without_head(key, value)
        patterns = [theirs] if isinstance(theirs, str) else theirs if isinstance(theirs, list) else []
        present = self.get(ours)
        if ours in PATTERNS and any(EXPRESSION.search(str(pattern)) for pattern in patterns):
            self._set_globs(key, [str(pattern) for pattern in patterns], ours)
        elif theirs is False and (ours == "model.dtype" or value is None):
            self.leave(key, "off")
        elif present is not None and present == value:
            self.leave(key, f"{quoted(theirs)}: {ours} is already {quoted(present)} because of {self.origin[ours]}")
        elif value is None or isinstance(value, dict):
            self.ask(key, ours, f"{quoted(theirs)} has no counterpart in {ours}")
        elif present is not None and present != "auto":
            self.ask(key, ours, f"{quoted(theirs)}: {ours} is {quoted(present)} because of {self.origin[ours]}")
        else:
            self.set(ours, value, key)
        return None

    def _without_head(self, key: str, names: list[Any]) -> list[Any]:
        """Return `names` without the head, which gets no adapter here."""
        kept = [name for name in names if name not in HEADS]
        if len(kept) < len(names):
            self.leave(f"{key} (head)", "adapters on the head are not supported: the head is not changed")
            self.notes.append("that file puts an adapter on the head; here the head has none")
        return kept

    def ask(self, key: str, ours: str, reason: str) -> None:
        """Make `key` a blank, or leave it out where our key has no effect on training."""
        if ours in HARMLESS or ours.partition(".")[0] in HARMLESS:
            self.leave(key, reason)
        else:
            self.blanks[key] = reason

    def set_patterns(self, key: str, patterns: Sequence[Any], ours: str) -> None:
        """Set a list of module names, in which regular expressions become globs."""
        texts = [str(pattern) for pattern in patterns]
        texts = self._without_head(key, texts) if ours == "method.targets" else texts
        if any(EXPRESSION.search(text) for text in texts):
            self._set_globs(key, texts, ours)
        else:
            self.set(ours, texts, key)

    def _set_globs(self, key: str, patterns: list[str], ours: str) -> None:
        globs = [glob for pattern in patterns for glob in globs_of(pattern)]
        if globs and len(globs) <= MAX_GLOBS:
            self.set(ours, list(dict.fromkeys(globs)), key)
        else:
            self.blanks[key] = f"{quoted(patterns)} is a regular expression: write {ours} as names or globs"

    def _shard(self, key: str, value: Any) -> None:
        plan = value if key not in ("fsdp", "fsdp_config") else 3
        if isinstance(value, str) and re.search(r"z(?:ero)?[_-]?(?:stage)?[_-]?[01]\b", value.replace("_config", "")):
            self.leave(
                key,
                f"{quoted(value)}: stages 0 and 1 replicate the weights, which parallel.strategy = "
                '"auto" does if they fit',
            )
            return
        if key == "fsdp_config" and "parallel" in self.recipe:
            self.leave(key, 'sharding of weights is parallel.strategy = "sharded"')
            return
        self.set("parallel.strategy", "sharded", key)
        self.set("parallel.shard", shard_of(plan), key)
