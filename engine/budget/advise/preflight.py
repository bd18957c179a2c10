"""Warns before a run starts, each time with the reason and a fix. A warning does not stop a run; what does is in
`engine.checks`.

Try: `tunedeck plan -p 80gb -r qlora --set model.id=openai/gpt-oss-20b`
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine.architecture.continued import continued, find_adapter
from engine.architecture.facts import Architecture
from engine.architecture.families import experts_note
from engine.architecture.lookup import ModelFacts
from engine.architecture.model_folder import note_on_quantised, weight_folder
from engine.architecture.parameters import (
    HEAD,
    elements,
    globs_of_parts,
    layer_parameters,
    outer_parameters,
    parameter_count,
)
from engine.architecture.stored_names import note_on_surplus
from engine.budget.advise.plan import make_plan, recomputes_all
from engine.budget.predict.inference import generates
from engine.budget.predict.shards import KNOWN_TORCH, SHARDS_SINCE, recovers_with
from engine.budget.predict.static import static_bytes
from engine.budget.trace.memory_config import (
    fused_kernels,
    memory_config_of,
    patterns_of,
    wants_fused_kernels,
    why_whole,
)
from engine.budget.trace.trainable import learning_names, trained_parameters
from engine.config.check.data_rules import image_key
from engine.config.files.machine import install_command, installed, older
from engine.config.name_patterns import compile_patterns
from engine.config.parameter_groups import describe_groups
from engine.config.schema.recipe import Moe, Recipe
from engine.config.schema.run import Parallel, RunSpec

GIB = 2**30

OFFLOAD_KEYS = {"activation": "activations", "optimizer": "optimizer"}
"""By the first word of each offload's key: what the plan calls it on the host."""

MAX_SERVED_RANK = 512
"""The largest rank of an adapter that vLLM loads."""

SHORT_ANSWER_TOKENS = 32
"""Generating no more tokens than this at each evaluation is no reason for a warning."""


def warnings_of(
    facts: ModelFacts, spec: RunSpec, *, free_disk_bytes: int | None = None, torch_version: str | None = None
) -> list[str]:
    """All warnings of a run; those about disk space only if `free_disk_bytes` is given. `torch_version` defaults to the
    installed one. Raises the reason of `facts` if the model's memory cannot be predicted."""
    arch = facts.require_architecture()
    found = [*_experts_stay_wide(arch, spec), *_images(arch, spec), *_offload(facts, spec), *_generation(arch, spec)]
    found += _host_memory(facts, spec)
    found += _nothing_to_round(arch, spec)
    found += _trained_in_float16(arch, spec)
    found += _nothing_to_tile(arch, spec)
    found += _nothing_to_freeze(arch, spec.recipe)
    found += _groups(arch, spec)
    found += _attention_dropout(arch, spec)
    found += _nothing_to_replace(spec)
    found += _no_experts(arch, spec.recipe)
    found += _nothing_to_shard(spec)
    found += _no_time(spec)
    found += _shards(spec, torch_version or installed("torch"))
    found += _shards_over_machines(facts, spec)
    if free_disk_bytes is not None:
        found += _disk(arch, spec, free_disk_bytes)
    return found


def checkpoints_bytes(arch: Architecture, spec: RunSpec) -> int:
    """Most bytes of disk that a run's checkpoints take: the newest, the best, and one being written."""
    config = memory_config_of(arch, spec)
    total = static_bytes(arch, replace(config, optimizer_offload=False, image_patches=1)).total
    # A gradient is as large as its weight: all gradients together have the size of all trained weights.
    checkpoint = spec.recipe.checkpoint
    return (total.gradients + total.optimizer) * (checkpoint.keep + checkpoint.keep_best + 1)


def _experts_stay_wide(arch: Architecture, spec: RunSpec) -> Iterator[str]:
    if spec.recipe.model.quantize != "nf4" or not arch.experts:
        return
    layers = (layer_parameters(arch, arch.is_dense(layer)) for layer in range(arch.layers))
    narrow = sum(elements(parameter for parameter in layer if parameter.linear) for layer in layers)
    wide, dtype = 1 - narrow / parameter_count(arch), memory_config_of(arch, spec).dtype
    yield (
        f'model.quantize = "nf4" leaves {100 * wide:.0f} % of this model in {dtype}: only linear layers are '
        'loaded in 4 bits, not fused experts (as in the plan); model.quantize = "none" is faster and hardly '
        'larger, and several devices with strategy = "sharded" need less memory each'
    )


