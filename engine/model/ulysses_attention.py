"""Ulysses sequence parallelism as an attention kernel registered with transformers.

While it is installed, every rank runs the model on its slice of a micro-batch (`engine.data.batch`). In attention,
`engine.distributed.sequence_parallel` exchanges tensors so that each rank gets all positions of some heads, and the
model's usual kernel runs on these, causal and without a mask. Evaluation and generation run the usual kernel.
`engine.architecture.support` says which models and recipes may use it;
`verify_ulysses_attention` tries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.data.batch import Batch, slice_of
from engine.distributed.ranks import Ranks
from engine.distributed.sequence_parallel import SequenceGroup, join_sequence_group, to_heads, to_positions
from engine.distributed.votes import VotedGroup
from engine.errors import UsageError
from engine.model.decoder import autocast, hidden_states
from engine.model.loaded import LoadedModel
from engine.model.trained import decoder_of, embedding_rows

KERNEL = "tunedeck_slices"
"""The kernel's name in a model's config. transformers has no mask function of this name, so it makes no mask."""

UNSHARED = "set parallel.sequence = 1 in the profile"

POSITIONS_TO_COMPARE = 4
"""Positions per rank."""


class UlyssesAttention:
    """The attention kernel for one model and one group of ranks that share sequences."""

    def __init__(self, loaded: LoadedModel, group: SequenceGroup) -> None:
        self.group = group
        self._loaded = loaded
        configs = [module.config for module in decoder_of(loaded.base).modules() if hasattr(module, "config")]
        self._configs: list[Any] = list({id(config): config for config in configs}.values())

    @property
    def inner(self) -> str:
        """transformers' name of the model's usual kernel, which computes this rank's heads."""
        return self._loaded.attention

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block, the model's layers use this kernel. Backward belongs inside too: with checkpointing it runs
        attention again."""
        ALL_ATTENTION_FUNCTIONS.register(KERNEL, self._attend)
        self._use(KERNEL)
        try:
            yield
        finally:
            self._use(self.inner)

    def slice_of(self, batch: Batch, *, pad_id: int) -> Batch:
        """This rank's positions of a micro-batch, padded with `pad_id` if the ranks cannot share them equally."""
        return slice_of(batch, self.group.place, self.group.size, pad_id=pad_id)

    def _use(self, kernel: str) -> None:
        for config in self._configs:
            config._attn_implementation = kernel

    def _attend(
        self, module: Any, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Attention for one layer with this rank's S positions: queries of H heads, keys and values of K heads, D
        values per head. `mask` is unused: attention is causal. Returns [B, S, H, D] and None."""
        device = query_BHSD.device.type
        # Under autocast the kernel would convert to the narrower dtype; converting first halves the bytes exchanged.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query_BHSD.dtype
        heads = [tensor.to(dtype) for tensor in (query_BHSD, key_BKSD, value_BKSD)]
        query, key, value = to_heads(self.group, heads)
        del heads
        # These position ids belong to the slice, but the kernel gets whole rows, whose positions start at 0.
        options.pop("position_ids", None)
        with self._posing(module, query.shape[1] // key.shape[1]):
            output_BThD, _ = ALL_ATTENTION_FUNCTIONS[self.inner](module, query, key, value, mask, **options)
        del query, key, value
        return to_positions(self.group, output_BThD.transpose(1, 2)).transpose(1, 2), None

    @contextmanager
    def _posing(self, module: Any, queries_per_key: int) -> Iterator[None]:
        """Inside the block, `module` has what the inner kernel reads: its name, and the ratio of query to key heads."""
        usual = getattr(module, "num_key_value_groups", None)
        if usual is not None:
            module.num_key_value_groups = queries_per_key
        module.config._attn_implementation = self.inner
        try:
            yield
        finally:
            module.config._attn_implementation = KERNEL
            if usual is not None:
                module.num_key_value_groups = usual


def join_ulysses_attention(
    loaded: LoadedModel, ranks: Ranks, size: int, voted_group: VotedGroup | None = None
) -> UlyssesAttention:
    """Form groups of `size` ranks that share sequences, and check that the model computes the same on slices; returns
    the kernel of this rank's group. All ranks call this. `voted_group` votes before each exchange; default: the group's
    ranks.

    UsageError: the model cannot use this kernel, or computes something else with it.
    """
    obstacle = _obstacle(loaded)
    if obstacle:
        raise UsageError(f"parallel.sequence = {size}, but {loaded.config.model_type} {obstacle}", fix=UNSHARED)
    attention = UlyssesAttention(loaded, join_sequence_group(ranks, size, voted_group))
    found: list[str] = []
    attention.group.voted_group.run_together(lambda: found.append(verify_ulysses_attention(loaded, attention)))
    for complaint in filter(None, ranks.all_gather_object(found[0] if found else "")):
        raise UsageError(complaint, fix=UNSHARED)
    return attention


def _obstacle(loaded: LoadedModel) -> str:
    """Why the model cannot use this kernel, found without running it; empty if nothing is known."""
    if loaded.attention == "eager":
        return "runs with eager attention"
    if loaded.attends_to_padding:
        return "attends to more than the tokens before"
    decoder_class: Any = type(decoder_of(loaded.base))
    if not decoder_class._can_set_attn_implementation():
        return "has its own attention, which does not use the interface of transformers"
    return ""


def verify_ulysses_attention(loaded: LoadedModel, attention: UlyssesAttention) -> str:
    """Compare the hidden states of a few tokens, whole and in slices: they differ for models that mix positions outside
    attention. All ranks of the group call this. Returns this rank's complaint; empty if they agree."""
    length = POSITIONS_TO_COMPARE * attention.group.size
    vocabulary = embedding_rows(loaded.base)
    was_training = loaded.model.training
    loaded.model.eval()
    try:
        with torch.no_grad(), autocast(loaded):
            ids_BS = torch.arange(length, device="cpu")[None] % vocabulary
            whole = Batch(ids_BS, ids_BS, None, None, (0,), length)
            part = attention.slice_of(whole, pad_id=0)
            expected_BSH = hidden_states(loaded, whole.moved(loaded.device.upload))
            with attention.installed():
                found_BSH = hidden_states(loaded, part.moved(loaded.device.upload))
            first = part.first_position
            expected_BSH = expected_BSH[:, first : first + found_BSH.shape[1]]
            # Norms, not maxima: rounding may route a token to another expert, which is not an error.
            error, size = float((expected_BSH - found_BSH).float().norm()), float(expected_BSH.float().norm())
    finally:
        loaded.model.train(was_training)
    tolerance = 1e-4 if loaded.precision.compute == torch.float32 else 4e-2
    if error <= tolerance * max(size, 1e-3):
        return ""
    return (
        f"{loaded.config.model_type} gives different results when sequences are split over devices (off by "
        f"{error:.3g} of {size:.3g}): it uses other positions outside attention"
    )
