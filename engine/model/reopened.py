"""Opens a result with the loaders of transformers and peft alone, in a process without any of our code, and compares
its logits with ours, before the result is reported as done.

Try it: `python -m pytest tests/model/test_reopened.py`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors.torch import load
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from engine.config.files.cgroups import free_memory_bytes
from engine.errors import EnvironmentProblem
from engine.model.attention import attention_by_part
from engine.model.decoder import autocast, eval_mode
from engine.model.loaded import LoadedModel
from engine.model.tensor_file import saved_shapes
from engine.model.weight_account import WeightAccount

PROMPTS = (
    "The capital of France is",
    "Question: what is 12 + 30?\nAnswer:",
    "def reverse(text):\n    return",
    "Once upon a time there was a",
    '{"name": "Ada", "born": ',
)
"""Prose, arithmetic, code and JSON."""
ROWS = 2
"""Prompts whose logits are compared at the end of a run."""
LOADER = Path(__file__).with_name("plain_loader.py")
LONGEST_SECONDS = 3600.0
"""A model in the hundreds of gigabytes is read from its disk in that time."""
SPARE_BYTES = 2 * 2**30
"""What Python, torch and transformers take in addition to the weights."""
OUT_OF_MEMORY = re.compile(
    "MemoryError|Cannot allocate memory|failed to map segment|bad_alloc|not enough memory|OpenBLAS"
)
OTHER_MODEL = 0.25
"""Difference, as a part of the largest logit, beyond which no rounding to 16 bits explains it. bf16 has 2^-9 a
weight."""
ROUNDED = {torch.float32: 1e-2}
"""The same where the model is computed in fp32, on another device and with other kernels."""
OWN_RANK = re.compile("RANK|LOCAL_|WORLD_SIZE|GROUP_|ROLE_|MASTER_|TORCHELASTIC_")
"""How the names of variables begin that make a process one of several ranks."""
REPORT = "report this, with the output of tunedeck report; the run's checkpoints have the weights"

log = logging.getLogger("tunedeck")


@dataclass(frozen=True)
class PlainRequest:
    """What is opened, and how: what the documentation has users type."""

    name: str
    """What messages call it."""
    model: str
    """Folder or hub id of the base or the full model."""
    config: str
    """Folder or hub id of its config.json: an adapter trained with scaled positions has another one than its base."""
    auto_class: str
    token_rows: tuple[tuple[int, ...], ...]
    attention: str | dict[str, str]
    dtype: str = "auto"
    revision: str | None = None
    adapter: str | None = None
    embedding_rows: int = 0
    """Rows of the embedding that the adapter needs."""
    quantization: tuple[str, dict[str, Any]] | None = None
    """transformers' class, and its keys, with which the base is opened."""
    trust_remote_code: bool = False
    size_bytes: int = 0
    """Memory that the weights take."""


@dataclass(frozen=True)
class PlainAnswer:
    """What an outsider found."""

    logits: list[Tensor]
    """fp32 [S, V] of each row."""
    unread: list[str]
    """Tensors of the files that are in no weight."""


class NotTriedError(Exception):
    """The result was not opened; the text is the reason."""