def _images(arch: Architecture, spec: RunSpec) -> Iterator[str]:
    """Images that fit into no sequence, and image settings for a model without a vision encoder."""
    key, data = image_key(spec.recipe), spec.recipe.data
    if key is None:
        return
    if arch.vision_encoder is None:
        yield f"{key} is for images, but {spec.recipe.model.id} has no vision encoder"
        return
    tokens = arch.vision_encoder.tokens_of(data.image_max_pixels)
    if tokens < data.max_length:
        return
    what = f"an image takes up to {tokens} tokens, but data.max_length is {data.max_length}"
    if arch.vision_encoder.patches is not None:
        yield f"{what}: samples with images are dropped; raise data.max_length"
        return
    pixels = data.max_length // 2 * arch.vision_encoder.pixels_per_token
    yield (
        f"{what}: samples with such images are dropped; set data.image_max_pixels={pixels} for at most half of a "
        "sequence, or raise data.max_length"
    )


def _offload(facts: ModelFacts, spec: RunSpec) -> Iterator[str]:
    """Warn of offloading on a CPU, where device memory is host memory; else of activation offload together with
    gradient checkpointing, if the run fits without it."""
    train = spec.recipe.train
    asked = [key for key in ("activation_offload", "optimizer_offload") if getattr(train, key)]
    if asked and spec.profile.device.kind == "cpu":
        keys = " and ".join(f"train.{key}" for key in asked)
        yield f'{keys} has no effect with device.kind = "cpu", where the host is the device; leave it out'
    elif train.activation_offload and recomputes_all(train.gradient_checkpointing):
        yield from _offload_of_checkpoints(facts, spec)


def _offload_of_checkpoints(facts: ModelFacts, spec: RunSpec) -> Iterator[str]:
    """Warn if a run would fit without offloading its checkpoints, which makes every layer wait for copies."""
    train = spec.recipe.train.model_copy(update={"activation_offload": False})
    recipe, arch = spec.recipe.model_copy(update={"train": train}), facts.require_architecture()
    plan = make_plan(spec.model_copy(update={"recipe": recipe}), facts=facts)
    if plan.verdict != "fits":
        return
    length, kept_bytes = plan.length, plan.config.base_bytes * arch.hidden * arch.layers * plan.tokens_per_micro_batch
    yield (
        "train.activation_offload with train.gradient_checkpointing moves only the layers' inputs, "
        f"{kept_bytes / GIB:.2f} GiB for {plan.micro_batch} × {length} tokens, and the run fits without it: "
        "set train.activation_offload=false"
    )


def _host_memory(facts: ModelFacts, spec: RunSpec) -> Iterator[str]:
    """Warn of offloads that the host's memory cannot hold."""
    plan = make_plan(spec, facts=facts)
    if plan.host_fits:
        return
    switched_on = " and ".join(f"train.{name}_offload" for name in OFFLOAD_KEYS if OFFLOAD_KEYS[name] in plan.host)
    yield (
        f"{switched_on} needs {plan.host_bytes / GIB:.3g} GiB of host memory on each machine, which has "
        f"{plan.host_capacity_bytes / GIB:.3g}: leave it out, or set device.host_memory_gib to the machine's "
        "memory"
    )


def notes_on_model(recipe: Recipe, facts: ModelFacts) -> list[str]:
    """Sentences if adapters leave out the experts of a mixture of experts, if quantised weights are loaded dequantised,
    and if the files have tensors that are not trained; also for model families whose memory cannot be predicted."""
    if facts.config is None:
        return []
    experts = None if find_adapter(recipe.model) is not None else experts_note(facts.config, recipe)
    surplus = note_on_surplus(facts.config, weight_folder(recipe.model))
    return [note for note in (experts, note_on_quantised(facts.config), surplus) if note]


def notes_on_kernels(spec: RunSpec) -> list[str]:
    """A sentence if the run would be planned with fused kernels where they are installed."""
    if not wants_fused_kernels(spec) or fused_kernels(spec):
        return []
    return [
        "planned without fused kernels, because liger-kernel is not installed; with it, the run is faster and "
        f"needs less memory ({install_command('cuda', ['liger-kernel'])})"
    ]


