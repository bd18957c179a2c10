"""Loads the model of a run spec, ready to train: base weights straight to the device in their dtype, or quantized to 4
bits (QLoRA), adapters or frozen parameters, gradient checkpointing."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.import_utils import is_flash_linear_attention_available
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from engine.architecture.facts import from_config
from engine.architecture.lookup import added_tokens
from engine.architecture.model_folder import refuse_quantised, stored_quantisation
from engine.budget.predict.recompute import recompute_order
from engine.budget.trace.memory_config import fused_kernels, memory_config_of, wants_fused_kernels
from engine.config.check.data_rules import image_key
from engine.config.files.caches import find_snapshot
from engine.config.files.find import BUILTIN_PREFIX
from engine.config.files.machine import install_command
from engine.config.schema.run import RunSpec
from engine.device.base import Device
from engine.device.oom import retry_on_oom
from engine.errors import EnvironmentProblem, UnknownArchitectureError, UsageError
from engine.model.adapted_experts import AdaptersInGroups
from engine.model.adapted_linear import compute_in_input_dtype
from engine.model.adapters import (
    Coverage,
    add_adapters,
    continue_adapter,
    fused_experts,
    linear_layers,
    router_parameters,
    uncovered,
)
from engine.model.attention import ChosenAttention, attends_to_later_tokens, attention_by_part, choose_attention
from engine.model.config import HUB_ERRORS, auto_class, blaming_own_code, load_config, loading_error
from engine.model.dropout import has_dropout, key_dropout, keyed_dropouts, settle_dropout
from engine.model.dropout_kernel import use_kernel
from engine.model.fused import FusedModules
from engine.model.loaded import LoadedModel
from engine.model.positions import expect_scaled, fix_frequencies, scale_positions
from engine.model.precision import Precision, choose_precision
from engine.model.reference import StartingWeights, find_starting_weights
from engine.model.saved_adapter import OpenedAdapter
from engine.model.surplus import Unread, refuse_foreign, sentence_on, tensors_of, unread_tensors
from engine.model.token_rows import (
    expect_rows_of,
    expect_trained_ends,
    fill_empty_rows,
    grow_embedding,
    replace_row_forward,
    token_ids,
)
from engine.model.tokenizer import check_vocabulary
from engine.model.trained import decoder_of, embedding_rows, freeze_parameters, outside_text
from engine.model.verify import require_mergeable, require_peft_results
from engine.model.weight_account import WeightAccount, account_of_base

__all__ = ["LoadedModel", "load_model"]

DEQUANTISING: dict[str, Any] = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
"""By `quant_method` of the weight files: transformers' settings with which the loaded weights are not quantised."""

SEED_MIXED_IN = 0x7E57
"""Combined with train.seed to seed the initial weights, so that their stream differs from other uses of the seed."""


@dataclass(frozen=True)
class ModelSettings:
    start: StartingWeights
    config: PreTrainedConfig
    precision: Precision
    attention: ChosenAttention
    notices: list[str]
    """What the run does otherwise than its recipe or the model's config says, and why."""
    accounts: list[WeightAccount] = field(default_factory=list)
    """What was read of the base's files."""
    unread: list[Unread] = field(default_factory=list)
    """Their tensors that are in no weight."""


def choose_settings(spec: RunSpec, start: StartingWeights, config: PreTrainedConfig, device: Device) -> ModelSettings:
    """Dtypes, attention kernel, and a copy of `config` with rotary scaling and with dropout that the run does not keep
    at 0.

    Raises EnvironmentProblem or UsageError for an attention kernel that cannot be used, or rotary scaling that does not
    fit the model.
    """
    recipe, config = spec.recipe, copy.deepcopy(config)
    if recipe.model.rope_scaling is not None:
        scale_positions(config, recipe.model.rope_scaling)
    precision = choose_precision(recipe.model, recipe.method, config.model_type, device)
    attention = choose_attention(
        config,
        recipe.model.attention,
        device,
        precision.compute,
        packing=recipe.data.packing,
        deterministic=recipe.train.deterministic,
    )
    notices = settle_dropout(
        config,
        attention.name,
        recipe.model.attention_dropout,
        cuda=device.torch_device.type == "cuda",
        shared=spec.profile.parallel.sequence > 1,
    )
    return ModelSettings(start, config, precision, attention, [*precision.notices, *attention.notices, *notices])


