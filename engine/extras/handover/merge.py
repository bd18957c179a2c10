"""Merges an adapter into its base model; the result opens without peft and is compared with the adapter. Uses host
memory only, so the model may exceed device memory; free memory and disk are checked before loading."""

from __future__ import annotations

import errno
import gc
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engine.architecture.model_folder import ADAPTER_CONFIG, refuse_merge_into_quantised
from engine.budget.advise.staged_plan import MERGE_FACTOR
from engine.config.files.cgroups import free_memory_bytes, host_memory_bytes
from engine.config.files.machine import install_command
from engine.device.cpu import CpuDevice
from engine.device.oom import OutOfMemory, retry_on_oom
from engine.errors import EnvironmentProblem, MemoryExhaustedError, UsageError
from engine.journal.directory import RunDirectory
from engine.journal.files import held_draft
from engine.journal.liveness import write_after_end
from engine.model.adapters import NOT_MERGED, router_modules, shared_weights, untie_adapted_ends
from engine.model.config import HUB_ERRORS, auto_class, loading_error, processor_files
from engine.model.load import nf4_config
from engine.model.reference import base_of_adapter
from engine.model.reopened import (
    OTHER_MODEL,
    PROMPTS,
    NotTriedError,
    PlainRequest,
    account_of_result,
    difference_of,
    logits_of_rows,
    open_plainly,
    plain_attention,
    token_rows,
    weight_bytes,
)
from engine.model.result_files import save_generation_config
from engine.model.saved_adapter import open_adapter
from engine.model.surplus import base_folder, complete_result, sentence_on, to_copy
from engine.model.token_rows import grow_for
from engine.model.weight_account import WeightAccount