def notes_on_serving(recipe: Recipe) -> list[str]:
    """Return a sentence if servers accept the adapter only merged, as far as the recipe shows."""
    method = recipe.method
    if method.kind != "lora":
        return []
    targets = method.targets if isinstance(method.targets, list) else []
    keys = {
        "method.dora": method.dora,
        "method.also_train": bool(method.also_train),
        "method.targets on experts": any("expert" in target for target in targets),
        f"method.rank = {method.rank}": method.rank > MAX_SERVED_RANK,
        "model.rope_scaling": recipe.model.rope_scaling is not None,
    }
    found = ", ".join(key for key, given in keys.items() if given)
    return [f"vLLM and SGLang will need the result merged, because of {found}: docs/handover.md"] if found else []


def _shards(spec: RunSpec, torch_version: str) -> Iterator[str]:
    """An older torch cannot shard at all: `engine.checks` has a rule for it."""
    sharded = spec.profile.parallel.strategy == "sharded"
    if not sharded or recovers_with(torch_version) or older(torch_version, SHARDS_SINCE):
        return
    yield (
        f"with torch {torch_version}, sharded weights cannot be restored after an out-of-memory error: every "
        f"one restarts all ranks from the last checkpoint; install torch {KNOWN_TORCH[-1]}, or choose a "
        "train.micro_batch that certainly fits"
    )


def _shards_over_machines(facts: ModelFacts, spec: RunSpec) -> Iterator[str]:
    """Warn of weights that are sharded over several machines though each device holds the whole model."""
    parallel, machines = spec.profile.parallel, spec.profile.nodes.count
    if machines == 1 or parallel.strategy != "sharded":
        return
    replicated = parallel.model_copy(update={"strategy": "replicated"})
    profile = spec.profile.model_copy(update={"parallel": replicated})
    whole = make_plan(spec.model_copy(update={"profile": profile}), facts=facts)
    if whole.verdict == "fits":
        yield (
            f"weights that are sharded over {machines} machines cross the network in every micro-batch (see "
            'the plan), although each device can hold the whole model: set parallel.strategy="replicated", '
            "which exchanges gradients once per step"
        )


def _nothing_to_round(arch: Architecture, spec: RunSpec) -> Iterator[str]:
    """train.rounding and train.state_dtype have no effect if no weight is trained in bf16."""
    train, config = spec.recipe.train, memory_config_of(arch, spec)
    asked = {"train.rounding": (train.rounding, "exact"), "train.state_dtype": (train.state_dtype, "float32")}
    for key, (value, default) in asked.items():
        if value != default and not config.trains_in_bfloat16:
            learning = config.adapter_dtype or config.dtype
            yield (
                f'{key} = "{value}" has no effect: it applies to weights trained in bfloat16, and these are '
                f"trained in {learning}; leave it out"
            )


def _trained_in_float16(arch: Architecture, spec: RunSpec) -> Iterator[str]:
    """Weights that are trained in full beside LoRA have the base's dtype."""
    config = memory_config_of(arch, spec)
    if config.lora and config.dtype == "float16" and config.patterns.also_train:
        yield (
            "weights trained in full in addition to LoRA (method.also_train, a router) are trained in float16, "
            'where an update below 1/2048 of a weight is lost: set model.dtype = "float32", or "bfloat16" '
            "if the device supports it"
        )


def _nothing_to_tile(arch: Architecture, spec: RunSpec) -> Iterator[str]:
    asked, why = spec.recipe.train.mlp_tiles, why_whole(arch, spec)
    if asked > 1 and why:
        yield f"train.mlp_tiles = {asked} has no effect: {why}; leave it out"


def _nothing_to_freeze(arch: Architecture, recipe: Recipe) -> Iterator[str]:
    """Patterns of method.freeze that name only what is not trained anyway, and adapters that are continued frozen."""
    method = recipe.method
    if not method.freeze:
        return
    without = recipe.model_copy(update={"method": method.model_copy(update={"freeze": []})})
    trained = learning_names(arch, patterns_of(arch, continued(without, arch)))
    aliases = {HEAD} if arch.tied and outer_parameters(arch)[0].name in trained else set[str]()
    for pattern in method.freeze:
        test = compile_patterns(globs_of_parts([pattern], arch)).matches
        if not any(map(test, trained | aliases)):
            yield f'method.freeze: "{pattern}" has no effect: it matches nothing that is trained; remove it'
    if method.kind == "lora" and find_adapter(recipe.model) is not None:
        yield "method.freeze: the plan counts the frozen part of the adapter that is continued as trained"


