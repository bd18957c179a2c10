"""Adds LoRA adapters with peft, reports which modules got one, and says which linear layers cannot have one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.architecture.families import (
    SCAN_WEIGHTS,
    expert_reason,
    no_adapter_on,
    scan_reason,
    untrained_experts,
)
from engine.architecture.token_rows import frozen_tokens
from engine.budget.trace.trainable import ATTENTION_PARTS
from engine.config.name_patterns import (
    layer_of,
    matches_end,
    no_match,
    nothing_learns,
    require_layers,
    require_trained_matches,
)
from engine.config.schema.recipe import Method
from engine.errors import UsageError
from engine.model.peft_names import names_of_experts, not_found_again
from engine.model.saved_adapter import ADAPTER, OpenedAdapter, open_adapter, task_type_of
from engine.model.token_rows import row_targets
from engine.model.trained import frozen_names, language_model, outside_text, select


def layers_without_adapter(model: PreTrainedModel, linears: Iterable[str]) -> dict[str, str]:
    """{dotted name: reason} for those of `linears` that cannot have an adapter. These are routers, which return more
    than one tensor; layers that peft takes for fused experts by their names, or does not find again in a saved adapter;
    layers whose weights a Mamba layer's kernels read directly; and layers that do not compute x·Wᵀ, such as the grouped
    ones of DeepSeek V4, to whose output peft cannot add."""
    model_type = str(model.config.get_text_config().model_type)
    linears, routers = list(linears), router_modules(model)
    experts = names_of_experts(model, linears)
    lost = not_found_again(model, [name for name in linears if name.rpartition(".")[2] not in experts])
    reasons: dict[str, str] = {}
    for name in linears:
        parent, _, last = name.rpartition(".")
        if name in routers:
            reasons[name] = "it is a router; train it in full with moe.freeze_router = false"
        elif last in experts:
            reasons[name] = expert_reason(model_type)
        elif name in lost:
            reasons[name] = f"peft renames and loses it when it loads the adapter of a {model.config.model_type} model"
        elif last in SCAN_WEIGHTS and _scans(model.get_submodule(parent)):
            reasons[name] = scan_reason(model_type)
        elif not _is_matrix_product(model.get_submodule(name)):
            reasons[name] = (
                f"{type(model.get_submodule(name)).__name__} is not a plain matrix product, which peft needs"
            )
    return reasons


def expert_blocks(model: PreTrainedModel) -> list[str]:
    return [name.rpartition(".")[0] for name, _ in model.named_modules() if name.endswith(".experts")]


def router_parameters(model: PreTrainedModel) -> list[str]:
    """Names of the parameters of modules named "gate" or "router" in the same block as a module named "experts"."""
    blocks = set(expert_blocks(model))
    return [
        name
        for name, _ in model.named_parameters()
        for block in [name.partition(".gate.")[0] if ".gate." in name else name.partition(".router.")[0]]
        if block in blocks and block != name
    ]


def router_modules(model: PreTrainedModel) -> set[str]:
    return {name.rpartition(".")[0] for name in router_parameters(model)}


def _is_matrix_product(module: nn.Module) -> bool:
    """Whether a linear layer computes [rows, outputs] from [rows, inputs]: tried where its class has a forward of its
    own. Quantised weights are not tried: their kernels need a GPU."""
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return True
    if type(module.weight) is not nn.Parameter:
        return True
    with torch.no_grad():
        try:
            made = module(module.weight.new_zeros((2, module.in_features)))
        except (RuntimeError, LookupError):
            return False
    return isinstance(made, torch.Tensor) and made.shape == (2, module.out_features)


def _scans(module: nn.Module) -> bool:
    """Whether a module is a Mamba layer: it has the decay rates A and the skip weights D of a selective scan."""
    return hasattr(module, "A_log") and hasattr(module, "D")


@dataclass
class Coverage:
    """How many modules are trained and how many are not, by the last two parts of their names ("self_attn.q_proj")."""

    adapted: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    """Linear layers without adapters (LoRA) or with frozen weights (full fine-tuning)."""
    experts_adapted: Counter[str] = field(default_factory=Counter)
    experts_left_out: Counter[str] = field(default_factory=Counter)
    """Fused expert weights (one 3-D parameter for all experts of a layer)."""
    in_full: list[str] = field(default_factory=list)
    """Modules (LoRA) or parameters (full) that are trained in full."""
    impossible: dict[str, str] = field(default_factory=dict)
    """Why linear layers cannot have an adapter, by name."""
    shared: list[str] = field(default_factory=list)
    """Those with an adapter whose weight is also that of another one with an adapter."""

    def text(self) -> str:
        """Lines that say which layers have adapters, which modules are trained in full, and which are left out."""
        lines = [_line("adapters on", self.adapted)] if self.adapted else []
        if self.experts_adapted:
            lines.append(_line("adapters on fused experts", self.experts_adapted))
        if self.in_full:
            lines.append(f"trained in full: {', '.join(self.in_full)}")
        if self.left_out:
            lines.append(_line("linear layers without adapter", self.left_out))
        if self.experts_left_out:
            name = next(iter(self.experts_left_out))
            lines.append(
                _line("fused experts without adapter", self.experts_left_out)
                + f' (name them in method.targets to adapt them, such as "{name}")'
            )
        return "\n".join(lines)


def uncovered(coverage: Coverage, model_type: str, method: Method) -> list[str]:
    """What targets = "all-linear" leaves out, in sentences: fused experts, and layers that cannot have an adapter."""
    found = [untrained_experts(model_type, method)] if coverage.experts_left_out else []
    for reason in dict.fromkeys(coverage.impossible.values()) if method.targets == "all-linear" else ():
        names = Counter(_layer_type(name) for name, each in coverage.impossible.items() if each == reason)
        found.append(f"{_line('no adapters on', names)}: {reason}")
    if coverage.shared:
        names = Counter(map(_layer_type, coverage.shared))
        found.append(f"{_line('the result cannot be merged; layers that share a weight', names)}; {NOT_MERGED}")
    return [sentence for sentence in found if sentence]


NOT_MERGED = "each has a separate adapter, and one weight cannot absorb both"


def shared_weights(linears: Mapping[str, nn.Module]) -> list[str]:
    """The names of those linear layers whose weight is also that of another one of them, such as Zamba's, whose blocks
    of attention are one."""
    counts = Counter(id(module.weight) for module in linears.values())
    return [name for name, module in linears.items() if counts[id(module.weight)] > 1]


def untie_adapted_ends(model: PeftModel) -> None:
    """Give the head a copy of the embedding's weight where they share one and either has an adapter: merged into one
    weight, the adapter of one end would change the other."""
    base = cast(PreTrainedModel, model.get_base_model())
    ends = [base.get_input_embeddings(), language_model(base).get_output_embeddings()]
    embedding, head = (cast(Any, end.get_base_layer() if isinstance(end, LoraLayer) else end) for end in ends)
    if head is None or head.weight is not embedding.weight or not any(isinstance(end, LoraLayer) for end in ends):
        return
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (base.config, base.config.get_text_config()):
        config.tie_word_embeddings = False
    own = {name for name, each in base.named_parameters() if each is head.weight}
    own = {name.replace(".base_layer.", ".") for name in own}
    base.all_tied_weights_keys = {
        name: other for name, other in (base.all_tied_weights_keys or {}).items() if name not in own
    }


def add_adapters(
    model: PreTrainedModel, method: Method, in_full: Sequence[str] = (), token_ids: list[int] | None = None
) -> tuple[PeftModel, Coverage]:
    """Wrap `model` with new adapters; parameters that match the globs `in_full` are trained in full, and of embedding
    and head the rows `token_ids`. UsageError: a pattern that matches nothing, or modules that cannot be trained this
    way."""
    linears = linear_layers(model)
    experts = fused_experts(model)
    impossible = layers_without_adapter(model, linears)
    frozen = frozen_names(model, method)
    whole = whole_modules(model, in_full, frozen, method.also_train)
    chosen = choose_targets(linears, experts, method, impossible, outside_text(model))
    # peft puts no adapter on what it trains in full.
    chosen = [name for name in chosen if not any(name == each or name.startswith(f"{each}.") for each in whole)]
    chosen = [name for name in chosen if not _is_frozen(name, frozen)]
    if not chosen and not whole:
        raise nothing_learns()
    expert_names = [name for name in chosen if name in experts]
    if expert_names:
        _refuse_on_experts(method)
    rows = row_targets(model, token_ids, whole) if token_ids else {}
    for name in rows:
        if _is_frozen(name, frozen):
            raise frozen_tokens(name)
    config = LoraConfig(
        r=method.rank,
        lora_alpha=method.effective_alpha,  # type: ignore[arg-type]  # peft says int, and takes any number
        lora_dropout=method.dropout,
        target_modules=[name for name in chosen if name not in experts],
        target_parameters=expert_names or None,
        modules_to_save=whole or None,
        trainable_token_indices=rows or None,
        use_dora=method.dora,
        use_rslora=method.rslora,
        bias="none",
        task_type=task_type_of(model),
        fan_in_fan_out=any(isinstance(linears.get(name), Conv1D) for name in chosen),
        ensure_weight_tying=_touches_tied(model, whole),
    )
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=method.adapter_dtype == "float32")
    set_adapter_dtype(wrapped, method)
    _expect_on(wrapped, [name for name in chosen if name not in experts])
    in_full = [*(config.modules_to_save or []), *(f"{len(ids)} rows of {name}" for name, ids in rows.items())]
    return wrapped, replace(coverage_of(wrapped, linears, experts, in_full), impossible=impossible)


def _is_frozen(name: str, frozen: Container[str]) -> bool:
    """Whether the weight of a module, or fused weights, are among the names of frozen parameters."""
    return name in frozen or f"{name}.weight" in frozen


def _refuse_on_experts(method: Method) -> None:
    """peft cannot apply dropout or DoRA to fused experts."""
    for key, value, default in (("dropout", method.dropout, "0"), ("dora", method.dora, "false")):
        if value:
            raise UsageError(
                f"method.{key} cannot be applied to fused experts",
                fix=f"set method.{key} = {default}, or leave out experts",
            )


def _expect_on(model: PeftModel, modules: Sequence[str]) -> None:
    """Raise UsageError if one of `modules` has no adapter: with fused experts, peft reads gate_proj, up_proj and
    down_proj as names of the experts' weights (0.21, `utils/transformers_weight_conversion.py`), and skips plain layers
    so named."""
    adapted = _adapted_modules(model)
    missing = [name for name in modules if name not in adapted]
    if missing:
        raise UsageError(
            f"peft puts the adapter on fused experts, not on {missing[0]} ({len(missing)} such layers)",
            expected="targets that exist only once in this family",
            fix='set method.targets = "attention"',
        )


def continue_adapter(
    model: PreTrainedModel, adapter: str, method: Method, in_full: Sequence[str] = ()
) -> tuple[OpenedAdapter, Coverage]:
    """Wrap `model` with a saved adapter (hub id or folder), at its own rank and targets; parameters that match the
    globs `in_full` are trained in full as well. What method.freeze names of the adapter does not change. Raises as
    `open_adapter` does."""
    linears, experts, frozen = linear_layers(model), fused_experts(model), frozen_names(model, method)
    opened = open_adapter(
        model,
        adapter,
        trainable=True,
        widened=method.adapter_dtype == "float32",
        in_full=whole_modules(model, in_full),
    )
    set_adapter_dtype(opened.model, method)
    freeze_adapters(opened.model, frozen)
    whole = getattr(opened.model.peft_config[ADAPTER], "modules_to_save", None) or []
    return opened, coverage_of(opened.model, linears, experts, whole)


def freeze_adapters(model: PeftModel, frozen: Collection[str]) -> None:
    """Freeze what belongs to the base's parameters named `frozen`: matrices on them, rows of them, and copies that are
    trained in full. UsageError: nothing is left to train."""
    if not frozen:
        return
    for name, parameter in model.named_parameters():
        owner = _base_name(name)
        if owner in frozen or _is_frozen(owner.removesuffix(ADAPTED), frozen):
            parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and f"{_base_name(name)}.{module.parameter_name}" in frozen:
            for matrices in (module.lora_A, module.lora_B):
                matrices.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise nothing_learns()


ADAPTED = ".(adapted)"
"""Stands for an adapter's weight in `_base_name`."""


