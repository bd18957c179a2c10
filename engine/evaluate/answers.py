"""The answers of an evaluation: generated as many at once as are predicted to fit, fewer after an out-of-memory error,
and kept by hashes of what was scored, so that an interrupted evaluation goes on and no answer is generated twice. The
user's own prompts (`eval.prompts`) are answered at every evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.architecture.facts import from_config
from engine.architecture.positions import table_of_positions
from engine.budget.predict.inference import GENERATION_ROWS, generation_bytes
from engine.budget.predict.parallel_layout import on_one_device
from engine.budget.trace.memory_config import memory_config_of
from engine.config.files.data_files import fixed_prompts
from engine.config.schema.recipe import Generate
from engine.config.schema.run import RunSpec
from engine.data.prompts import PromptTokens, was_trained_plain
from engine.data.store import hash_text
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.errors import DataError, UnknownArchitectureError
from engine.evaluate.context import (
    EvaluationContext,
    EvaluationStopped,
    FailedPass,
    Questions,
    decode,
    retries_unchanged,
)
from engine.journal.checkpoints_on_disk import MANIFEST
from engine.model.config import model_config_dict
from engine.model.decoder import eval_mode
from engine.model.loaded import LoadedModel
from engine.model.reference import find_starting_weights


def data_fingerprint(data: TokenData) -> str:
    """Hash the samples: which rows of which sources, and their images. The tokenizer does not matter."""
    columns, documents = data.columns, data.documents
    rows = np.stack([columns.sources[documents].astype(np.int64), columns.origins[documents]])
    return hash_text(*data.source_fingerprints, rows.tobytes().hex(), _image_digests(data))


def tokens_hash(data: TokenData) -> str:
    """Hash the tokens of all samples, where their answers are, and their images."""
    columns, documents = data.columns, data.documents
    pieces = [columns.ids[columns.offsets[document] : columns.offsets[document + 1]] for document in documents]
    bounds = np.stack([columns.answer_starts[documents], columns.answer_ends[documents]])
    lengths = columns.lengths[documents]
    return hash_text(*(array.tobytes().hex() for array in (np.concatenate(pieces), bounds, lengths)),
                     _image_digests(data))  # fmt: skip


def _image_digests(data: TokenData) -> str:
    """The images' digests, in order, as one text."""
    found = data.columns.images
    if found is None:
        return ""
    spans = [found.digests[found.offsets[document] : found.offsets[document + 1]] for document in data.documents]
    return np.concatenate(spans).tobytes().hex()


def weights_identity(spec: RunSpec, folder: Path | None) -> str:
    """Hash the weights in `folder`, or, if None, of the model that the run starts from."""
    start = find_starting_weights(spec.recipe.model)
    adapter = Path(start.adapter) if start.adapter else None
    parts = [spec.recipe.model.model_dump_json(), str(spec.recipe.train.seed), _of_files(start.folder)]
    return hash_text(*parts, _of_files(adapter), _of_files(folder))


def _of_files(folder: Path | None) -> str:
    """The checkpoint manifest's hash of the weights, else name, size and time of change of each file."""
    if folder is None or not folder.is_dir():
        return ""
    manifest = folder.parent / MANIFEST
    if folder.name == "weights" and manifest.is_file():
        files = json.loads(manifest.read_text("utf-8"))["files"]
        return hash_text(json.dumps({name: facts for name, facts in files.items() if name.startswith("weights/")}))
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    facts = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in found]
    return hash_text(json.dumps(facts))


class KeptAnswers:
    """Answers by the sample's number, in the file `path`, or in memory alone if None."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.texts: dict[int, str] = {int(row["sample"]): str(row["answer"]) for row in read_rows(path)}

    def add(self, texts: Mapping[int, str]) -> None:
        """Raises OSError if they cannot be written."""
        self.texts |= texts
        append_rows(self._path, [{"sample": sample, "answer": text} for sample, text in texts.items()])


class KeptLosses:
    """Sums of token losses by group of samples, in the file `path`, or in memory alone if None."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._sums: dict[tuple[int, ...], float] = {}
        taken: set[int] = set()
        for row in read_rows(path):
            samples = tuple(map(int, row["samples"]))
            if not taken & set(samples):  # two processes cannot write at once, but a copied file may hold a group twice
                self._sums[samples] = float(row["loss"])
                taken |= set(samples)

    def add(self, samples: Sequence[int], loss: float) -> None:
        """Raises OSError if it cannot be written."""
        self._sums[tuple(samples)] = loss
        append_rows(self._path, [{"samples": list(samples), "loss": loss}])

    def among(self, rows: NDArray[np.int64]) -> dict[tuple[int, ...], float]:
        """Return the groups whose samples are all among `rows`."""
        chosen = set(rows.tolist())
        return {samples: loss for samples, loss in self._sums.items() if chosen.issuperset(samples)}


def read_rows(path: Path | None) -> Iterator[dict[str, Any]]:
    """Complete lines only; nothing if there is no file."""
    if path is None or not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:  # the rest of a torn line, and the line that was appended to it
                continue
            if isinstance(row, dict):
                yield row