def load_model(
    spec: RunSpec, device: Device, tokenizer: PreTrainedTokenizerBase, place: torch.device | None = None
) -> LoadedModel:
    """Load the base model, add adapters or freeze parameters, enable gradient checkpointing. Call this inside
    `device.activate()`. With `place` "meta" (default: the device) nothing is read and no memory is used.

    UsageError: not a causal language model, no weights, patterns that match nothing, a tokenizer with too many ids.
    EnvironmentProblem: the hub is unreachable or refuses; flash attention or bitsandbytes is missing.
    """
    start = find_starting_weights(spec.recipe.model)
    settings = choose_settings(spec, start, load_config(start, spec.limits.trust_remote_code), device)
    with seeded(spec.recipe.train.seed, device):
        base = _load_base(spec, settings, device, place or device.torch_device)
        ids = token_ids(tokenizer, added_tokens(spec.recipe.model))
        if ids:
            grow_embedding(base, max(tokenizer.get_vocab().values()) + 1)
            fill_empty_rows(base, ids)
        check_vocabulary(tokenizer, embedding_rows(base))
        loaded = assemble(spec, settings, base, device, ids)
        if start.adapter is not None and (place is None or place.type != "meta"):
            require_peft_results(loaded)
            require_mergeable(loaded)
    loaded.tokenizer = tokenizer
    if device.torch_device.type == "cuda" and keyed_dropouts(loaded.model):
        problem = use_kernel(device.torch_device)
        if problem is not None:
            loaded.notices.append(f"dropout uses eleven kernels instead of one, and more memory: {problem}")
    if place is None:
        device.adopt([*loaded.model.parameters(), *loaded.model.buffers()])
    return loaded


def load_and_tell(
    spec: RunSpec, device: Device, tokenizer: PreTrainedTokenizerBase, tell: Callable[[str], None], name: str = "model"
) -> LoadedModel:
    """`load_model` outside training, tried again after an out-of-memory error; `tell` is called with each sentence."""
    tell(f"loading {name}")
    load, told = partial(load_model, spec, device, tokenizer), f"out of memory while loading {name}"
    loaded = retry_on_oom(load, "load", device, lambda _, remedy, attempt: tell(f"{told}: {remedy} {attempt}"))
    for account in loaded.accounts:
        for sentence in account.sentences():
            tell(sentence)
    return loaded


def assemble(
    spec: RunSpec, settings: ModelSettings, base: PreTrainedModel, device: Device, token_ids: list[int] | None = None
) -> LoadedModel:
    """Add adapters to `base`, with rows for the added tokens `token_ids`, or freeze it; set dropout and gradient
    checkpointing. The result has no tokenizer yet.

    UsageError: patterns that match nothing, rotary scaling that the model does not compute, or an adapter that cannot
    be trained further.
    """
    recipe = spec.recipe
    base.config.use_cache = False
    if recipe.model.rope_scaling is not None:
        expect_scaled(base, recipe.model.rope_scaling)
    notices = [*settings.notices, *fix_frequencies(base, recipe.data.max_length)]
    notices += _unread(settings)
    notices += _linear_attention(settings.config, spec.profile.device.kind)
    trained, coverage, opened = _apply_method(spec, settings.start, base, token_ids or [])
    if opened is None:
        notices += uncovered(coverage, str(base.config.get_text_config().model_type), recipe.method)
    key_dropout(trained, calls=has_dropout(settings.config))
    compute_in_input_dtype(trained)
    replace_row_forward(trained)
    loaded = LoadedModel(
        model=trained,
        kind="adapter" if recipe.method.kind == "lora" else "model",
        config=settings.config,
        coverage=coverage,
        device=device,
        precision=settings.precision,
        attention=settings.attention.name,
        base_exists_elsewhere=not has_new_weights(spec, settings.start),
        notices=notices,
        positions_scaled=recipe.model.rope_scaling is not None,
        expert_adapters=AdaptersInGroups(trained) or None,
        attends_to_padding=attends_to_later_tokens(decoder_of(base)),
        accounts=[*settings.accounts, *([] if opened is None else [opened.account])],
        changed_base=() if opened is None else opened.changed_base,
    )
    loaded.model.train()
    loaded.recompute_order = _recompute_order(spec, settings.config)
    asked = recipe.train.gradient_checkpointing
    loaded.set_checkpointing(True if asked == "auto" else asked)  # a plan would have made a number of "auto"
    return loaded