def _base_name(name: str) -> str:
    """A dotted name without peft's wrappers; of an adapter's weight the module's, and ADAPTED."""
    plain = name.removeprefix("base_model.model.").replace(f".modules_to_save.{ADAPTER}.", ".")
    plain = re.sub(r"\.(?:lora_|trainable_tokens_|token_adapter).*", ADAPTED, plain)
    return re.sub(r"\.base_layer\b", "", plain)


def set_adapter_dtype(model: PeftModel, method: Method) -> None:
    """Convert the matrices A and B to method.adapter_dtype; peft does so only if the base is in half precision."""
    dtype = torch.float32 if method.adapter_dtype == "float32" else torch.bfloat16
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".trainable_tokens_delta." in name:
            parameter.data = parameter.data.to(dtype)


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear layer by dotted name, except the output head. GPT-2's Conv1D counts as a linear layer."""
    head = language_model(model).get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }


def fused_experts(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Parameters with the weights of all experts of a layer: three dimensions, in a module named "experts"."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and "experts" in name.split(".")
    }


def choose_targets(
    linears: dict[str, nn.Module],
    experts: dict[str, nn.Parameter],
    method: Method,
    impossible: Mapping[str, str] = MappingProxyType({}),
    beside_text: Container[str] = (),
) -> list[str]:
    """Dotted names that get adapters, in the model's order; of those in `beside_text` (vision and audio encoders), only
    what the patterns match.

    UsageError: a pattern matches nothing, or names a layer in `impossible` ({name: reason}); no layer is left.
    """
    possible = [name for name in linears if name not in impossible]
    if method.targets == "all-linear":
        chosen = [name for name in possible if name not in beside_text]
    elif method.targets == "attention":
        chosen = [name for name in possible if _in_attention(name) and name not in beside_text]
    else:
        names = [*linears, *experts]
        chosen = [name for name in names if name in _match_all(method.targets, names, "method.targets")]
    require_layers(method.layers, chosen)
    chosen = [name for name in chosen if not method.layers or layer_of(name) in method.layers]
    excluded = _match_all(method.exclude, chosen, "method.exclude")
    kept = [name for name in chosen if name not in excluded]
    for name in kept:
        if name in impossible:
            raise no_adapter_on(name, impossible[name])
    if not chosen and impossible:
        raise UsageError(
            f"no layer of the language model can have an adapter: {next(iter(impossible.values()))}",
            fix='set method.kind = "full", or choose another model.id',
        )
    if not kept:
        raise UsageError(
            "method.targets and method.exclude select no module for an adapter",
            expected="at least one linear layer",
            fix='set method.targets = "all-linear"',
        )
    return kept


