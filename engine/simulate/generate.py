"""Text generation as the engine does it between steps, simulated: prompts, and a cache that grows to its full length.

Answers of hundreds of tokens are as many passes through the model. What they hold grows with the cache, so the first
tokens and the last ones are made, and the cache is lengthened in between.

Try: `tunedeck plan -p 80gb -r lora --set data.valid_fraction=0.1 --set eval.samples=4 --exact`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from engine.evaluate.scores import generate_tokens, generation_config
from engine.model.loaded import LoadedModel
from engine.simulate.device import SimulatedDevice
from engine.simulate.watch import Watch
from engine.spec.schema.recipe import Generate

PAD_ID, END_ID = 0, 1
"""Any two tokens: nothing depends on what they are."""
FEW = 4
"""Tokens that are made without a leap: the first two and the last two."""


def simulate_generation(
    device: SimulatedDevice, loaded: LoadedModel, generate: Generate, watch: Watch, *, rows: int, prompt: int
) -> None:
    """`rows` answers of full length to prompts of `prompt` tokens, as the phase "generate" of `watch`."""
    tokens = generate.max_new_tokens
    cache = DynamicCache(config=loaded.config.get_text_config(decoder=True))
    leaps = tokens > FEW
    for length, count in ((prompt, 2), (prompt + tokens - 2, 2)) if leaps else ((prompt, tokens),):
        if length > prompt:
            _lengthen(cache, length - 1)
        ids_BS, mask_BS = (device.upload(torch.ones((rows, length), dtype=torch.int64)) for _ in range(2))
        watch.enter("generate")
        with _tokens(loaded.base, count), device.unequal_rows():
            config = generation_config(generate, END_ID, PAD_ID)
            generate_tokens(loaded, ids_BS, mask_BS, config, past_key_values=cache)
        watch.leave()


@contextmanager
def _tokens(base: torch.nn.Module, count: int) -> Iterator[None]:
    """transformers looks after each token whether all rows have ended; fake ones cannot be looked at: so many it is."""
    left = iter(range(count))
    base.__dict__["_has_unfinished_sequences"] = lambda *_, **__: next(left, None) is not None
    try:
        yield
    finally:
        del base.__dict__["_has_unfinished_sequences"]


def _lengthen(cache: Cache, length: int) -> None:
    """As if `length` tokens were in it; layers with a window keep what they would keep."""
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        extra = length - layer.get_seq_length()
        keys, values = (
            old.new_empty((*old.shape[:-2], extra, old.shape[-1])) for old in _keys_and_values(layer)
        )
        layer.update(keys, values)
        if layer.is_sliding:  # a window is a view of what it was cut from, which here is longer than it ever gets
            layer.keys, layer.values = (made.clone() for made in _keys_and_values(layer))


def _keys_and_values(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values
