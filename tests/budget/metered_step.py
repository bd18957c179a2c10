"""Runs single optimizer steps of the engine on a device, usually the metered one, for comparison with predictions."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.schema.run import RunSpec

QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 600,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": False,
}
MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 700,
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
GEMMA2: dict[str, Any] = {
    "model_type": "gemma2",
    "vocab_size": 800,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 800,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 64,
    "pad_token_id": 0,
}

SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
PHI3: dict[str, Any] = {"model_type": "phi3", **SMALL, "sliding_window": None}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 900,
    "n_embd": 128,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    **SMALL,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    **SMALL,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    **SMALL,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
}

TEXT: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
PATCHES: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
AXES: dict[str, Any] = {"rope_type": "default", "mrope_section": [4, 6, 6]}
QWEN2_VL: dict[str, Any] = {
    "model_type": "qwen2_vl",
    **TEXT,
    "rope_scaling": AXES,
    "image_token_id": 999,
    "vision_config": {**PATCHES, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 4},
}
QWEN2_5_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    **TEXT,
    "rope_scaling": AXES,
    "image_token_id": 999,
    "tie_word_embeddings": True,
    "vision_config": {
        **PATCHES,
        "hidden_size": 64,
        "intermediate_size": 176,
        "out_hidden_size": 128,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    },
}
GEMMA3_VL: dict[str, Any] = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 16,
    "image_token_index": 999,
    "boi_token_index": 998,
    "eoi_token_index": 997,
    "text_config": {
        "model_type": "gemma3_text",
        **TEXT,
        "head_dim": 32,
        "sliding_window": 64,
        "pad_token_id": 0,
        "sliding_window_pattern": 2,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 224,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
WITH_VISION_ENCODER: dict[str, dict[str, Any]] = {
    config["model_type"]: config for config in (QWEN2_VL, QWEN2_5_VL, GEMMA3_VL)
}


def run_spec(start: str | Path = "builtin:tiny", device: dict[str, Any] | None = None, **tables: Any) -> RunSpec:
    """A run spec with these tables of the recipe, by default on a metered device with plenty of memory."""
    recipe = {
        "name": "cell",
        "model": {"id": str(start), "tokenizer": "builtin:bytes", "init": "random", **tables.pop("model", {})},
        "data": {"sources": [{"name": "dates", "path": "builtin:dates"}], **tables.pop("data", {})},
        **tables,
    }
    profile = {"name": "cell", "device": device or {"kind": "metered", "memory_gib": 8.0}}
    return RunSpec.model_validate({"name": "cell", "profile": profile, "recipe": recipe})


def folder_of(config: dict[str, Any], folder: Path) -> Path:
    """Write a model folder that contains only a config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def measured_step(spec: RunSpec, rows: int, length: int, micro_batches: int = 1) -> tuple[int, int]:
    """(static bytes, peak bytes) of one optimizer step on the metered device, with `micro_batches` micro-batches of
    `rows` sequences of `length` tokens."""
    with loaded_step(spec) as step:
        step.device.reset_peak()
        step.step(rows, length, micro_batches)
        return step.static_bytes, step.device.memory().peak_bytes


def measured_evaluation(spec: RunSpec, rows: int, length: int) -> int:
    """Peak bytes of computing the loss of one micro-batch without gradients on the metered device."""
    import torch

    with loaded_step(spec) as step, torch.no_grad():
        step.loaded.model.eval()
        step.device.reset_peak()
        float(step.loss(step.batch(rows, length)))
        return int(step.device.memory().peak_bytes)