def token_rows(
    tokenizer: PreTrainedTokenizerBase, count: int = len(PROMPTS), added: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the first prompts; the last of them ends with the tokens `added`."""
    rows = [tuple(map(int, tokenizer(text)["input_ids"])) for text in PROMPTS[:count]]
    return (*rows[:-1], (*rows[-1], *added))


def logits_of_rows(
    model: Any, rows: Sequence[Sequence[int]], move: Callable[[Tensor], Tensor] = lambda ids: ids
) -> list[Tensor]:
    """fp32 logits [S, V] of each row, on the host. `move` puts token ids on the model's device."""
    found = []
    with torch.no_grad():
        for row in rows:
            ids = move(torch.tensor([list(row)]))
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            found.append(output.logits[0].float().cpu())
    return found


def own_logits(loaded: LoadedModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits of rows as the model computes them that was trained."""
    with eval_mode(loaded.model), autocast(loaded):
        return logits_of_rows(loaded.model, rows, loaded.device.upload)


def open_plainly(request: PlainRequest) -> PlainAnswer:
    """Open a result in a new process. Raises NotTriedError (memory, time), EnvironmentProblem (it does not open, or
    lacks weights)."""
    _require_memory(request)
    done = _run(request)
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["nothing was printed"]
        log.warning("opening %s with transformers and peft alone:\n%s", request.name, "\n".join(words))
        if done.returncode < 0:
            raise NotTriedError(f"the process was ended by {signal.Signals(-done.returncode).name}")
        if any(OUT_OF_MEMORY.search(line) for line in words[-5:]):
            raise NotTriedError(f"host memory ran out: {words[-1]}")
        raise _not_open(request, words[-1])
    tensors = load(done.stdout)
    header: dict[str, Any] = json.loads(done.stdout[8 : 8 + int.from_bytes(done.stdout[:8], "little")])
    found = header["__metadata__"]
    lacking = json.loads(found["lacking"])
    if lacking:
        raise _not_open(request, f"{len(lacking)} weights are in no file, such as {lacking[0]}")
    return PlainAnswer([tensors[str(number)] for number in range(len(request.token_rows))], json.loads(found["unread"]))


def _not_open(request: PlainRequest, reason: str) -> EnvironmentProblem:
    tools = "transformers and peft" if request.adapter else "transformers"
    return EnvironmentProblem(
        f"{request.name} does not open with {tools} alone: {reason}",
        expected="a result that opens without Tunedeck",
        fix=REPORT,
    )


def _require_memory(request: PlainRequest) -> None:
    free = psutil.virtual_memory().available
    free = min(free, free_memory_bytes() or free)
    needed = round(request.size_bytes * 1.1) + SPARE_BYTES
    if needed > free:
        raise NotTriedError(
            f"a second copy of the model takes {needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} are free"
        )


def _run(request: PlainRequest) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if not OWN_RANK.match(name)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    try:
        return subprocess.run(
            [sys.executable, "-P", str(LOADER)], input=json.dumps(vars(request)).encode(), capture_output=True,
            check=False, env=environment, timeout=LONGEST_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NotTriedError(f"it took longer than {LONGEST_SECONDS / 60:.0f} minutes") from error
    except OSError as error:
        raise NotTriedError(f"no process could be started: {error.strerror or error}") from error


class Difference(NamedTuple):
    """How far the logits of two models are apart. Rows that only pad the vocabulary are left out."""

    largest: float
    median: float
    """Of the largest differences at each position."""
    logit: float
    """The largest logit."""

    def decisive(self, *, has_routers: bool) -> float:
        """What decides whether they are the same model: in a mixture, rounding may send single tokens to other experts,
        so there it is the median position."""
        return self.median if has_routers else self.largest


def difference_of(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Difference:
    width = min(each.shape[-1] for each in (*ours, *theirs))
    pairs = [(one[:, :width], other[:, :width]) for one, other in zip(ours, theirs, strict=True)]
    apart = torch.cat([(one - other).abs().amax(-1) for one, other in pairs])
    logit = max(float(one.abs().max()) for one, _ in pairs)
    return Difference(float(apart.max()), float(apart.median()), logit)


def compare(ours: Sequence[Tensor], theirs: Sequence[Tensor], compute: torch.dtype, *, has_routers: bool) -> str:
    """A sentence with the largest difference between the logits of a result as we compute them and as others do. Raises
    EnvironmentProblem if they are different models."""
    found = difference_of(ours, theirs)
    told = f"logits of {len(ours)} rows differ by at most {found.largest:.2g} (largest logit {found.logit:.2g})"
    if not found.decisive(has_routers=has_routers) <= ROUNDED.get(compute, OTHER_MODEL) * found.logit:
        raise EnvironmentProblem(
            f"the result, opened without Tunedeck, is not the model that was trained: {told}",
            expected="equal logits, but for rounding",
            fix=REPORT,
        )
    return told


def weight_bytes(model: nn.Module) -> int:
    """Memory that the weights of a whole model take; of a sharded one, too."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def account_of_result(
    folder: Path, unread: Mapping[str, str], opened: str, *, source: str = "result", path: str = ""
) -> WeightAccount:
    """The account of a result in `folder`: its files and tensors, those that no class reads with the reason, and how it
    was opened. `path`: what the account calls the folder."""
    files = tuple(sorted(file.name for file in folder.glob("*.safetensors")))
    count = len(saved_shapes(folder))
    return WeightAccount(source, path or str(folder), files, count, count - len(unread), unread, opened)


def plain_attention(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """The attention with which others compute on a CPU what the attention `name` computes, for each part of a model
    whose parts have different kernels."""
    return attention_by_part(config, name if name in ("eager", "sdpa") else "eager")
