"""Reads a model's config: as a dict for the budget, or as an object of transformers.

Weights are loaded in `engine.model.load`.

Try: `python -c "from engine.model.config import *; print(builtin_config('builtin:tiny'))"`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.budget.architecture.lookup import builtin_config
from engine.budget.architecture.packing_support import refuse_unsafe_packing
from engine.budget.architecture.vision_encoder import VISION_ENCODERS
from engine.errors import UsageError
from engine.model.hub import HUB_ERRORS, loading_error, require_reachable
from engine.model.reference import BUILTIN_PREFIX, StartingWeights, find_starting_weights
from engine.spec.schema.run import RunSpec


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the Auto class of transformers for a config: image-text-to-text for a model with a vision encoder,
    else causal language model."""
    return AutoModelForImageTextToText if config.model_type in VISION_ENCODERS else AutoModelForCausalLM


def model_config_dict(spec: RunSpec) -> dict[str, Any]:
    """Return the base model's config.json as a dict (built-in, folder, hub, or the base of an earlier run). The
    recipe's own rotary scaling is not in it."""
    start = find_starting_weights(spec.recipe.model)
    if start.base.startswith(BUILTIN_PREFIX):
        return builtin_config(start.base)
    return load_config(start, spec.limits.trust_remote_code).to_dict()


def check_packing(spec: RunSpec) -> None:
    """Raise UsageError if the recipe packs documents, but the model would attend from one document to another."""
    if spec.recipe.data.packing:
        refuse_unsafe_packing(model_config_dict(spec), spec.recipe)


def load_config(start: StartingWeights, trust_remote_code: bool) -> PreTrainedConfig:
    """Load the config of the model that a run starts from. For an adapter that was trained with scaled rotary
    positions, this is the config saved beside the adapter, which contains the scaling.

    Raises:
        UsageError: no config.json, or not a causal language model.
        EnvironmentProblem: the hub cannot be reached, or refuses access.
    """
    if start.base.startswith(BUILTIN_PREFIX):
        facts = builtin_config(start.base)
        return AutoConfig.for_model(facts.pop("model_type"), **facts)
    _expect_config_file(start)
    if start.adapter is not None and Path(start.adapter, "config.json").is_file():
        start = replace(start, base=start.adapter, revision=None)
    require_reachable(start.base, "model", start.revision)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            start.base, revision=start.revision or "main", trust_remote_code=trust_remote_code
        )
    except HUB_ERRORS as error:
        raise loading_error(error, start.base) from error
    known = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_ENCODERS)
    if config.model_type not in known and not getattr(config, "auto_map", None):
        raise UsageError(
            f"{start.base} is a {config.model_type!r} model, which is not a causal language model",
            expected="a model that transformers opens with AutoModelForCausalLM, or one with a known vision encoder",
            fix="choose another model.id",
        )
    return config


def _expect_config_file(start: StartingWeights) -> None:
    if start.folder is not None and not (start.folder / "config.json").is_file():
        raise UsageError(
            f"no config.json in {start.folder}",
            expected="a model folder as save_pretrained writes it",
            fix="point model.id at the folder that holds config.json and the safetensors files",
        )