def whole_modules(
    model: PreTrainedModel, patterns: Sequence[str], frozen: Collection[str] = (), also_train: Sequence[str] = ()
) -> list[str]:
    """Names of the modules whose parameters are exactly those matched by `patterns`, without the `frozen` ones. They
    become peft's modules_to_save, which `PeftModel.from_pretrained` restores. UsageError: a pattern matches only some
    parameters of a module, which an adapter folder cannot hold, or one of `also_train` only frozen ones."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    wanted = select(patterns, names, "method.also_train").difference(frozen)
    require_trained_matches(also_train, names, frozen, "method.also_train")
    owners = sorted({name.rpartition(".")[0] for name in wanted}, key=lambda owner: names.index(_first(owner, names)))
    for owner in owners:
        missing = [name for name in names if name.rpartition(".")[0] == owner and name not in wanted]
        if missing:
            raise UsageError(
                f"method.also_train selects part of {owner}, but not {missing[0]}",
                expected="whole modules, because an adapter folder can only store those",
                fix=f'write "{owner}" to train all of it',
            )
    return owners


def coverage_of(
    model: PeftModel, linears: dict[str, nn.Module], experts: dict[str, nn.Parameter], in_full: Sequence[str]
) -> Coverage:
    """Count layers with and without adapters. `linears`, `experts`: all of the model, named as before wrapping."""
    wrapped = _adapted_modules(model)
    modules = {name for name in linears if name in wrapped}
    owners = set(getattr(model, "targeted_parameter_names", ()))
    report = Coverage(
        in_full=list(in_full), shared=shared_weights({name: linears[name] for name in linears if name in modules})
    )
    for name in linears:
        (report.adapted if name in modules else report.left_out)[_layer_type(name)] += 1
    for name in experts:
        (report.experts_adapted if name in owners else report.experts_left_out)[_layer_type(name)] += 1
    return report


def _adapted_modules(model: PeftModel) -> set[str]:
    """Names as in the base model, without peft's prefix: of the layers that an adapter of any type is on."""
    return {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and ADAPTER in _adapters_of(module)
    }


