"""Compares predictions for vision-language models with the engine's own step on the metered device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.architecture.facts import from_config
from engine.architecture.lookup import find_architecture, find_config
from engine.budget.predict.inference import evaluation, generation_bytes
from engine.budget.predict.prediction import predict
from engine.budget.predict.static import static_bytes, vision_end_gradients, vision_layer_tensors
from engine.budget.predict.vision import vision_cost
from engine.budget.trace.memory_config import memory_config_of
from engine.budget.trace.polynomial import shape_of
from engine.budget.trace.trainable import vision_trainable_by_layer
from engine.config.schema.recipe import Generate
from engine.config.schema.run import RunSpec
from engine.extras.simulate.step import simulate_step
from tests.budget.metered_step import (
    WITH_VISION_ENCODER,
    folder_of,
    measured_evaluation,
    measured_generation,
    measured_step,
    run_spec,
)
from tests.present import present

pytestmark = pytest.mark.usefixtures("quick_half_products")

LORA: dict[str, Any] = {"rank": 8}
FULL: dict[str, Any] = {"kind": "full"}
VISION_LORA: dict[str, Any] = {"rank": 8, "targets": ["q_proj", "attn.qkv", "fc1", "gate_proj", "out_proj"]}
SAVING, KEEPING = {"gradient_checkpointing": True}, {"gradient_checkpointing": False}


@pytest.mark.parametrize("family", WITH_VISION_ENCODER)
@pytest.mark.parametrize(
    ("method", "train", "data"),
    [(LORA, SAVING, {}), (FULL, SAVING, {}), (LORA, KEEPING, {"packing": True})],
    ids=("lora", "full", "packed"),
)
def test_the_peak_of_training_on_text_is_predicted(
    family: str, method: dict[str, Any], train: dict[str, Any], data: dict[str, Any], tmp_path: Path
) -> None:
    spec = run_spec(
        folder_of(WITH_VISION_ENCODER[family], tmp_path),
        method=method,
        train={**train, "batch_size": 2},
        model={"dtype": "bfloat16"},
        data={"max_length": 256, **data},
    )
    static_bytes, peak_bytes = measured_step(spec, 2, 200)
    predicted = predict(find_architecture(spec), spec, rows=2, length=200)
    assert sum(predicted.phases["load"].values()) <= static_bytes
    assert -0.005 <= predicted.peak_bytes / peak_bytes - 1 <= 0.01


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lora": (LORA, SAVING, {}),
    "lora, kept": (LORA, KEEPING, {}),
    "lora fp32": (LORA, SAVING, {"dtype": "float32"}),
    "lora on the vision encoder": (VISION_LORA, SAVING, {}),
    "dora": ({**LORA, "dora": True}, KEEPING, {}),
    "full": (FULL, SAVING, {}),
    "full, kept": (FULL, {**KEEPING, "loss": "plain"}, {}),
    "full, vision encoder frozen": ({**FULL, "freeze": ["model.visual", "model.vision_tower"]}, SAVING, {}),
    "lora, eager": (LORA, SAVING, {"attention": "eager"}),
}


def with_images(family: str, way: str, folder: Path, tokens: int, device: dict[str, Any] | None = None) -> RunSpec:
    """A run spec with images; each has `tokens` tokens if the model takes images of any size."""
    method, train, model = WAYS[way]
    if "freeze" in method:
        encoders = {"gemma3": ["model.vision_tower", "model.multi_modal_projector"]}
        method = {**method, "freeze": encoders.get(family, ["model.visual"])}
    if "targets" in method:
        here = {"qwen2_vl": (0, 1, 2), "qwen2_5_vl": (0, 1, 3), "gemma3": (0, 2, 4)}[family]
        method = {**method, "targets": [VISION_LORA["targets"][place] for place in here]}
    return run_spec(
        folder_of(WITH_VISION_ENCODER[family], folder),
        device,
        method=method,
        train={**train, "batch_size": 4},
        model={"dtype": "bfloat16", **model},
        data={"max_length": 512, "image_max_pixels": tokens * 28 * 28},
    )


@pytest.mark.parametrize(
    ("family", "way"),
    [
        (family, way)
        for number, way in enumerate(WAYS)
        for place, family in enumerate(WITH_VISION_ENCODER)
        if way in ("lora", "full") or (place - number) % len(WITH_VISION_ENCODER) == 0
    ],
)
def test_the_peak_of_training_on_images_is_predicted(family: str, way: str, tmp_path: Path) -> None:
    spec = with_images(family, way, tmp_path, tokens=80)
    predicted = predict(find_architecture(spec), spec, rows=2, length=120).peak_bytes
    # Eager attention handles images one after the other, and the prediction of its temporaries is approximate.
    assert -0.005 <= predicted / measured_step(spec, 2, 120, 2)[1] - 1 <= (0.03 if "eager" in way else 0.01)


@pytest.mark.parametrize("family", WITH_VISION_ENCODER)
@pytest.mark.parametrize("way", ["lora", "full"])
def test_the_simulation_holds_what_the_metered_device_counts(family: str, way: str, tmp_path: Path) -> None:
    spec = with_images(family, way, tmp_path, tokens=80)
    found = simulate_step(spec, rows=2, length=120)
    assert found.peak_bytes == pytest.approx(measured_step(spec, 2, 120, 2)[1], rel=1e-3)


def test_evaluation_on_images_is_predicted(tmp_path: Path) -> None:
    spec = with_images("qwen2_vl", "lora", tmp_path, tokens=80)
    arch = find_architecture(spec)
    config = memory_config_of(arch, spec)
    shape = shape_of(2, 120, config.chunk_tokens, patches=2 * config.image_patches)
    above = max(peak.at(shape) for peak in evaluation(arch, config))
    predicted = static_bytes(arch, config).total.static + above
    assert predicted == pytest.approx(measured_evaluation(spec, 2, 120), rel=0.01)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_generation_about_images_is_predicted(family: str, tmp_path: Path) -> None:
    spec = with_images(family, "lora", tmp_path, tokens=80)
    short = spec.recipe.model_copy(update={"generate": Generate(max_new_tokens=8)})
    spec = spec.model_copy(update={"recipe": short})
    arch = find_architecture(spec)
    config = memory_config_of(arch, spec)
    above = generation_bytes(arch, config, rows=4, prompt=200, generate=spec.recipe.generate)
    predicted = static_bytes(arch, config).total.static + above
    assert -0.005 <= predicted / measured_generation(spec, 4, 200) - 1 <= 0.05


def test_larger_images_take_more_and_no_images_take_least(tmp_path: Path) -> None:
    spec = with_images("qwen2_5_vl", "lora", tmp_path, tokens=80)

    def peak(**data: Any) -> int:
        changed = spec.recipe.data.model_copy(update=data)
        other = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"data": changed})})
        return predict(find_architecture(other), other, rows=2, length=400).peak_bytes

    assert peak(image_max_pixels=None) < peak() < peak(image_max_pixels=500 * 28 * 28)
    # Samples with larger ones than a sequence holds are dropped.
    assert peak(image_max_pixels=512 * 28 * 28) == peak(image_max_pixels=5000 * 28 * 28)


def test_gradients_add_up_from_the_last_layer_to_the_first(tmp_path: Path) -> None:
    """A small encoder seldom decides a peak, so that the sum would not show in one."""
    spec = with_images("qwen2_vl", "full", tmp_path, tokens=80)
    arch = find_architecture(spec)
    config = memory_config_of(arch, spec)
    encoder = present(arch.vision_encoder)
    moments = [moment.gradients for moment in vision_cost(arch, config, accumulating=False).backward]
    made = [
        vision_layer_tensors(encoder, config, layer).gradients
        for layer in vision_trainable_by_layer(encoder, config.patterns)
    ]
    before = vision_end_gradients(encoder, config, behind=True)
    assert min(made) > 0
    assert moments == [0, *(before + sum(made[len(made) - done :]) for done in range(len(made) + 1))]


def test_an_image_takes_the_tokens_its_processor_makes_of_it() -> None:
    qwen = from_config(find_config("Qwen/Qwen2.5-VL-7B-Instruct")).vision_encoder
    gemma = from_config(find_config("google/gemma-3-4b-it")).vision_encoder
    assert qwen and gemma
    assert [qwen.tokens_of(pixels) for pixels in (1280 * 28 * 28, 28 * 28 + 5, 1, None)] == [1280, 1, 1, 16384]
    assert [gemma.tokens_of(pixels) for pixels in (1280 * 28 * 28, None)] == [256, 256]


def test_a_config_saved_by_transformers_says_the_same_as_the_published_one(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for family, config in WITH_VISION_ENCODER.items():
        AutoConfig.for_model(family, **{k: v for k, v in config.items() if k != "model_type"}).save_pretrained(tmp_path)
        assert from_config(find_config(str(tmp_path))) == from_config(config)
