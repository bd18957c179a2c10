"""Prepares what a tool opens: decides between the adapter as it is and the merged model, merges, converts, writes
Ollama's Modelfile, and has the tool's answers compared with ours."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EnvironmentProblem, TunedeckError, UsageError
from engine.extras.handover.answers import Judgement, make_reference
from engine.extras.handover.consumers import ask_llama_cpp, ask_ollama, ask_server, require_program
from engine.extras.handover.gguf import convert, find_converter, problems_of_gguf, read_gguf, require_quantizer
from engine.extras.handover.merge import merge
from engine.extras.handover.result import (
    PROGRAMS,
    SERVERS,
    Result,
    model_name,
    modelfile,
    reasons_of_server,
    server_words,
)
from engine.journal.directory import RunDirectory
from engine.journal.files import read_table, remove_drafts, write_atomically

Notify = Callable[[str], None]
RECORD = "handover.json"
WEIGHTS = "weights"
"""Key of the record: the fingerprint of the weights that were merged."""


@dataclass(frozen=True)
class Order:
    consumer: str
    """vllm, sglang, ollama or gguf."""
    out: Path
    merged: bool = False
    """Merge also what could be served as it is."""
    outtype: str = "f16"
    converter: Path | None = None
    trust_remote_code: bool = False
    run: RunDirectory | None = None
    """Whose journal gets the account of a merged model."""


@dataclass
class Handover:
    """What was prepared."""

    consumer: str
    form: str
    """adapter (as it is), merged, or model (trained in full)."""
    reasons: list[str]
    """Why merged."""
    line: str = ""
    folder: str = ""
    """What the tool opens."""
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    end_tokens: list[str] = field(default_factory=list)
    judgement: Judgement | None = None
    failure: TunedeckError | None = None
    """What kept the rest from being done."""

    def as_json(self) -> dict[str, Any]:
        document = {name: value for name, value in vars(self).items() if name not in ("judgement", "failure")}
        document["error"] = self.failure.render() if self.failure is not None else None
        document["check"] = asdict(self.judgement) if self.judgement is not None else None
        return document


def prepare(result: Result, order: Order, notify: Notify, *, check: bool) -> Handover:
    """Write what `order` asks for. What could not be done, because a tool is not there or answers otherwise, is the
    handover's `failure`; all else is written. Raises UsageError (`out` holds a model of other weights), and as `merge`
    does."""
    servers = order.consumer in SERVERS
    reasons = [*result.merged_only, *reasons_of_server(order.consumer, result)] if servers else []
    if result.base is not None and not servers:
        reasons = ["a GGUF file contains a whole model"]
    elif result.base is not None and order.merged and not reasons:
        reasons = ["--merged"]
    form = "model" if result.base is None else "merged" if reasons else "adapter"
    ends = list(map(str, result.tokenizer.convert_ids_to_tokens(list(result.ends))))
    done = Handover(order.consumer, form, reasons, folder=str(result.folder), end_tokens=ends)
    model = None if form == "adapter" else result.folder
    if form == "merged":
        model = merged_model(result, order, notify)
        done.folder = str(model)
    try:
        if servers:
            _serve(result, order, model, done, notify, check=check)
        else:
            assert model is not None
            _write_gguf(result, order, model, done, notify, check=check)
    except EnvironmentProblem as error:
        done.failure = error
    return done


def merged_model(result: Result, order: Order, notify: Notify) -> Path:
    """The merged model in `out`, written now unless it is there, of the same weights."""
    target = order.out / "merged"
    fingerprint = result.fingerprint()
    if target.exists():
        if _recorded(target / RECORD) == fingerprint:
            notify(f"{target} already has the merge of these weights")
            return target
        other = "" if order.consumer == "push" else f", or choose another folder: --out {order.out}-2"
        raise UsageError(f"{target} was merged from other weights", fix=f"remove it{other}")
    # The record appears together with the model.
    record = {RECORD: json.dumps({WEIGHTS: fingerprint}) + "\n"}
    merged = merge(result.folder, target, notify, trust_remote_code=order.trust_remote_code, beside=record)
    if order.run is not None:
        merged.record(order.run, notify)
    return target


def _recorded(record: Path) -> str | None:
    try:
        return str(read_table(record).get(WEIGHTS))
    except (OSError, ValueError):
        return None


def _make_folder(out: Path, result: Result) -> None:
    """Create the folder for the files, but not the run's, which is missing where it was moved."""
    out.mkdir(parents=out.parent != result.folder.parent, exist_ok=True)


