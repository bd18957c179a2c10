"""Which parts of a model compute text; which parameters are trained, by the patterns of a recipe, and in which of the
optimizer's parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.architecture.parameters import in_projector
from engine.config.name_patterns import (
    PARTS,
    matches,
    no_match,
    no_such_part,
    nothing_learns,
    require_trained_matches,
)
from engine.config.parameter_groups import assign_groups
from engine.config.schema.recipe import Method, Train

ENCODER_STATES = ("cross_attention_states", "encoder_hidden_states", "image_hidden_states")
"""transformers' names for the input of a decoder layer that is an encoder's output."""


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module that maps token ids [B, S] to hidden states [B, S, H], without output head."""
    inner = language_model(model)
    decoder: Any = inner.get_decoder()
    # Llama 4's language model names no decoder, and gives itself, head and all; ModernBERT's names its head so.
    none = decoder is inner or decoder is inner.get_output_embeddings()
    return cast(nn.Module, getattr(inner, "model", inner) if none else decoder)


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or a causal language model that it holds with its head, beside a vision encoder (Llama 4)."""
    decoder: Any = model.get_decoder()
    holds_head = isinstance(decoder, PreTrainedModel) and decoder.get_output_embeddings() is not None
    return language_model(decoder) if holds_head and decoder is not model else model


def embedding_rows(model: PreTrainedModel) -> int:
    """The rows of the embedding, those that no token uses included."""
    return len(cast(Tensor, model.get_input_embeddings().weight))


def checkpointing_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that gradient checkpointing works on, without those inside another one."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from checkpointing_layers(child)


def outside_text(model: PreTrainedModel) -> frozenset[str]:
    """Dotted names of the modules and parameters that text alone never uses: vision and audio encoders, what connects
    them to the decoder, and its layers that attend to images alone (Mllama). Empty for a model of text alone."""
    if model.config.get_text_config() is model.config:
        return frozenset()
    decoder = decoder_of(model)
    ends = model.get_input_embeddings(), language_model(model).get_output_embeddings()
    parts = [decoder, *(end for end in ends if end is not None)]
    text = _within(parts) - _within(layer for layer in decoder.modules() if _attends_to_images_alone(layer))
    everything = (*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
    return frozenset(name for name, each in everything if id(each) not in text)


def _within(parts: Iterable[nn.Module]) -> set[int]:
    return {id(each) for part in parts for each in (*part.modules(), *part.parameters())}


def _attends_to_images_alone(layer: nn.Module) -> bool:
    """Whether `forward` of a layer has no default for the states of an encoder: without images it is not called."""
    given = inspect.signature(layer.forward).parameters
    return any(name in given and given[name].default is inspect.Parameter.empty for name in ENCODER_STATES)


def select(patterns: Sequence[str], names: Iterable[str], key: str) -> set[str]:
    """The names that any pattern of `key` matches. UsageError: a pattern matches nothing."""
    names = list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if matches(pattern, name)}
        if not hits:
            raise no_match(pattern, names, key)
        chosen |= hits
    return chosen


def frozen_names(model: nn.Module, method: Method) -> set[str]:
    """The names of the parameters that method.freeze freezes, a tied weight under all of its names. UsageError: a
    pattern matches nothing, or names a part that the model does not have."""
    names = dict(model.named_parameters(remove_duplicate=False))
    frozen = select([pattern for pattern in method.freeze if pattern not in PARTS], names, "method.freeze")
    for part in method.freeze:
        if part in PARTS:
            found = parameters_of_part(cast(PreTrainedModel, model), part)
            if not found:
                raise no_such_part(part)
            frozen |= found
    same = {id(names[name]) for name in frozen}
    return {name for name, parameter in names.items() if id(parameter) in same}


def parameters_of_part(model: PreTrainedModel, part: str) -> set[str]:
    """The names of the parameters of "language" (decoder, embedding and head), "projector" or "vision"."""
    head = language_model(model).get_output_embeddings()
    inside = _within([decoder_of(model), model.get_input_embeddings(), *([] if head is None else [head])])
    names = dict(model.named_parameters(remove_duplicate=False))
    language = {name for name, parameter in names.items() if id(parameter) in inside}
    if part == "language":
        return language
    rest = {name for name in names.keys() - language if "audio" not in name}
    projector = {name for name in rest if in_projector(name)}
    return projector if part == "projector" else rest - projector


def freeze_parameters(model: nn.Module, method: Method, frozen_by_default: Iterable[str] = ()) -> None:
    """Set requires_grad for full fine-tuning: method.train_only, else all except `frozen_by_default`; never what
    method.freeze matches. A tied weight matches by any of its names, and freezing takes precedence.

    UsageError: a pattern without a match, or no parameter left to train.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    trained = select(method.train_only, by_name, "method.train_only") if method.train_only else set(by_name)
    frozen = frozen_names(model, method)
    require_trained_matches(method.train_only, by_name, frozen, "method.train_only")
    if not method.train_only:
        frozen |= set(frozen_by_default)
    learning = {id(by_name[name]) for name in trained} - {id(by_name[name]) for name in frozen}
    if not learning:
        raise nothing_learns()
    for parameter in by_name.values():
        parameter.requires_grad_(id(parameter) in learning)


def names_of(model: nn.Module, trained: Iterable[str], plain: Callable[[str], str]) -> dict[str, list[str]]:
    """The names of `trained` parameters, each with its other names, of a tied weight. `plain` gives a parameter's name
    as `trained` has it, by that in `model`."""
    by_name = {plain(name): id(each) for name, each in model.named_parameters(remove_duplicate=False)}
    others: dict[int, list[str]] = {}
    for name, key in by_name.items():
        others.setdefault(key, []).append(name)
    return {name: [each for each in others.get(by_name.get(name, 0), ()) if each != name] for name in trained}


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]], train: Train, others: Mapping[str, Sequence[str]] | None = None
) -> list[dict[str, Any]]:
    """The optimizer's groups: dicts with `params`, `names`, `lr` and `weight_decay`, in the order of first parameters.

    Weight decay applies to matrices, not to biases, norms and other vectors, as in GPT-3 (appendix B) and nanoGPT. A
    parameter gets the settings of the first entry in [[train.groups]] that matches its name; a weight_decay there
    applies to vectors too. `others`: other names of tied weights. UsageError: a group without a trainable parameter.
    """
    named = list(named_parameters)
    chosen = assign_groups(train.groups, {name: (others or {}).get(name, ()) for name, _ in named})
    groups: dict[tuple[int, float, float], dict[str, Any]] = {}
    for name, parameter in named:
        index = chosen.get(name, -1)
        own = train.groups[index] if index >= 0 else None
        rate = own.learning_rate if own and own.learning_rate is not None else train.peak_learning_rate
        decay = own.weight_decay if own and own.weight_decay is not None else _decay(parameter, train)
        group_of = groups.setdefault(
            (index, rate, decay), {"params": [], "names": [], "lr": rate, "weight_decay": decay}
        )
        group_of["params"].append(parameter)
        group_of["names"].append(name)
    return list(groups.values())


def _decay(parameter: Parameter, train: Train) -> float:
    return train.weight_decay if parameter.dim() >= 2 else 0.0