def fuse_modules(loaded: LoadedModel, spec: RunSpec) -> None:
    """Let fused kernels compute what they can of the decoder layers, if the recipe allows it. Their results are to be
    compared with the layers' own before they are relied on (proof `fused`)."""
    if fused_kernels(spec):
        loaded.fused = FusedModules(decoder_of(loaded.base)) or None
    elif wants_fused_kernels(spec):
        loaded.notices.append(
            "norms, gated blocks and rotary embedding run in plain torch, at about 0.8 of the speed; for fused "
            f"kernels: {install_command('cuda', ['liger-kernel'])}"
        )


def _recompute_order(spec: RunSpec, config: PreTrainedConfig) -> tuple[int, ...]:
    """The order that plans assume; empty for a family without a memory formula, whose simulation follows the model."""
    try:
        arch = from_config(config.to_dict())
    except UnknownArchitectureError:
        return ()
    return recompute_order(arch, memory_config_of(arch, spec))


@contextmanager
def seeded(seed: int, device: Device) -> Iterator[None]:
    """Seed torch's random generators inside the block; afterwards restore their former states."""
    cuda = [device.torch_device] if device.torch_device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed ^ SEED_MIXED_IN)
        yield


def _linear_attention(config: PreTrainedConfig, device_kind: str) -> list[str]:
    """A notice if a family's linear attention runs without its kernels, which transformers takes from a package."""
    layers = getattr(config.get_text_config(), "layer_types", None) or ()
    if device_kind != "cuda" or "linear_attention" not in layers or is_flash_linear_attention_available():
        return []
    return [
        "linear attention runs in plain torch, at about half the speed; for fused kernels: "
        f"{install_command('linear-attention', ['flash-linear-attention'])}"
    ]


def _unread(settings: ModelSettings) -> list[str]:
    """A notice on tensors of the base's files that its class does not read. UsageError: they are of another model."""
    if stored_quantisation(settings.config.to_dict()):
        return []  # no result has them: such a base is neither written nor merged
    refuse_foreign(settings.unread, settings.start.base)
    said = sentence_on(settings.unread)
    return [] if said is None else [said]


def has_new_weights(spec: RunSpec, start: StartingWeights) -> bool:
    return start.base.startswith(BUILTIN_PREFIX) or spec.recipe.model.init == "random"


def _load_base(spec: RunSpec, settings: ModelSettings, device: Device, place: torch.device) -> PreTrainedModel:
    start, config = settings.start, settings.config
    attention = attention_by_part(config, settings.attention.name)
    options: dict[str, Any] = {"dtype": settings.precision.weights, "attn_implementation": attention}
    if not has_new_weights(spec, start):  # again: the plan may have been made from a shipped config
        refuse_quantised(spec, config.to_dict(), start.folder)
    if spec.recipe.model.quantize == "nf4":
        options["quantization_config"] = _nf4_config(spec, settings, device)
        return _load_pretrained(spec, settings, options, device.torch_device)
    if has_new_weights(spec, start) or place.type == "meta":
        with place:
            base: PreTrainedModel = auto_class(config).from_config(
                config, trust_remote_code=spec.limits.trust_remote_code, **options
            )
        return base
    stored = stored_quantisation(config.to_dict())
    if stored not in DEQUANTISING:
        return _load_pretrained(spec, settings, options, place)
    base = _load_pretrained(
        spec, settings, {**options, "quantization_config": DEQUANTISING[stored](dequantize=True)}, place
    )
    _set_dtype(base, settings.precision.weights)
    return base


