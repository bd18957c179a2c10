"""Simulates the generation of answers during evaluation, with a KV cache that grows to its full length.

An answer takes one pass through the model per token. Memory grows with the cache, so only the first and the last tokens
are simulated; in between, the cache is extended without running the model.

Try: `tunedeck plan -p 80gb -r lora --set data.valid_fraction=0.1 --set eval.samples=4 --exact`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Cache, DynamicCache, LogitsProcessorList
from transformers.cache_utils import DynamicLayer

from engine.evaluate.generation import generate_tokens, generation_config, sampling
from engine.model.loaded import LoadedModel
from engine.simulate.device import SimulatedDevice
from engine.simulate.phase_peaks import PhaseRecorder
from engine.spec.schema.recipe import Generate

PAD_ID, END_ID = 0, 1
"""Ids of the padding token and the end token. They are arbitrary, because simulated tokens have no values."""
SIMULATED_TOKENS = 4
"""How many tokens of an answer are simulated: the first two and the last two. The tokens in between are skipped."""


def simulate_generation(
    device: SimulatedDevice, loaded: LoadedModel, generate: Generate, peaks: PhaseRecorder, *, rows: int, prompt: int
) -> None:
    """Simulate `rows` answers of full length to prompts of `prompt` tokens; record the peak in `peaks` as phase
    "generate"."""
    tokens = generate.max_new_tokens
    cache = DynamicCache(config=loaded.config.get_text_config(decoder=True))
    skips = tokens > SIMULATED_TOKENS
    for length, count in ((prompt, 2), (prompt + tokens - 2, 2)) if skips else ((prompt, tokens),):
        if length > prompt:
            _lengthen(cache, length - 1)
        ids_BS, mask_BS = (device.upload(torch.ones((rows, length), dtype=torch.int64)) for _ in range(2))
        peaks.enter("generate")
        with _generate_exactly(loaded.base, count), device.unequal_rows():
            config = generation_config(generate, END_ID, PAD_ID)
            processors = LogitsProcessorList(sampling(generate, range(rows), length, device))
            generate_tokens(loaded, ids_BS, mask_BS, config, past_key_values=cache, logits_processor=processors)
        peaks.leave()


@contextmanager
def _generate_exactly(base: torch.nn.Module, count: int) -> Iterator[None]:
    """Inside the block, transformers generates exactly `count` tokens; fake tokens have no values that could end a
    row."""
    left = iter(range(count))
    base.__dict__["_has_unfinished_sequences"] = lambda *_, **__: next(left, None) is not None
    try:
        yield
    finally:
        del base.__dict__["_has_unfinished_sequences"]


def _lengthen(cache: Cache, length: int) -> None:
    """Lengthen the KV cache to `length` tokens; in layers with a sliding window, only to the size of the window."""
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        extra = length - layer.get_seq_length()
        keys, values = (
            old.new_empty((*old.shape[:-2], extra, old.shape[-1])) for old in _keys_and_values(layer)
        )
        layer.update(keys, values)
        if layer.is_sliding:  # copy the window: it is a view of a storage longer than in any real run
            layer.keys, layer.values = (made.clone() for made in _keys_and_values(layer))


def _keys_and_values(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values
