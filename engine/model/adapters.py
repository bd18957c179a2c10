"""Adds LoRA adapters with peft, and reports which modules got one.

Patterns for targets are resolved to module names here, so that a pattern without a match is an error. Modules that are
trained in full besides LoRA become peft's modules_to_save, which PeftModel.from_pretrained restores.

Try: `python -m pytest tests/model/test_patterns.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.budget.architecture.trainable_families import no_adapter_on, untrained_experts
from engine.budget.architecture.vision_parameters import in_vision_encoder
from engine.errors import UsageError
from engine.model.adaptable import layers_without_adapter
from engine.model.freezing import select
from engine.spec.name_patterns import matches_end, no_match
from engine.spec.schema.recipe import Method

ATTENTION_PARTS = ("attn", "attention", "self_attn", "self_attention")
"""Names of the module around the attention projections, in all families."""


@dataclass
class Coverage:
    """How many modules are trained and how many are not, counted by the last two parts of their names
    ("self_attn.q_proj")."""

    adapted: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    """Linear layers without adapters (LoRA) or with frozen weights (full fine-tuning)."""
    experts_adapted: Counter[str] = field(default_factory=Counter)
    experts_left_out: Counter[str] = field(default_factory=Counter)
    """Fused expert weights (one 3-D parameter for all experts of a layer)."""
    in_full: list[str] = field(default_factory=list)
    """Modules (LoRA) or parameters (full) that are trained in full."""
    impossible: dict[str, str] = field(default_factory=dict)
    """Linear layers that cannot have an adapter, by their names, each with the reason."""

    def text(self) -> str:
        """Format as lines of text which layers have adapters, which modules are trained in full, and which layers are
        left out."""
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
    """Return sentences on what targets = "all-linear" leaves without an adapter: fused experts, and layers that cannot
    have one. Empty if nothing is left out. `coverage` is of the model with its adapters, `model_type` the config's."""
    found = [untrained_experts(model_type, method)] if coverage.experts_left_out else []
    for reason in dict.fromkeys(coverage.impossible.values()) if method.targets == "all-linear" else ():
        names = Counter(_layer_type(name) for name, each in coverage.impossible.items() if each == reason)
        found.append(f"{_line('no adapters on', names)}: {reason}")
    return [sentence for sentence in found if sentence]


def add_adapters(
    model: PreTrainedModel, method: Method, in_full: Sequence[str] = ()
) -> tuple[PeftModel, Coverage]:
    """Return `model` wrapped with new adapters, and the coverage. Parameters that match the globs `in_full` are trained
    in full.

    Raises:
        UsageError: a pattern that matches nothing, or modules that cannot be trained this way.
    """
    linears = linear_layers(model)
    experts = fused_experts(model)
    impossible = layers_without_adapter(model, linears)
    chosen = choose_targets(linears, experts, method, impossible)
    expert_names = [name for name in chosen if name in experts]
    if expert_names:
        _refuse_on_experts(method)
    whole = whole_modules(model, in_full)
    config = LoraConfig(
        r=method.rank,
        lora_alpha=method.effective_alpha,  # type: ignore[arg-type]  # peft says int, and takes any number
        lora_dropout=method.dropout,
        target_modules=[name for name in chosen if name not in experts],
        target_parameters=expert_names or None,
        modules_to_save=whole or None,
        use_dora=method.dora,
        use_rslora=method.rslora,
        bias="none",
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(linears.get(name), Conv1D) for name in chosen),
        ensure_weight_tying=_touches_tied(model, whole),
    )
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=method.adapter_dtype == "float32")
    set_adapter_dtype(wrapped, method)
    _expect_on(wrapped, [name for name in chosen if name not in experts])
    return wrapped, replace(
        coverage_of(wrapped, linears, experts, config.modules_to_save or []), impossible=impossible
    )


def _refuse_on_experts(method: Method) -> None:
    """Raise UsageError if method.dropout or method.dora is set: peft cannot apply them to fused experts."""
    for key, value, default in (("dropout", method.dropout, "0"), ("dora", method.dora, "false")):
        if value:
            raise UsageError(
                f"method.{key} cannot be applied to fused experts",
                fix=f"set method.{key} = {default}, or leave experts out",
            )


def _expect_on(model: PeftModel, modules: Sequence[str]) -> None:
    """Raise UsageError if one of `modules` has no adapter.

    In a family with fused experts, peft reads gate_proj, up_proj and down_proj as names of the experts' weights
    (`utils/transformers_weight_conversion.py`, 0.21), and skips plain layers with these names.
    """
    adapted = _adapted_modules(model)
    missing = [name for name in modules if name not in adapted]
    if missing:
        raise UsageError(
            f"peft puts no adapter on {missing[0]} ({len(missing)} such layers), but on fused experts instead",
            expected="targets that exist once only in this family",
            fix='set method.targets = "attention"',
        )


