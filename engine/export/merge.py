"""Merges an adapter into its base model; the result opens without peft and is compared with the adapter. Uses host
memory only, so the model may exceed device memory; free memory and disk are checked before loading."""

from __future__ import annotations

import gc
import secrets
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch.nn import Parameter
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from engine.budget.advise.staged_plan import MERGE_FACTOR
from engine.budget.architecture.model_folder import refuse_merge_into_quantised
from engine.config.files.cgroups import free_memory_bytes, host_memory_bytes
from engine.device.cpu import CpuDevice
from engine.device.oom import OutOfMemory, retry_on_oom
from engine.errors import EnvironmentProblem, MemoryExhaustedError, UsageError
from engine.export.logits import compare_logits, logits_on_prompts
from engine.model.config import HUB_ERRORS, auto_class, loading_error, processor_files
from engine.model.reference import ADAPTER_CONFIG, base_of_adapter
from engine.model.result_files import save_generation_config
from engine.model.token_rows import grow_for

SHARD_SIZE = "5GB"
"""Largest file of a merged model, as the hub recommends."""

Notify = Callable[[str], None]
"""Function that shows the user a sentence on the progress."""


def merge(adapter: Path, target: Path, notify: Notify, *, trust_remote_code: bool = False) -> int:
    """Write the merged model to `target`, which must not exist; returns its size in bytes.

    Raises UsageError (no adapter, target exists, or base does not fit), EnvironmentProblem (base not fetched, disk too
    small) or MemoryExhaustedError (host memory).
    """
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise UsageError(
            f"{adapter} holds no adapter", expected="the result of a LoRA run", fix="a full model needs no merging"
        )
    if target.exists():
        raise UsageError(f"{target} exists already", fix="name another folder with --out, or remove it")
    base, revision = base_of_adapter(adapter)
    draft = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_space(base, target.parent)
        device = CpuDevice(host_memory_bytes())
        write = partial(_merge, adapter, base, revision, draft, notify, trust_remote_code)
        retry_on_oom(write, "merge", device, _report(notify))
        draft.rename(target)
    except OSError as error:
        raise EnvironmentProblem(
            f"the merged model cannot be written to {target}: {error.strerror or error}",
            fix="make room on that disk, or name another folder with --out",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


def _merge(
    adapter: Path, base: str, revision: str | None, draft: Path, notify: Notify, trust_remote_code: bool
) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    notify(f"loading {base}")
    # An adapter trained with scaled positions lies beside the config that its base needs.
    config = str(adapter) if (adapter / "config.json").is_file() else base
    model = _base(base, revision, config, trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(str(adapter))
    grow_for(model, adapter)
    wrapped = PeftModel.from_pretrained(model, str(adapter))
    before = logits_on_prompts(wrapped, tokenizer)
    notify("merging")
    merged = merge_rounded_once(wrapped)
    notify("writing")
    merged.save_pretrained(draft, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(draft)
    save_generation_config(draft, merged.generation_config, tokenizer)
    for path in processor_files(str(adapter), None) or processor_files(base, revision):
        shutil.copyfile(path, draft / path.name)
    del model, wrapped, merged
    gc.collect()  # the merged model is opened again, and must not lie in memory twice
    notify(compare_logits(before, logits_on_prompts(_base(str(draft), None, str(draft), trust_remote_code), tokenizer)))


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


def _base(base: str, revision: str | None, config_at: str, trust_remote_code: bool) -> PreTrainedModel:
    try:
        found = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
        config = AutoConfig.from_pretrained(config_at, **found)
        refuse_merge_into_quantised(config.to_dict(), base)
        model: PreTrainedModel = auto_class(config).from_pretrained(
            base, config=config, dtype="auto", use_safetensors=True, **found
        )
    except torch.OutOfMemoryError:
        raise
    except HUB_ERRORS as error:
        raise loading_error(error, base) from error
    return model


def _require_space(base: str, folder: Path) -> None:
    """Raise if host memory or disk is too small for a local base; nothing is checked for a hub id."""
    size_bytes = sum(file.stat().st_size for file in Path(base).glob("*.safetensors"))
    free_bytes = psutil.virtual_memory().available
    free_bytes = min(free_bytes, free_memory_bytes() or free_bytes)
    if size_bytes * MERGE_FACTOR > free_bytes:
        raise MemoryExhaustedError(
            f"merging {base} takes about {size_bytes * MERGE_FACTOR / 2**30:.1f} GiB of host memory, "
            f"{free_bytes / 2**30:.1f} GiB are free",
            fix="close other programs, or merge on a machine with more memory",
        )
    disk_bytes = shutil.disk_usage(folder).free
    if size_bytes > disk_bytes:
        raise EnvironmentProblem(
            f"the merged model takes about {size_bytes / 2**30:.1f} GiB; {folder} has {disk_bytes / 2**30:.1f} GiB",
            fix="make room on that disk, or name another folder with --out",
        )


def _report(notify: Notify) -> Callable[[OutOfMemory, str, int], None]:
    def report(failure: OutOfMemory, remedy: str, number: int) -> None:
        notify(f"host memory ran out in {failure.phase} (attempt {number}): {remedy}")

    return report
