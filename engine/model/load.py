"""From a run spec to a model ready to train: base weights on the device, adapters or frozen parts, checkpointing.

Weights go straight to the device in their dtype; nothing is offloaded. What is done with the model afterwards (saving,
restoring, listing what learns) is in `engine.model.loaded`.

Try: `tunedeck train -p demo -r demo`, or `python -m pytest tests/model/test_load.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine.budget.tower_parameters import in_tower
from engine.device.base import Device
from engine.errors import EnvironmentProblem, UsageError
from engine.model.adapters import Coverage, add_adapters, continue_adapter, fused_experts, linear_layers
from engine.model.attention import looks_ahead, resolve_attention
from engine.model.config import auto_class, load_config
from engine.model.dropout import key_dropout
from engine.model.freezing import freeze_parameters
from engine.model.hub import HUB_ERRORS, explain
from engine.model.loaded import LoadedModel, embedding_rows
from engine.model.precision import Precision, choose_precision
from engine.model.reference import BUILTIN_PREFIX, Starting, find_start
from engine.model.tokenizer import check_vocabulary
from engine.spec.check.images import image_key
from engine.spec.schema.run import RunSpec

__all__ = ["LoadedModel", "load_model"]

SEED_MIXED_IN = 0x7E57
"""Keeps the stream of initial weights apart from other uses of train.seed."""


def load_model(
    spec: RunSpec, device: Device, tokenizer: PreTrainedTokenizerBase, place: torch.device | None = None
) -> LoadedModel:
    """Load the base, add adapters or freeze, switch on checkpointing. Call it inside `device.activate()`.

    The weights go to `place`, by default to the device. On "meta" nothing is read and nothing takes memory.

    Raises:
        UsageError: not a causal language model, no weights, patterns that match nothing, a tokenizer too large.
        EnvironmentProblem: hub unreachable or refusing, flash attention or bitsandbytes missing.
    """
    recipe = spec.recipe
    start = find_start(recipe.model)
    config = load_config(start, spec.limits.trust_remote_code)
    precision = choose_precision(recipe.model, recipe.method, config.model_type, device)
    attention = resolve_attention(config, recipe.model.attention, device, precision.compute)
    with seeded(recipe.train.seed, device):
        model = _base(spec, start, config, precision, attention, device, place or device.torch_device)
        check_vocabulary(tokenizer, embedding_rows(model))
        loaded = assemble(spec, start, config, model, device, precision, attention)
    loaded.tokenizer = tokenizer
    if place is None:
        device.adopt([*loaded.model.parameters(), *loaded.model.buffers()])
    return loaded


def assemble(
    spec: RunSpec,
    start: Starting,
    config: PreTrainedConfig,
    base: PreTrainedModel,
    device: Device,
    precision: Precision,
    attention: str,
) -> LoadedModel:
    """Adapters or frozen parts, dropout and checkpointing around a base that is there; the tokenizer is still missing.

    Raises:
        UsageError: patterns that match nothing, an adapter where none can go on.
    """
    recipe = spec.recipe
    base.config.use_cache = False
    trained, coverage = _what_learns(spec, start, base)
    key_dropout(trained)
    loaded = LoadedModel(
        model=trained,
        kind="adapter" if recipe.method.kind == "lora" else "model",
        config=config,
        coverage=coverage,
        device=device,
        precision=precision,
        attention=attention,
        base_exists_elsewhere=not _made_here(spec, start),
        notices=list(precision.notices),
        sees_padding=looks_ahead(base.get_decoder()),
    )
    loaded.model.train()
    loaded.set_checkpointing(recipe.train.gradient_checkpointing)
    return loaded


@contextmanager
def seeded(seed: int, device: Device) -> Iterator[None]:
    """Initial weights depend on the seed alone, and leave the generators as they were."""
    cuda = [device.torch_device] if device.torch_device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed ^ SEED_MIXED_IN)
        yield


def _made_here(spec: RunSpec, start: Starting) -> bool:
    return start.base.startswith(BUILTIN_PREFIX) or spec.recipe.model.init == "random"


def _base(
    spec: RunSpec,
    start: Starting,
    config: PreTrainedConfig,
    precision: Precision,
    attention: str,
    device: Device,
    place: torch.device,
) -> PreTrainedModel:
    if spec.recipe.model.quantize == "nf4":
        return _nf4(spec, start, config, precision, attention, device)
    if _made_here(spec, start) or place.type == "meta":
        with place:
            made: PreTrainedModel = auto_class(config).from_config(
                config,
                dtype=precision.weights,
                attn_implementation=attention,
                trust_remote_code=spec.limits.trust_remote_code,
            )
        return made
    return _pretrained(spec, start, config, {"dtype": precision.weights, "attn_implementation": attention}, place)


def _pretrained(
    spec: RunSpec, start: Starting, config: PreTrainedConfig, options: dict[str, Any], place: torch.device
) -> PreTrainedModel:
    _expect_safetensors(start)
    if place.type != "cpu":
        options["device_map"] = {"": place}
    model: PreTrainedModel
    try:
        model, report = auto_class(config).from_pretrained(
            start.base,
            config=config,
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
        raise explain(error, start.base) from error
    _expect_complete(start, report)
    return model


def _expect_complete(start: Starting, report: dict[str, Any]) -> None:
    """transformers fills missing weights with random ones and goes on; nobody fine-tunes that on purpose."""
    missing = sorted(report["missing_keys"])
    misshapen = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    if missing or misshapen:
        what = "missing" if missing else "of another shape than config.json says"
        raise UsageError(
            f"{len(missing or misshapen)} weights of {start.base} are {what}, such as {(missing or misshapen)[0]}",
            expected="safetensors files with every weight of the config's architecture",
            fix="download or export the model again; an unfinished download leaves files out",
        )


def _expect_safetensors(start: Starting) -> None:
    """A folder must hold *.safetensors: no other format is opened, as pickle can run code."""
    if start.folder is None or any(start.folder.glob("*.safetensors")):
        return
    others = sorted(path.name for path in start.folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    found = f"only {', '.join(others[:3])}" if others else "no weights"
    raise UsageError(
        f"{found} in {start.folder}",
        expected="weights as *.safetensors",
        fix="convert them with transformers' save_pretrained, or download the safetensors version of the model",
    )


def _nf4(
    spec: RunSpec, start: Starting, config: PreTrainedConfig, precision: Precision, attention: str, device: Device
) -> PreTrainedModel:
    if device.torch_device.type != "cuda":
        raise EnvironmentProblem(
            f'model.quantize = "nf4" needs a CUDA device, this is {device.name}', fix='set model.quantize = "none"'
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EnvironmentProblem(
            'model.quantize = "nf4" needs bitsandbytes, which is not installed', fix='pip install "tunedeck[cuda]"'
        )
    if spec.recipe.method.kind == "full" or _made_here(spec, start):
        raise UsageError(
            'model.quantize = "nf4" holds a frozen base with real weights',
            expected='method.kind = "lora" and model.init = "pretrained"',
            fix='set model.quantize = "none"',
        )
    from transformers import BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision.compute,
    )
    options = {"dtype": precision.weights, "attn_implementation": attention, "quantization_config": four_bits}
    return _pretrained(spec, start, config, options, device.torch_device)


def _what_learns(spec: RunSpec, start: Starting, model: PreTrainedModel) -> tuple[Any, Coverage]:
    method, moe = spec.recipe.method, spec.recipe.moe
    routers = router_parameters(model)
    if method.kind == "full":
        if start.adapter is not None:
            raise UsageError(
                f"{start.adapter} is an adapter, which full fine-tuning does not go on from",
                fix='set method.kind = "lora", or merge the adapter first',
            )
        unseen = () if image_key(spec.recipe) else [name for name, _ in model.named_parameters() if in_tower(name)]
        freeze_parameters(model, method, [*(routers if moe.freeze_router else ()), *unseen])
        return model, _coverage_of_full(model)
    model.requires_grad_(False)
    if start.adapter is not None:
        return _continued(spec, start.adapter, model)
    in_full = [*method.also_train, *([] if moe.freeze_router else routers)]
    return add_adapters(model, method, in_full)


def _continued(spec: RunSpec, adapter: str, model: PreTrainedModel) -> tuple[Any, Coverage]:
    try:
        return continue_adapter(model, adapter, spec.recipe.method)
    except HUB_ERRORS as error:
        raise explain(error, adapter, "adapter") from error


def router_parameters(model: PreTrainedModel) -> list[str]:
    """Names of the parameters that choose experts: the gate or router beside a module called experts."""
    blocks = {name.rpartition(".")[0] for name, _ in model.named_modules() if name.endswith(".experts")}
    return [
        name
        for name, _ in model.named_parameters()
        for block in [name.partition(".gate.")[0] if ".gate." in name else name.partition(".router.")[0]]
        if block in blocks and block != name
    ]


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