def _groups(arch: Architecture, spec: RunSpec) -> Iterator[str]:
    """Report what each of [[train.groups]] has. One without parameters is an error before."""
    if spec.recipe.train.groups:
        yield describe_groups(spec.recipe.train.groups, trained_parameters(arch, memory_config_of(arch, spec)))


def _nothing_to_shard(spec: RunSpec) -> Iterator[str]:
    parallel = spec.profile.parallel
    if parallel.shard != Parallel().shard and parallel.strategy != "sharded":
        yield (
            f'parallel.shard = "{parallel.shard}" has no effect: parallel.strategy is "{parallel.strategy}", '
            'not "sharded"'
        )


def _no_time(spec: RunSpec) -> Iterator[str]:
    """What a plan tells of time takes both the bandwidth and the throughput of the device."""
    device = spec.profile.device
    lacking = [key for key in ("bandwidth_gbs", "peak_tflops") if getattr(device, key) is None]
    given = [key for key in ("bandwidth_gbs", "price_per_hour") if getattr(device, key) is not None]
    if given and lacking:
        keys, missing = " and ".join(f"device.{key}" for key in given), " and ".join(f"device.{key}" for key in lacking)
        yield f"{keys}: the plan shows no time and no cost without {missing}"


def _no_experts(arch: Architecture, recipe: Recipe) -> Iterator[str]:
    given = [f"moe.{key}" for key, value in recipe.moe.model_dump().items() if value != getattr(Moe(), key)]
    if given and arch.experts is None:
        yield f"{' and '.join(given)}: no effect, because this model has no experts"


def _nothing_to_replace(spec: RunSpec) -> Iterator[str]:
    model = spec.recipe.model
    automatic = model.model_copy(update={"kernels": "auto"})
    recipe = spec.recipe.model_copy(update={"model": automatic})
    if model.kernels != "auto" and not wants_fused_kernels(spec.model_copy(update={"recipe": recipe})):
        yield f'model.kernels = "{model.kernels}" has no effect: fused kernels need CUDA, without train.compile'


def _attention_dropout(arch: Architecture, spec: RunSpec) -> Iterator[str]:
    """Report attention dropout that has no effect, and kernels that draw the masks themselves: the training result then
    depends on the division into micro-batches."""
    asked = spec.recipe.model.attention_dropout
    if asked != "auto" and not arch.attention_dropout:
        yield f'model.attention_dropout = "{asked}" has no effect: this model has no attention dropout'
    if asked != "keep" or not arch.attention_dropout:
        return
    if memory_config_of(arch, spec).attention != "eager":
        yield (
            'model.attention_dropout = "keep": the attention kernel draws the masks, so an out-of-memory '
            'error or a different micro-batch changes the training result; model.attention = "eager" keeps '
            "the dropout without this effect"
        )


def _generation(arch: Architecture, spec: RunSpec) -> Iterator[str]:
    """Answers of more than SHORT_ANSWER_TOKENS tokens at evaluations. With the device's bandwidth, the warning names
    the least seconds for a batch of answers: each token reads all weights once."""
    new_tokens, bandwidth_gbs = spec.recipe.generate.max_new_tokens, spec.profile.device.bandwidth_gbs
    if not generates(spec.recipe) or new_tokens <= SHORT_ANSWER_TOKENS:
        return
    total = static_bytes(arch, memory_config_of(arch, spec)).total
    seconds = new_tokens * (total.weights + total.adapters) / (bandwidth_gbs * 1e9) if bandwidth_gbs else 0.0
    least = f" (at least {seconds:.1f} s for each batch of answers)" if seconds >= 0.1 else ""
    yield (
        f"evaluations during training generate up to {new_tokens} tokens per sample, which takes time{least} "
        "and the memory in the plan's row generate; to avoid it, set eval.samples=0 and leave out exact_match"
    )


def _disk(arch: Architecture, spec: RunSpec, free_bytes: int) -> Iterator[str]:
    needed = checkpoints_bytes(arch, spec)
    if needed > free_bytes:
        yield (
            f"the checkpoints take up to {needed / GIB:.3g} GiB, but {free_bytes / GIB:.3g} GiB of disk are "
            "free in the runs folder: a full disk pauses the run; lower checkpoint.keep, or choose another "
            "folder with --runs"
        )


def free_bytes(folder: Path) -> int | None:
    """Free bytes of the disk of `folder`, even if the folder does not exist yet; None if unknown."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return None
