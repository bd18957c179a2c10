"""Decides which dropout of a model's own config is kept: what can be keyed by (seed, step, sample, module), and what
the recipe keeps on purpose.

Dropout of hidden states is always keyed (`engine.model.dropout`). Dropout of attention weights is keyed with eager
attention, where the weights exist; the other kernels draw masks from torch's generator, so that they would change with
the micro-batch. Random skipping of layers changes with the micro-batch, too, and a vision encoder's rows are patches
or images, not samples. What would change with the micro-batch is switched off in the config, with a notice.

Try: `python -m pytest tests/model/test_own_dropout.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from transformers import PreTrainedConfig

ATTENTION_KEYS = frozenset({"attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob"})
"""Keys of transformers' configs with the probability of dropping attention weights."""

SKIPPING_KEYS = frozenset({"layerdrop", "decoder_layerdrop", "encoder_layerdrop", "drop_path_rate"})
"""Keys with the probability of skipping a whole layer."""

UNUSED_PREFIXES = ("classifier", "summary", "seq_classif", "qa_")
"""Beginnings of keys that causal models do not read: they belong to classifiers made of the same config."""

KERNELS_THAT_DROP = ("sdpa", "flash_attention_2")
"""Attention kernels on CUDA that have dropout themselves."""


def settle_dropout(
    config: PreTrainedConfig, kernel: str, asked: Literal["auto", "keep", "off"], *, cuda: bool, shared: bool
) -> list[str]:
    """Set the dropout that the run does not keep to 0 in `config`, before a model is made of it. Returns a notice for
    each key that is set to 0, except for dropout of attention weights that the recipe switches off.

    `kernel`: transformers' name of the attention kernel; `asked`: model.attention_dropout; `cuda`: whether the device
    is a GPU; `shared`: ranks share sequences, so that each has a part of the attention weights.
    """
    notices: list[str] = []
    keyed = kernel == "eager" and not shared
    kept = asked != "off" and (keyed or (asked == "keep" and cuda and kernel in KERNELS_THAT_DROP))
    for path, part in _parts(config):
        for key in active_dropouts(part):
            if _in_encoder(path):
                notices.append(_switched_off(path + key, "only the decoder's dropout is keyed"))
            elif key in SKIPPING_KEYS:
                notices.append(_switched_off(path + key, "which layers it skips would change with the micro-batch"))
            elif key not in ATTENTION_KEYS or kept:
                continue
            elif asked != "off":
                notices.append(_lost_attention_dropout(f"{path}{key} = {getattr(part, key):g}", kernel, asked, shared))
            setattr(part, key, 0.0)
    return notices


def has_dropout(config: PreTrainedConfig) -> bool:
    """Whether any dropout of the config is active."""
    return any(active_dropouts(part) for _, part in _parts(config))


def active_dropouts(config: PreTrainedConfig) -> list[str]:
    """Return the names of the config's own keys with a dropout probability above 0."""
    return [
        key
        for key, value in vars(config).items()
        if "drop" in key and not key.startswith(UNUSED_PREFIXES) and isinstance(value, float | int) and value > 0
    ]


def _parts(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield the config and those inside it, each with its dotted path ("text_config.")."""
    yield path, config
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value, f"{path}{name}.")


def _in_encoder(path: str) -> bool:
    return any(word in path for word in ("vision", "audio", "speech", "encoder"))


def _switched_off(what: str, reason: str) -> str:
    return f"{what} of the model's config is switched off: {reason}"


def _lost_attention_dropout(what: str, kernel: str, asked: str, shared: bool) -> str:
    if shared:
        return _switched_off(what, "ranks that share sequences have parts of the masks")
    if asked == "keep":
        return _switched_off(what, f'{kernel} has no dropout here; model.attention = "eager" has')
    return _switched_off(
        what,
        f"masks that {kernel} draws would change with the micro-batch; "
        'model.attention = "eager" keeps it without that, model.attention_dropout = "keep" at the price that an '
        'out-of-memory error changes what is learned, and "off" agrees',
    )