def continue_adapter(model: PreTrainedModel, adapter: str, method: Method) -> tuple[PeftModel, Coverage]:
    """Return `model` wrapped with the saved adapter `adapter` (hub id or folder), and the coverage. The adapter is
    trained further with the rank and targets that it was saved with, not with the recipe's."""
    linears, experts = linear_layers(model), fused_experts(model)
    # A file cannot be loaded to "meta". A model on "meta" takes only the shapes of the tensors loaded to the CPU.
    place = "cpu" if model.device.type == "meta" else str(model.device)
    wrapped = PeftModel.from_pretrained(
        model, adapter, is_trainable=True, autocast_adapter_dtype=method.adapter_dtype == "float32",
        torch_device=place,
    )
    set_adapter_dtype(wrapped, method)
    in_full = getattr(wrapped.peft_config["default"], "modules_to_save", None) or []
    return wrapped, coverage_of(wrapped, linears, experts, in_full)


def set_adapter_dtype(model: PeftModel, method: Method) -> None:
    """Convert the low-rank matrices A and B of `model` to method.adapter_dtype. peft converts them only if the base is
    in half precision."""
    dtype = torch.float32 if method.adapter_dtype == "float32" else torch.bfloat16
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(dtype)


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return every linear layer by dotted name, except the output head. GPT-2's Conv1D counts as a linear layer."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }


def fused_experts(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters with the weights of all experts of a layer: three dimensions, in a module named
    "experts"."""
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
) -> list[str]:
    """Return the dotted names that get adapters, in the model's order. In a vision encoder, only those that the
    recipe's patterns match. `linears` and `experts` are all linear layers and fused expert weights of the model by
    dotted name; `impossible` has those that cannot have an adapter, each with the reason.

    Raises:
        UsageError: a pattern matches nothing, or names a layer that cannot have an adapter; no layer is left.
    """
    possible = [name for name in linears if name not in impossible]
    if method.targets == "all-linear":
        chosen = [name for name in possible if not in_vision_encoder(name)]
    elif method.targets == "attention":
        chosen = [name for name in possible if _in_attention(name) and not in_vision_encoder(name)]
    else:
        names = [*linears, *experts]
        chosen = [name for name in names if name in _match_all(method.targets, names, "method.targets")]
    excluded = _match_all(method.exclude, chosen, "method.exclude")
    kept = [name for name in chosen if name not in excluded]
    for name in kept:
        if name in impossible:
            raise no_adapter_on(name, impossible[name])
    if not kept:
        raise UsageError(
            "method.targets and method.exclude leave no module for an adapter",
            expected="at least one linear layer",
            fix='set method.targets = "all-linear"',
        )
    return kept


def whole_modules(model: PreTrainedModel, patterns: Sequence[str]) -> list[str]:
    """Return the names of the modules whose parameters are exactly those matched by `patterns`.

    Raises:
        UsageError: a pattern matches only some parameters of a module, which an adapter folder cannot hold.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    wanted = select(patterns, names, "method.also_train")
    owners = sorted({name.rpartition(".")[0] for name in wanted}, key=lambda owner: names.index(_first(owner, names)))
    for owner in owners:
        missing = [name for name in names if name.rpartition(".")[0] == owner and name not in wanted]
        if missing:
            raise UsageError(
                f"method.also_train takes a part of {owner}, but not {missing[0]}",
                expected="whole modules, which is what an adapter folder can hold",
                fix=f'write "{owner}" to train all of it',
            )
    return owners


def coverage_of(
    model: PeftModel, linears: dict[str, nn.Module], experts: dict[str, nn.Parameter], in_full: Sequence[str]
) -> Coverage:
    """Count, by type of layer, the linear layers and expert parameters of the wrapped model that have adapters, and
    those that have none. `linears` and `experts` hold all of the model, by their names before peft wrapped it;
    `in_full` names the modules that are trained themselves, without an adapter."""
    wrapped = _adapted_modules(model)
    modules = {name for name in linears if name in wrapped}
    owners = set(model.targeted_parameter_names)
    report = Coverage(in_full=list(in_full))
    for name in linears:
        (report.adapted if name in modules else report.left_out)[_layer_type(name)] += 1
    for name in experts:
        (report.experts_adapted if name in owners else report.experts_left_out)[_layer_type(name)] += 1
    return report


def _adapted_modules(model: PeftModel) -> set[str]:
    """Return the names of the modules that have an adapter, as in the base model (without peft's prefix)."""
    return {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and "default" in module.lora_A
    }


def _touches_tied(model: PreTrainedModel, modules: Sequence[str]) -> bool:
    """Whether one of `modules` is an embedding or output head with a tied weight."""
    tied = model.all_tied_weights_keys or {}
    return any(f"{module}.weight" in {*tied, *tied.values()} for module in modules)


def _match_all(patterns: Sequence[str], names: Sequence[str], key: str) -> set[str]:
    """Return those of `names` that a glob in `patterns` matches, as a whole or by their last parts ("q_proj").

    Raises:
        UsageError: a glob matches no name; `key` is the recipe key named in the message.
    """
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
    """Return the last two parts of a dotted name, not counting numbers ("self_attn.q_proj")."""
    words = [part for part in name.split(".") if not part.isdecimal()]
    return ".".join(words[-2:])


def _line(what: str, counts: Counter[str]) -> str:
    return f"{what}: " + ", ".join(f"{name} ×{count}" for name, count in counts.items())