def measured_generation(spec: RunSpec, rows: int, prompt: int) -> int:
    """Peak bytes of generating answers for `rows` prompts of up to `prompt` tokens on the metered device. The recipe's
    table [generate] has the settings; every answer has the maximum length."""
    import torch
    from transformers import LogitsProcessorList

    from engine.evaluate.generation import generation_config, sampling

    with loaded_step(spec) as step, torch.no_grad():
        step.loaded.model.eval()
        batch = step.batch(rows, prompt)
        mask = torch.ones_like(batch.input_ids_BS)
        mask[0, : prompt // 2 if rows > 1 else 0] = 0  # a single prompt is not padded
        settings = spec.recipe.generate
        chain = LogitsProcessorList(sampling(settings, range(rows), prompt, step.device))
        gc.collect()
        step.device.reset_peak()
        images = dict(batch.images)
        if images.pop("position_ids", None) is not None:
            images["mm_token_type_ids"] = (batch.input_ids_BS == step.loaded.config.image_token_id).int()
        step.loaded.model.generate(
            input_ids=batch.input_ids_BS,
            attention_mask=mask,
            **images,
            logits_processor=chain,
            generation_config=generation_config(settings, end_ids=-1, pad_id=0),
        )
        return int(step.device.memory().peak_bytes)


@dataclass
class LoadedStep:
    """The model, loss and optimizer of a run, loaded on a device to run single steps."""

    spec: RunSpec
    device: Any
    loaded: Any
    loss: Any
    guard: Any
    static_bytes: int

    def keyed(self, batch: Any) -> AbstractContextManager[None]:
        """A context in which dropout masks are keyed by the samples of this batch."""
        from engine.model.dropout import keyed, keyed_dropouts

        return keyed(keyed_dropouts(self.loaded.model), seed=0, step=1, sample_ids=batch.sample_ids)

    def step(self, rows: int, length: int, micro_batches: int) -> None:
        """Run an optimizer step on `micro_batches` × `rows` sequences; all tokens but one are targets, and packed rows
        have two documents each."""
        for _ in range(micro_batches):
            batch = self.batch(rows, length)
            with self.keyed(batch):
                terms = self.loss.terms(batch)
                value = self.loss.minimised(terms.share_of(rows * length, rows * length))
                value.backward()
            del value, terms, batch
        self.guard.prepare()
        self.guard.step(1)
        self.guard.accept()
        self.guard.optimizer.zero_grad(set_to_none=True)

    def batch(self, rows: int, length: int) -> Any:
        """A batch of random tokens [rows, length]. All tokens but one are targets, so that the loss has to gather the
        targets."""
        import torch

        from engine.data.batch import Batch

        with self.device.host_region():
            ids = torch.randint(0, 200, (rows, length))
            labels = ids.clone()
            labels[0, 0:2] = -100
            positions = (torch.arange(length) % (length // 2)).expand(rows, length)
            images = self.images(ids)
        return Batch(
            input_ids_BS=self.device.upload(ids),
            labels_BS=self.device.upload(labels),
            attention_mask_BS=None,
            position_ids_BS=self.device.upload(positions) if self.spec.recipe.data.packing else None,
            sample_ids=tuple(range(rows)),
            target_tokens=rows * (length - 1) - 1,
            images={name: self.device.upload(tensor) for name, tensor in images.items()},
            row_tokens_B=None if self.loss.balance is None else self.device.upload(torch.full((rows,), length)),
        )

    def images(self, ids: Any) -> dict[str, Any]:
        """Image inputs of a batch, empty without images: one image of the largest size per row, whose tokens are
        written to the end of each row of `ids`."""
        from engine.architecture.lookup import find_architecture
        from engine.budget.trace.memory_config import image_patches
        from engine.config.check.data_rules import image_key
        from engine.extras.simulate.batch import images_of

        if image_key(self.spec.recipe) is None:
            return {}
        arch = find_architecture(self.spec)
        patches = image_patches(arch, self.spec.recipe)
        encoder = arch.vision_encoder
        if encoder is None or not patches:
            return {}
        ids[:, -1 - patches // encoder.merge**2 : -1] = self.loaded.config.image_token_id
        made = images_of(encoder, patches, *ids.shape)
        if "token_type_ids" in made:
            made["token_type_ids"] = (ids == self.loaded.config.image_token_id).long()
        return made


@contextmanager
def loaded_step(spec: RunSpec) -> Iterator[LoadedStep]:
    """Load the model, loss and optimizer state on the profile's device, for as long as the context lasts."""
    from engine.device.open import open_device
    from engine.model.load import load_model
    from engine.model.loaded import tile_mlps
    from engine.model.loss import loss_of
    from engine.model.tokenizer import load_tokenizer
    from engine.train.step.optimizer import guarded_optimizer

    device, train = open_device(spec), spec.recipe.train
    with device.activate():
        with device.host_region():
            tokenizer = load_tokenizer(spec.recipe.model)
        loaded = load_model(spec, device, tokenizer)
        tile_mlps(loaded, spec.recipe)
        loss = loss_of(spec.recipe, loaded, device)
        guard = guarded_optimizer(train, loaded, device)
        gc.collect()
        yield LoadedStep(spec, device, loaded, loss, guard, device.memory().allocated_bytes)
