"""Which modules are sharded as one group, and which private parts of torch sharding relies on."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state

from engine.budget.predict.shards import KNOWN_TORCH
from engine.distributed import sharded
from engine.distributed.sharded import ShardedModel, groups_of
from engine.distributed.votes import LostRankError
from engine.model.loss import HeadWithLoss
from tests.distributed.rank_workbench import NEEDS_SHARDS

PRIVATE = {
    _fsdp_param.FSDPParam: ("unsharded_accumulated_grad", "_unsharded_param", "free_unsharded_param", "sharded_param"),
    _fsdp_param_group.FSDPParamGroup: (
        "post_backward", "fsdp_params", "device_handle", "_all_gather_comm", "_reduce_scatter_comm",
        "_all_gather_process_group", "_reduce_scatter_process_group",
    ),
    _fsdp_state.FSDPState: ("_lazy_init", "_state_ctx", "_fsdp_param_groups"),
    FSDPModule: ("reset_iter_state", "_get_fsdp_state"),
}  # fmt: skip
"""What `engine.distributed.sharded` uses beside torch's documented interface."""


class Layer(nn.Module):
    """A layer of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)


class Model(nn.Module):
    """An embedding, two layers, a norm and a head."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.project = nn.LayerNorm(4), nn.Linear(4, 8, bias=False)
        if tied:
            self.project.weight = self.embedding.weight


def groups(model: Model) -> list[list[nn.Module]]:
    return groups_of(model, model.embedding, HeadWithLoss(model.project), ["Layer"])


def test_layers_the_norm_the_embedding_and_the_head_travel_apart() -> None:
    model = Model(tied=False)
    *layers, norm, embedding, (head,) = groups(model)
    assert {id(layer) for (layer,) in layers} == {id(layer) for layer in model.layers}
    assert (norm, embedding) == ([model.norm], [model.embedding])
    assert isinstance(head, HeadWithLoss) and head.project is model.project


def test_a_head_tied_to_the_embedding_travels_with_it() -> None:
    model = Model(tied=True)
    embedding, head = groups(model)[-1]
    assert embedding is model.embedding and isinstance(head, HeadWithLoss)


def test_what_learns_in_another_dtype_than_its_layer_travels_alone() -> None:
    model = Model(tied=False)
    odd = model.layers[1].norm.to(torch.bfloat16)
    assert [odd] in groups(model)


def test_every_parameter_is_in_one_group() -> None:
    model, seen = Model(tied=False), set[int]()
    for modules in groups(model):
        here = {id(parameter) for module in modules for parameter in module.parameters()}
        seen |= here
    assert seen == {id(parameter) for parameter in model.parameters()}


@NEEDS_SHARDS
@pytest.mark.parametrize("kind", PRIVATE, ids=lambda kind: kind.__name__)
def test_torch_has_the_private_parts_that_recovery_needs(kind: type) -> None:
    """Holds for the versions in KNOWN_TORCH: read `_fully_shard` again before one is added."""
    assert torch.__version__.startswith(KNOWN_TORCH)
    # A class that torch exports says that it lives where it is exported; its methods know better.
    method = next(filter(inspect.isfunction, vars(kind).values()))
    source = inspect.getsource(sys.modules[method.__module__])
    assert [name for name in PRIVATE[kind] if name not in source] == []


def test_torch_gathers_for_a_rank_that_joins_others() -> None:
    names = list(inspect.signature(_fsdp_collectives.foreach_all_gather).parameters)
    streams = ["all_gather_copy_in_stream", "all_gather_stream"]
    assert names == ["fsdp_params", "group", "async_op", *streams, "device", "all_gather_comm"]


def test_on_another_version_memory_that_ran_out_takes_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "recovers_with", lambda version: False)
    with pytest.raises(LostRankError, match="cannot restore sharded weights"):
        ShardedModel.recover(ShardedModel.__new__(ShardedModel))