def logits_on_prompts(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    """fp32 logits [S, V] of each of PROMPTS."""
    return logits_of_rows(model.eval(), token_rows(tokenizer))


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    return difference_of(first, second).largest


def compare_bases(seen: list[Tensor], kept: list[Tensor], rounded: list[Tensor]) -> str:
    """A sentence on two merged models of an adapter that was trained on a 4-bit base, each beside that training:
    merged onto the base's own weights, and onto the base rounded to 4 bits and back."""
    largest = max(float(each.abs().max()) for each in seen)
    return (
        "largest difference of logits from the adapter on its 4-bit base: "
        f"{largest_difference(seen, kept):.2g} if merged into the original weights, "
        f"{largest_difference(seen, rounded):.2g} if merged into the dequantised ones (largest logit "
        f"{largest:.2g})"
    )


def compare_logits(adapter: list[Tensor], merged: list[Tensor], *, has_routers: bool) -> str:
    """A sentence with the largest difference. Raises EnvironmentProblem if the two are different models: by the largest
    difference, and in a mixture, where rounding may send single tokens to other experts, by the median position."""
    found = difference_of(adapter, merged)
    same = sum(int(one[-1].argmax() == other[-1].argmax()) for one, other in zip(adapter, merged, strict=True))
    told = (
        f"largest difference between merged and adapter logits on {len(PROMPTS)} prompts: {found.largest:.2g} "
        f"(largest logit {found.logit:.2g}); same next token on {same} of {len(PROMPTS)}"
    )
    if not found.decisive(has_routers=has_routers) <= OTHER_MODEL * found.logit:
        raise EnvironmentProblem(
            told,
            expected="a merged model with the same outputs as the adapter",
            fix="serve the adapter, and report this",
        )
    return told


SHARD_SIZE = "5GB"
"""Largest file of a merged model, as the hub recommends."""

Notify = Callable[[str], None]
"""Function that shows the user a sentence on the progress."""


@dataclass(frozen=True)
class Bases:
    """The weights onto which an adapter of a 4-bit base may be merged."""

    four_bit: bool = False
    """Whether the adapter was trained on the base in 4 bits (model.quantize = "nf4")."""
    dequantized: bool = False
    """Merge onto what the adapter saw: the base rounded to 4 bits and back. Else onto the base's own weights."""


PLAIN = Bases()


class Merged(NamedTuple):
    """What merging has written."""

    size_bytes: int
    account: WeightAccount

    def record(self, run: RunDirectory, notify: Notify) -> None:
        """Write the account into the journal of the run whose adapter was merged."""
        if not write_after_end(run, "weights", **self.account.event()):
            notify(f"the journal of {run.name} does not have the account of the merged model: a process writes it")


def merge(
    adapter: Path, target: Path, notify: Notify, *, bases: Bases = PLAIN, trust_remote_code: bool = False,
    beside: Mapping[str, str] | None = None,
) -> Merged:  # fmt: skip
    """Write the merged model to `target`, which must not exist, and the texts `beside` by file name.

    Raises UsageError (no adapter, target exists, or base does not fit), EnvironmentProblem (base not fetched, disk too
    small) or MemoryExhaustedError (host memory).
    """
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise UsageError(
            f"{adapter} does not contain an adapter",
            expected="the result of a LoRA run",
            fix="the result is a full model, which needs no merging",
        )
    if target.exists():
        raise UsageError(f"{target} already exists", fix="choose another folder with --out, or remove it")
    if bases.dequantized and not bases.four_bit:
        raise UsageError("the adapter's base was not a 4-bit model", fix="leave out --onto dequantized")
    base, revision = base_of_adapter(adapter)
    if bases.four_bit and find_spec("bitsandbytes") is None:
        fix = install_command("cuda", ["bitsandbytes"])
        if bases.dequantized:
            raise EnvironmentProblem("--onto dequantized needs bitsandbytes, which is not installed", fix=fix)
        notify(f"the merged model is not compared with the 4-bit base, because bitsandbytes is missing: {fix}")
        bases = PLAIN
    try:
        own = adapter.parent  # the run, which is not made again where it was moved meanwhile
        with held_draft(target, own if own in target.parents[:2] else None) as draft:
            _require_space(base, target.parent)
            device = CpuDevice(host_memory_bytes())
            source = _Source(adapter, base, revision, trust_remote_code)
            write = partial(_merge, source, draft, bases, notify, target)
            account = retry_on_oom(write, "merge", device, _report(notify))
            for name, text in (beside or {}).items():
                (draft / name).write_text(text, "utf-8")
            draft.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.is_dir():
            raise UsageError(f"{target} already exists: another process wrote it", fix="use it unchanged") from error
        raise EnvironmentProblem(
            f"the merged model cannot be written to {target}: {error.strerror or error}",
            fix="free space on that disk, or choose another folder with --out",
        ) from error
    return Merged(sum(file.stat().st_size for file in target.rglob("*") if file.is_file()), account)


@dataclass(frozen=True)
class _Source:
    adapter: Path
    base: str
    revision: str | None
    trust_remote_code: bool

    @property
    def config_at(self) -> str:
        """An adapter trained with scaled positions is in one folder with the config that its base needs."""
        return str(self.adapter) if (self.adapter / "config.json").is_file() else self.base

    def merged(
        self, tokenizer: PreTrainedTokenizerBase, notify: Notify, *, four_bit: bool
    ) -> tuple[PreTrainedModel, list[Tensor]]:
        """The merged model, and the logits of the adapter on its base before that."""
        notify(f"loading {self.base}" + (" in 4 bits, and back" if four_bit else ""))
        model = _base(self.base, self.revision, self.config_at, self.trust_remote_code, four_bit=four_bit)
        grow_for(model, self.adapter)
        wrapped = open_adapter(model, str(self.adapter)).model
        untie_adapted_ends(wrapped)
        refuse_shared(wrapped, self.base)
        before = logits_on_prompts(wrapped, tokenizer)
        notify("merging")
        return merge_rounded_once(wrapped), before


def _request(source: _Source, draft: Path, merged: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PlainRequest:
    return PlainRequest(
        name="the merged model", model=str(draft), config=str(draft), auto_class=auto_class(merged.config).__name__,
        token_rows=token_rows(tokenizer),
        attention=plain_attention(merged.config, merged.config._attn_implementation or ""),
        trust_remote_code=source.trust_remote_code, size_bytes=weight_bytes(merged),
    )  # fmt: skip


def _merge(source: _Source, draft: Path, bases: Bases, notify: Notify, target: Path) -> WeightAccount:
    shutil.rmtree(draft, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(str(source.adapter))
    other: list[Tensor] = []
    if bases.four_bit:  # the way that was not chosen, for its difference alone
        model, other_before = source.merged(tokenizer, notify, four_bit=not bases.dequantized)
        other = logits_on_prompts(model, tokenizer)
        del model
        gc.collect()
    merged, before = source.merged(tokenizer, notify, four_bit=bases.dequantized)
    notify("writing")
    merged.save_pretrained(draft, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(draft)
    save_generation_config(draft, merged.generation_config, tokenizer)
    if not source.adapter.is_dir():  # the libraries would take the path for a name on the hub
        raise FileNotFoundError(errno.ENOENT, "it was moved while it was merged", str(source.adapter))
    for path in processor_files(str(source.adapter), None) or processor_files(source.base, source.revision):
        shutil.copyfile(path, draft / path.name)
    unread = complete_result(draft, source.base, source.revision, merged)
    copied, said = {each.entry.name: each.reason for each in to_copy(unread)}, sentence_on(unread)
    if said is not None:
        notify(said)
    routed, request = bool(router_modules(merged)), _request(source, draft, merged, tokenizer)
    del merged
    gc.collect()  # the merged model is opened by another process, and must not lie in memory twice
    try:
        after = open_plainly(request).logits
    except NotTriedError as reason:
        opened = f"not opened: {reason}"
        notify(f"the merged model is {opened}")
        return account_of_result(draft, copied, opened, source="merged", path=str(target))
    told = compare_logits(before, after, has_routers=routed)
    notify(told)
    if bases.four_bit:
        seen = before if bases.dequantized else other_before
        kept, rounded = (other, after) if bases.dequantized else (after, other)
        notify(compare_bases(seen, kept, rounded))
    return account_of_result(draft, copied, f"with transformers alone: {told}", source="merged", path=str(target))


def refuse_shared(model: PeftModel, base: str) -> None:
    """Raise UsageError if adapters are on layers of the model that share a weight."""
    layers = {
        name.removeprefix("base_model.model."): module.get_base_layer()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    }
    shared = shared_weights({name: layer for name, layer in layers.items() if isinstance(layer, nn.Module)})
    if shared:
        raise UsageError(
            f"layers of {base} share a weight ({shared[0]} and others); {NOT_MERGED}",
            fix="open the adapter with peft instead, or train without adapters on these layers (method.exclude)",
        )


def merge_rounded_once(model: PeftModel) -> PreTrainedModel:
    """The base with W + s·B·A for each weight W with an adapter, computed in fp32 and rounded to W's dtype once; peft
    alone rounds s·B·A to W's dtype first. One layer at a time is held in fp32."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            _merge_in_fp32(module)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        # What has no adapter of its own is left: modules that were trained in full, and the wrappers.
        merged: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    return merged


def _merge_in_fp32(module: LoraLayer) -> None:
    if isinstance(module, ParamWrapper):
        parameters: list[Parameter] = [getattr(module.get_base_layer(), module.parameter_name)]
    else:
        parameters = list(module.get_base_layer().parameters(recurse=False))
    dtypes = [parameter.dtype for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    # With safe_merge, peft raises an error if a merged weight is not finite.
    module.merge(safe_merge=True)
    for parameter, dtype in zip(parameters, dtypes, strict=True):
        parameter.data = parameter.data.to(dtype)


def _base(
    base: str, revision: str | None, config_at: str, trust_remote_code: bool, *, four_bit: bool = False
) -> PreTrainedModel:
    options = {"quantization_config": nf4_config(), "device_map": {"": "cpu"}} if four_bit else {}
    try:
        found = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
        config = AutoConfig.from_pretrained(config_at, **found)
        refuse_merge_into_quantised(config.to_dict(), base, base_folder(base, revision))
        model: PreTrainedModel = auto_class(config).from_pretrained(
            base, config=config, dtype="auto", use_safetensors=True, **found, **options
        )
    except torch.OutOfMemoryError:
        raise
    except HUB_ERRORS as error:
        raise loading_error(error, base) from error
    return model.dequantize() if four_bit else model


def _require_space(base: str, folder: Path) -> None:
    """Raise if host memory or disk is too small for a local base; nothing is checked for a hub id."""
    size_bytes = sum(file.stat().st_size for file in Path(base).glob("*.safetensors"))
    free_bytes = psutil.virtual_memory().available
    free_bytes = min(free_bytes, free_memory_bytes() or free_bytes)
    if size_bytes * MERGE_FACTOR > free_bytes:
        raise MemoryExhaustedError(
            f"merging {base} takes about {size_bytes * MERGE_FACTOR / 2**30:.1f} GiB of host memory, but "
            f"{free_bytes / 2**30:.1f} GiB are free",
            fix="close other programs, or merge on a machine with more memory",
        )
    disk_bytes = shutil.disk_usage(folder).free
    if size_bytes > disk_bytes:
        raise EnvironmentProblem(
            f"the merged model takes about {size_bytes / 2**30:.1f} GiB, but {folder} has "
            f"{disk_bytes / 2**30:.1f} GiB free",
            fix="free space on that disk, or choose another folder with --out",
        )


def _report(notify: Notify) -> Callable[[OutOfMemory, str, int], None]:
    def report(failure: OutOfMemory, remedy: str, number: int) -> None:
        notify(f"host memory ran out in {failure.phase} (attempt {number}): {remedy}")

    return report
