"""Computes what the plan of a single run does not contain for one stage of a staged run: host memory, disk space, and
the device memory of an assembly.

Host memory counts the tensors that a stage holds there: the checkpoint being written or offloaded optimizer state of a
stage that trains, tensors in flight of one that assembles. What every process takes (libraries, token files) is not
counted.

Try: `tunedeck plan -p 80gb -r RECIPE --json` with a recipe that has [[stages]].
"""

from __future__ import annotations

from dataclasses import replace

from engine.budget.advise.preflight import checkpoints_bytes
from engine.budget.architecture.assembled import SHARD_BYTES, SHARED_EXPERT_WIDTH
from engine.budget.architecture.facts import Architecture
from engine.budget.architecture.parameters import elements, layer_parameters, outer_parameters, parameter_count
from engine.budget.predict.inference import evaluation
from engine.budget.predict.non_torch_memory import non_torch_memory
from engine.budget.predict.static import Tensors, static_bytes
from engine.budget.trace.memory_config import DTYPE_BYTES, memory_config_of
from engine.budget.trace.polynomial import highest_value, shape_of
from engine.spec.schema.run import RunSpec

MERGE_FACTOR = 1.15
"""Host memory that merging needs, relative to the weights: one layer in fp32 and buffers for files beside them."""


def host_bytes_of_training(arch: Architecture, spec: RunSpec) -> int:
    """Most bytes of host memory that the tensors of a stage take: one checkpoint while it is written (trained weights
    and optimizer state, offloaded or not), or the model that its adapter is merged into at the end."""
    total = _total(arch, spec)
    return max(total.gradients + total.optimizer, _merged_bytes(total, spec, MERGE_FACTOR))


def disk_bytes_of_training(arch: Architecture, spec: RunSpec) -> int:
    """Most bytes of disk that a stage takes: its checkpoints, one of which holds the result, and a merged model."""
    return checkpoints_bytes(arch, spec) + _merged_bytes(_total(arch, spec), spec, 1.0)


def _total(arch: Architecture, spec: RunSpec) -> Tensors:
    """Bytes of the model's tensors by component. Optimizer state is counted even if it is offloaded; `gradients` is
    also the size of the trained weights."""
    return static_bytes(arch, replace(memory_config_of(arch, spec), optimizer_offload=False)).total


def _merged_bytes(total: Tensors, spec: RunSpec, factor: float) -> int:
    return round(factor * total.weights) if spec.recipe.finish.merge else 0


def host_bytes_of_assembly(arch: Architecture, spec: RunSpec) -> int:
    """Most bytes of host memory that an assembly of models of the dense architecture `arch` takes: one file of the
    result, two experts' versions of the largest tensor, and their mean in fp32."""
    parameters = (*layer_parameters(arch, True), *outer_parameters(arch))
    largest = max(parameter.elements for parameter in parameters)
    return SHARD_BYTES + largest * (2 * _element_bytes(arch, spec) + DTYPE_BYTES["float32"])


def disk_bytes_of_assembly(arch: Architecture, spec: RunSpec, experts: int, *, shared_expert: bool) -> int:
    """Bytes on disk of the mixture of `experts` models of the dense architecture `arch`: one model, the feed-forward
    weights of the other experts, routers, and Qwen2-MoE's shared expert."""
    feed_forward = elements(p for p in layer_parameters(arch, True) if p.name.startswith("mlp."))
    added = (experts - 1) * feed_forward + experts * arch.hidden
    added += (3 * SHARED_EXPERT_WIDTH + 1) * arch.hidden if shared_expert else 0
    return (parameter_count(arch) + arch.layers * added) * _element_bytes(arch, spec)


def device_bytes_of_hidden_router(arch: Architecture, spec: RunSpec) -> int:
    """Bytes of device memory that an assembly takes if the stage's key `router` is "hidden": those of an evaluation of
    the recipe's own model `arch` on one sequence of data.max_length tokens."""
    config = memory_config_of(arch, spec)
    shape = shape_of(1, spec.recipe.data.max_length, config.chunk_tokens, patches=config.image_patches)
    peak_bytes = static_bytes(arch, config).total.weights + highest_value(evaluation(arch, config), shape)
    return peak_bytes + non_torch_memory(spec).total(peak_bytes)


def _element_bytes(arch: Architecture, spec: RunSpec) -> int:
    return DTYPE_BYTES[memory_config_of(arch, spec).dtype]