def append_rows(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Append rows to a file, and wait until they are on the disk; nothing without a path. Raises OSError."""
    if path is None:
        return
    path.parent.mkdir(exist_ok=True)  # the run's folder is not made again where it was moved
    with path.open("ab+") as file:
        torn = file.tell() and not _ends_with_newline(file.fileno(), file.tell())
        file.write(("\n" if torn else "").encode() + "".join(json.dumps(row) + "\n" for row in rows).encode("ascii"))
        file.flush()
        os.fsync(file.fileno())


def _ends_with_newline(descriptor: int, size: int) -> bool:
    return os.pread(descriptor, 1, size - 1) == b"\n"


FILLED = 0.97
"""Share of the free memory that answers may fill; predictions of generation are at most 1 % too low."""


def planned_rows(spec: RunSpec, device: Device) -> Callable[[int], int]:
    """A function from a prompt's length in tokens to the answers that fit at once, 1 to GENERATION_ROWS; it measures
    free memory. Always GENERATION_ROWS without a memory formula of the architecture."""
    try:
        arch = from_config(model_config_dict(spec))
    except UnknownArchitectureError:
        return lambda prompt: GENERATION_ROWS
    config = memory_config_of(arch, on_one_device(spec))

    def rows(prompt: int) -> int:
        free_bytes = FILLED * (device.available_bytes - device.memory().allocated_bytes)
        fitting = GENERATION_ROWS
        while fitting > 1:
            needed_bytes = generation_bytes(arch, config, rows=fitting, prompt=prompt, generate=spec.recipe.generate)
            if needed_bytes <= free_bytes:
                break
            fitting //= 2
        return fitting

    return rows


Answer = dict[str, str]
"""Prompt, answer and reference of one sample, as text; white space around answer and reference is trimmed."""


def answer_first(context: EvaluationContext, data: Questions, count: int, kept: KeptAnswers) -> list[Answer]:
    """Answers of the first `count` samples, in data order. Those in `kept` are not generated again; new ones are added.
    Longest prompts first.

    Raises MemoryExhaustedError when one answer at a time does not fit, EvaluationStopped when `context.should_stop`
    does.
    """
    questions = [data.split_question(index) for index in range(count)]
    waiting = sorted(
        (index for index in range(count) if index not in kept.texts), key=lambda index: -len(questions[index][0])
    )
    failures, clean, size = 0, True, context.batch_size
    while waiting:
        if context.should_stop():
            raise EvaluationStopped
        rows = max(1, min(size.rows, context.planned_rows(len(questions[waiting[0]][0]))))
        parts = _parts(waiting, rows, context.shares)
        found = context.attempt("generate", data, parts)
        if not isinstance(found, FailedPass):
            kept.add({index: text for part, texts in zip(parts, found, strict=True)
                      for index, text in zip(part, texts, strict=True)})  # fmt: skip
            del waiting[: sum(map(len, parts))]
            failures, size.largest_success = 0, max(size.largest_success, len(parts[0]))
            continue
        failures, clean = failures + 1, False
        context.device.release_cached()
        proven = len(parts[0]) <= size.largest_success
        if not retries_unchanged(context, found, failures, proven=proven, rows=len(parts[0])):
            size.halve(len(parts[0]))
            context.report(found, "cut", len(parts[0]), size.rows)
    if clean:
        size.grow()
    return [_answer(context, question, kept.texts[index]) for index, question in enumerate(questions)]


def _parts(waiting: list[int], rows: int, shares: int) -> list[list[int]]:
    """At most `rows` of the samples `waiting` for each rank, evenly if possible, longest first; none is empty."""
    rows = min(rows, -(-len(waiting) // shares))
    parts = (waiting[first : first + rows] for first in range(0, rows * shares, rows))
    return [part for part in parts if part]


def _answer(context: EvaluationContext, question: tuple[list[int], list[int]], text: str) -> Answer:
    prompt, reference = (decode(context, ids) for ids in question)
    return {"prompt": prompt, "answer": text.strip(), "reference": reference.strip()}


@dataclass(frozen=True)
class FixedPrompts:
    """Prompts as tokens, rendered as the run's chat template does at inference; plain for a run on plain text."""

    texts: list[str]
    ids: list[list[int]]

    def split_question(self, row: int) -> tuple[list[int], list[int]]:
        """(prompt, no reference)."""
        return self.ids[row], []

    def images_of(self, rows: Sequence[int], ids_BS: Tensor) -> Mapping[str, Tensor]:
        """None."""
        return {}


def load_fixed_prompts(spec: RunSpec, loaded: LoadedModel) -> FixedPrompts | None:
    """None without eval.prompts. Raises DataError for a prompt that is as long as the model's positions."""
    texts = fixed_prompts(spec.recipe.eval)
    if not texts:
        return None
    tokenizer = loaded.tokenizer
    plain = was_trained_plain(spec) or not tokenizer.chat_template
    tokens = PromptTokens("the run's model", tokenizer, spec, plain=plain, think=None)
    system = spec.recipe.data.system_prompt
    first = [{"role": "system", "content": system}] if system and not plain else []
    ids = [tokens.ids([*first, {"role": "user", "content": text}]) for text in texts]
    positions = table_of_positions(loaded.config.to_dict())
    longest = max(map(len, ids))
    if positions is not None and longest >= positions:
        raise DataError(
            f"eval.prompts: a prompt has {longest} tokens, but the model has {positions} positions",
            fix="shorten the prompt",
        )
    return FixedPrompts(texts, ids)


def settings_for(prompts: FixedPrompts, loaded: LoadedModel, settings: Generate) -> Generate:
    """With as many new tokens as the model has positions for behind the longest prompt."""
    positions = table_of_positions(loaded.config.to_dict())
    if positions is None:
        return settings
    room = positions - max(map(len, prompts.ids))
    return settings.model_copy(update={"max_new_tokens": min(settings.max_new_tokens, room)})


def answer_prompts(context: EvaluationContext, prompts: FixedPrompts) -> list[dict[str, str]]:
    """(prompt, answer) of each. Raises as `answer_first` does."""
    with eval_mode(context.loaded.model):
        answers = answer_first(context, prompts, len(prompts.texts), KeptAnswers())
    return [{"prompt": text, "answer": answer["answer"]} for text, answer in zip(prompts.texts, answers, strict=True)]