def _adapters_of(layer: BaseTunerLayer) -> set[str]:
    """The names of the adapters that a layer of peft has weights of."""
    tables = [getattr(layer, name, None) for name in layer.adapter_layer_names]
    return {str(name) for table in tables if isinstance(table, Collection) for name in table}


def _touches_tied(model: PreTrainedModel, modules: Sequence[str]) -> bool:
    """Whether one of `modules` is an embedding or output head with a tied weight."""
    tied = model.all_tied_weights_keys or {}
    return any(f"{module}.weight" in {*tied, *tied.values()} for module in modules)


def _match_all(patterns: Sequence[str], names: Sequence[str], key: str) -> set[str]:
    """Those of `names` that a glob matches, whole or by their last parts ("q_proj"). UsageError: a glob matches no
    name; `key` names the recipe key."""
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if matches_end(pattern, name)}
        if not hits:
            raise no_match(pattern, names, key)
        chosen |= hits
    return chosen


def _in_attention(name: str) -> bool:
    return any(part in ATTENTION_PARTS for part in name.split(".")[:-1])


def _first(owner: str, names: Sequence[str]) -> str:
    return next(name for name in names if name.rpartition(".")[0] == owner)


def _layer_type(name: str) -> str:
    """The last two parts of a dotted name, not counting numbers ("self_attn.q_proj")."""
    words = [part for part in name.split(".") if not part.isdecimal()]
    return ".".join(words[-2:])


def _line(what: str, counts: Counter[str]) -> str:
    return f"{what}: " + ", ".join(f"{name} ×{count}" for name, count in counts.items())
