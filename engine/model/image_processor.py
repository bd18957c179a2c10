"""Loads the image processor of a vision-language model, always the one on Pillow, so that pixels do not depend on what
else is installed (torchvision's differ).

Source of the tokens that stand for an image: transformers 5.23, processing_qwen2_vl.py and processing_gemma3.py.

Try: `python -m pytest tests/train/test_image_runs.py`
"""

from __future__ import annotations

import importlib.util
from typing import Any

from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedTokenizerBase

from engine.data.images import ImageProcessor
from engine.errors import EnvironmentProblem, UsageError
from engine.model.config import load_config
from engine.model.hub import HUB_ERRORS, loading_error
from engine.model.reference import StartingWeights, find_starting_weights
from engine.spec.check.images import image_key
from engine.spec.schema.run import RunSpec

PATCH_MODELS = ("qwen2_vl", "qwen2_5_vl")
"""Model types that take images of any size as patches."""

SQUARE_MODELS = ("gemma3",)
"""Model types whose images are all resized to one size."""


def load_image_processor(spec: RunSpec, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
    """The image processor of the recipe's model; None for a recipe without images.

    Raises:
        UsageError: the model takes no images, or has no settings for its image processor.
        EnvironmentProblem: Pillow is not installed, or the hub cannot be reached.
    """
    key = image_key(spec.recipe)
    if key is None:
        return None
    if importlib.util.find_spec("PIL") is None:
        raise EnvironmentProblem(f"{key}: Pillow is not installed", fix='pip install "tunedeck[vision]"')
    start = find_starting_weights(spec.recipe.model)
    config = load_config(start, spec.limits.trust_remote_code)
    if config.model_type not in (*PATCH_MODELS, *SQUARE_MODELS):
        raise UsageError(
            f"{key}: images are not trained with models of the type {config.model_type}",
            expected=f"a model of the type {', '.join((*PATCH_MODELS, *SQUARE_MODELS))}",
            fix="choose one of these, or train on text: remove the sources with images",
        )
    return _described(_processor(spec, start, config), config, tokenizer)


def _processor(spec: RunSpec, start: StartingWeights, config: PreTrainedConfig) -> Any:
    """Load transformers' image processor of the base model. For models that take images of any size, the recipe's
    data.image_min_pixels and data.image_max_pixels replace the processor's own bounds.

    Raises the error of `loading_error` if it cannot be loaded.
    """
    options: dict[str, Any] = {"backend": "pil", "revision": start.revision or "main"}
    try:
        processor = AutoImageProcessor.from_pretrained(start.base, **options)
    except HUB_ERRORS as error:
        raise loading_error(error, start.base, "image processor") from error
    if config.model_type in PATCH_MODELS:
        data, size = spec.recipe.data, dict(processor.size)
        bounds = {"shortest_edge": data.image_min_pixels, "longest_edge": data.image_max_pixels}
        processor.size = {**size, **{edge: pixels for edge, pixels in bounds.items() if pixels is not None}}
    return processor


def _described(processor: Any, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor:
    facts: Any = config
    if config.model_type in PATCH_MODELS:
        return ImageProcessor(
            processor, "patches", int(facts.image_token_id), int(processor.merge_size), int(processor.patch_size)
        )
    begin, part, end = (
        str(tokenizer.convert_ids_to_tokens(int(number)))
        for number in (facts.boi_token_index, facts.image_token_id, facts.eoi_token_index)
    )
    tokens, side = int(facts.mm_tokens_per_image), int(facts.vision_config.patch_size)
    merge = int(facts.vision_config.image_size) // side // int(tokens**0.5)
    written = begin, f"\n\n{begin}{part}{end}\n\n"
    return ImageProcessor(processor, "squares", int(facts.image_token_id), merge, side, tokens, written)