def _set_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the parameters of a model that was loaded dequantised: transformers gives them the dtypes of the file.
    Left in fp32 is what transformers leaves so in other models of this class."""
    kept = {*(model._keep_in_fp32_modules_strict or ())}
    kept |= {*(model._keep_in_fp32_modules or ())} if dtype == torch.float16 else set()
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype and kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _load_pretrained(
    spec: RunSpec, settings: ModelSettings, options: dict[str, Any], place: torch.device
) -> PreTrainedModel:
    start = settings.start
    _expect_safetensors(start)
    if place.type != "cpu":
        options["device_map"] = {"": place}
    base: PreTrainedModel
    try:
        with blaming_own_code(settings.config, start.base):
            base, report = auto_class(settings.config).from_pretrained(
                start.base,
                config=settings.config,
                revision=start.revision or "main",
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=spec.limits.trust_remote_code,
                **options,
            )
    except torch.OutOfMemoryError:
        raise
    except HUB_ERRORS as error:
        raise loading_error(error, start.base) from error
    _expect_complete(start, report)
    folder = start.folder or find_snapshot(start.base, start.revision)
    if folder is not None:
        dequantised = stored_quantisation(settings.config.to_dict()) in DEQUANTISING
        settings.unread.extend(unread_tensors(base, folder, dequantised=dequantised))
        reasons = {each.entry.name: each.reason for each in settings.unread}
        files = tensors_of(folder)
        left = sorted({name for names in files.values() for name in names} & set(report["unexpected_keys"]))
        others = dict.fromkeys(left, f"{type(base).__name__} has no weight of this name")
        settings.accounts.append(account_of_base(start.base, files, {**others, **reasons}))
    return base


def _expect_complete(start: StartingWeights, report: dict[str, Any]) -> None:
    """Raise UsageError if weights are missing or have another shape: transformers would replace them by random ones."""
    missing = sorted(report["missing_keys"])
    misshapen = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    if missing or misshapen:
        what = "missing" if missing else "of a different shape than in config.json"
        raise UsageError(
            f"{len(missing or misshapen)} weights of {start.base} are {what}, such as {(missing or misshapen)[0]}",
            expected="safetensors files with every weight of the config's architecture",
            fix="download or export the model again; an unfinished download lacks files",
        )


def _expect_safetensors(start: StartingWeights) -> None:
    """Refuse a folder without *.safetensors: other formats use pickle, which can run code."""
    if start.folder is None or any(start.folder.glob("*.safetensors")):
        return
    others = sorted(path.name for path in start.folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    found = f"only {', '.join(others[:3])}" if others else "no weights"
    raise UsageError(
        f"{found} in {start.folder}",
        expected="weights as *.safetensors",
        fix="convert them with transformers' save_pretrained, or download the safetensors version of the model",
    )


def _nf4_config(spec: RunSpec, settings: ModelSettings, device: Device) -> BitsAndBytesConfig:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EnvironmentProblem(
            'model.quantize = "nf4" needs bitsandbytes, which is not installed',
            fix=install_command("cuda", ["bitsandbytes"]),
        )
    from bitsandbytes import supported_torch_devices

    if device.torch_device.type not in supported_torch_devices:
        raise EnvironmentProblem(
            f'model.quantize = "nf4": the installed bitsandbytes does not support {device.name}',
            fix='set model.quantize = "none"',
        )
    if spec.recipe.method.kind == "full" or has_new_weights(spec, settings.start):
        raise UsageError(
            'model.quantize = "nf4" needs a frozen base with pretrained weights',
            expected='method.kind = "lora" and model.init = "pretrained"',
            fix='set model.quantize = "none"',
        )
    return nf4_config(settings.precision.compute)


def nf4_config(compute: torch.dtype | None = None) -> BitsAndBytesConfig:
    """How the base is stored in 4 bits. `compute` is the dtype of products, by default bitsandbytes' own."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def _apply_method(
    spec: RunSpec, start: StartingWeights, model: PreTrainedModel, token_ids: list[int]
) -> tuple[Any, Coverage, OpenedAdapter | None]:
    method, freezes = spec.recipe.method, spec.recipe.freezes_router
    routers = router_parameters(model)
    if method.kind == "full":
        if start.adapter is not None:
            raise UsageError(
                f"{start.adapter} is an adapter, and full fine-tuning cannot continue an adapter",
                fix='set method.kind = "lora", or merge the adapter first',
            )
        names = dict(model.named_parameters())
        unseen = () if image_key(spec.recipe) else outside_text(model) & names.keys()
        freeze_parameters(model, method, [*(routers if freezes else ()), *unseen])
        if token_ids:
            expect_trained_ends(model)
        return model, _coverage_of_full(model), None
    model.requires_grad_(False)
    in_full = [*method.also_train, *([] if freezes else routers)]
    if start.adapter is not None:
        try:
            opened, coverage = continue_adapter(model, start.adapter, method, in_full)
        except HUB_ERRORS as error:
            raise loading_error(error, start.adapter, "adapter") from error
        expect_rows_of(opened.model, start.adapter, token_ids)
        return opened.model, coverage, opened
    return *add_adapters(model, method, in_full, token_ids), None


def _coverage_of_full(model: PreTrainedModel) -> Coverage:
    report = Coverage()
    names = dict(model.named_parameters())
    learning = [name for name, parameter in names.items() if parameter.requires_grad]
    report.in_full = ["everything"] if len(learning) == len(names) else learning
    for name, module in linear_layers(model).items():
        if not any(parameter.requires_grad for parameter in module.parameters()):
            report.left_out[name] += 1
    for name, parameter in fused_experts(model).items():
        if not parameter.requires_grad:
            report.experts_left_out[name] += 1
    return report