def _serve(result: Result, order: Order, model: Path | None, done: Handover, notify: Notify, *, check: bool) -> None:
    words = server_words(order.consumer, result, model)
    done.line = shlex.join(words)
    if not check:
        return
    require_program(words, order.consumer)
    reference = make_reference(result, trust_remote_code=order.trust_remote_code)
    _make_folder(order.out, result)
    log = order.out / f"{order.consumer}.log"
    answers = ask_server(words, model_name(order.consumer, result, model), reference.prompts, log, notify)
    _judge(done, reference.judge(answers))


def _write_gguf(result: Result, order: Order, model: Path, done: Handover, notify: Notify, *, check: bool) -> None:
    _make_folder(order.out, result)
    gguf = order.out / f"{result.name}-{order.outtype}.gguf"
    if order.consumer == "ollama":
        # Before the conversion, which may need a converter that is not there yet.
        file = order.out / "Modelfile"
        text, done.notes = modelfile(result, gguf, done.end_tokens)
        remove_drafts(file)
        write_atomically(file, text)
        done.files.append(str(file))
    _convert(result, order, model, gguf, notify)
    done.folder = str(gguf)
    done.files.append(str(gguf))
    done.line = shlex.join(
        ["ollama", "create", result.name, "-f", str(order.out / "Modelfile")]
        if order.consumer == "ollama"
        else ["llama-server", "-m", str(gguf), "-c", str(result.context)]
    )
    header = read_gguf(gguf)
    problems = problems_of_gguf(header, model)
    if problems:
        raise EnvironmentProblem(
            f"{gguf} does not match the model: {'; '.join(problems)}",
            fix="use a newer converter that supports this model",
        )
    done.notes.append(
        f"verified: {len(header.tensors)} tensors; number of layers, vocabulary, template and end token match "
        "the model; --check also loads the file in llama.cpp and compares answers"
    )
    if not check:
        return
    reference = make_reference(result, trust_remote_code=order.trust_remote_code)
    if order.consumer == "ollama":
        answers = ask_ollama(order.out / "Modelfile", reference.prompts, chat=bool(result.tokenizer.chat_template))
    else:
        answers = ask_llama_cpp(gguf, reference.prompts, order.out / "llama.cpp.log", notify)
    _judge(done, reference.judge(answers), exact=order.outtype in ("f32", "f16", "bf16"))


def _convert(result: Result, order: Order, model: Path, gguf: Path, notify: Notify) -> None:
    """A file that is there is of these weights if its record says so."""
    record = gguf.with_name(f"{gguf.name}.json")
    fingerprint = result.fingerprint()
    remove_drafts(record)
    if gguf.is_file() and _recorded(record) == fingerprint:
        notify(f"{gguf} already has the conversion of these weights")
        return
    converter = find_converter(order.converter)
    require_quantizer(order.outtype)
    notify(f"converting with {converter[-1]}")
    record.unlink(missing_ok=True)  # of the file that is replaced
    convert(converter, model, gguf, order.outtype)
    write_atomically(record, json.dumps({WEIGHTS: fingerprint}) + "\n")


def _judge(done: Handover, judgement: Judgement, *, exact: bool = True) -> None:
    """With `exact`, another answer is a failure; a type of few bits may answer otherwise."""
    done.judgement = judgement
    if judgement.passed or not exact:
        return
    place = next(number for number, verdict in enumerate(judgement.verdicts) if verdict != "same")
    raise EnvironmentProblem(
        f"{judgement.told(PROGRAMS[done.consumer])}; "
        f"prompt {place + 1}: {judgement.theirs[place]!r}, not {judgement.ours[place]!r}",
        expected="the same answers up to rounding",
        fix="serve the merged model: add --merged" if done.form == "adapter" else "use a newer version of the tool",
    )
