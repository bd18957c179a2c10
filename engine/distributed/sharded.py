"""Shards a model's weights over ranks with torch's `fully_shard` (FSDP2): groups, votes before collectives, recovery.

Every decoder layer, the embedding, the head, and each small module beside them is a group. Its weights are gathered for
their use and dropped after it (ZeRO-3), or kept from forward to backward (ZeRO-2), as the head's always are; a head
tied to the embedding is one group with it, kept for the whole pass. Gradients are reduced after each micro-batch, in
fp32: kept until the last, they would take the memory of the whole model's. Sums over micro-batches have the dtype of
the weights, as on one device (docs/evidence/measurements.md says what that costs in bf16).

All-gather and reduce-scatter vote on the host after their buffers are allocated and before they are launched, so that
memory that runs out on one rank ends the attempt of all at the same collective. Where ranks vote once per micro-batch
(`engine.distributed.votes`), a rank that failed joins the rest of its collectives with `join_others`.
`recover` then puts the model back.

This is the only file that uses private parts of torch; KNOWN_TORCH in `engine.budget.predict.shards` names the versions
it was written for; with others nothing is recovered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    foreach_all_gather,
)
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from engine.budget.predict.shards import KNOWN_TORCH, recovers_with
from engine.device.base import Device
from engine.device.oom import OutOfMemory, free_failed_graph, retry_on_oom
from engine.distributed.sharded_files import own_rows
from engine.distributed.votes import Collective, LostRankError, MicroBatchVotes, VotedGroup, raising_lost_rank
from engine.errors import MemoryExhaustedError

ALL_GATHER, REDUCE_SCATTER = "all-gather", "reduce-scatter"


class VotingAllGather(DefaultAllGather):
    """torch's all-gather for one group of parameters, launched once no rank will be missing in it."""

    def __init__(self, votes: MicroBatchVotes, index: int) -> None:
        self._votes, self._index = votes, index

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Raises the errors of `MicroBatchVotes.launching`."""
        collective = Collective(ALL_GATHER, self._index, output_tensor.numel(), output_tensor.dtype)
        with self._votes.launching(collective), raising_lost_rank():
            return super().__call__(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
            )


class VotingReduceScatter(DefaultReduceScatter):
    """torch's reduce-scatter for one group of parameters, launched once no rank will be missing in it."""

    def __init__(self, votes: MicroBatchVotes, index: int) -> None:
        self._votes, self._index = votes, index

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work:
        """Raises the errors of `MicroBatchVotes.launching`."""
        collective = Collective(REDUCE_SCATTER, self._index, input_tensor.numel(), input_tensor.dtype)
        with self._votes.launching(collective), raising_lost_rank():
            return super().__call__(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
            )


def groups_of(
    model: nn.Module, embedding: nn.Module, head: nn.Module, layer_kinds: Collection[str]
) -> list[list[nn.Module]]:
    """Modules whose parameters are gathered together, inner ones first: layers (by class name), others, embedding,
    head.

    Embedding and head with tied weights are one group. A module that learns in another dtype than the rest of its layer
    is a group of its own, because torch reduces a group's gradients in one dtype.
    """
    ends = {id(parameter) for end in (embedding, head) for parameter in end.parameters()}
    taken = set(ends)
    groups: list[list[nn.Module]] = []
    inner_first = list(model.modules())[::-1]
    for module in inner_first:
        if type(module).__name__ not in layer_kinds:
            continue
        groups += [[odd] for odd in _learning_otherwise(module) if _untaken(odd.parameters(), taken)]
        if _untaken(module.parameters(), taken):
            groups.append([module])
    for module in inner_first:
        if _untaken(module.parameters(recurse=False), taken):
            groups.append([module])
    tied = {id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()}
    return [*groups, *([[embedding, head]] if tied else [[embedding], [head]])]


def _learning_otherwise(layer: nn.Module) -> list[nn.Module]:
    """Modules trained in another dtype than most of the layer, such as bf16 copies beside fp32 adapters."""
    counts = Counter(parameter.dtype for parameter in layer.parameters() if parameter.requires_grad)
    most = counts.most_common(1)[0][0] if counts else None
    return [
        module
        for module in layer.modules()
        if any(p.requires_grad and p.dtype != most for p in module.parameters(recurse=False))
    ]


def _untaken(parameters: Iterator[Parameter], taken: set[int]) -> bool:
    """Add the `id`s of `parameters` to `taken`; returns whether any was new."""
    free = {id(parameter) for parameter in parameters} - taken
    taken |= free
    return bool(free)


class ShardedModel:
    """A model whose weights are spread over ranks; holds this rank's part of every trainable parameter."""

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module,
        groups: Sequence[Sequence[nn.Module]],
        mesh: DeviceMesh,
        voted_group: VotedGroup,
        *,
        head: nn.Module,
        drops_weights: bool,
        fill: Callable[[Sequence[nn.Module]], AbstractContextManager[None]],
        host_region: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Shard `root`, which holds `model` and `head`, over `mesh`. `fill` loads a group's weights around its
        sharding, so that at most one group is in memory in full. `drops_weights` is ZeRO-3: gathered weights are freed
        after forward, except the head's."""
        self.model, self.voted_group, self.votes = model, voted_group, MicroBatchVotes(voted_group)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        self._kept: list[tuple[FSDPModule, bool]] = []
        for modules in groups:
            drops = drops_weights and not any(module is head for module in modules)
            with fill(modules):
                fully_shard(list(modules), mesh=mesh, mp_policy=policy, reshard_after_forward=drops)
            self._kept.append((cast(FSDPModule, modules[0]), drops))
            if len(modules) == 1 and isinstance(modules[0], nn.Embedding):
                cast(FSDPModule, modules[0]).set_unshard_in_backward(False)  # its backward uses no weight
        with fill([root]):
            # The head's weights also belong to a module inside the model, which is not a group.
            fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=set(root.parameters()))
        self._root = cast(FSDPModule, root)
        self._groups = self._voting_groups()
        self._parameters = [parameter for group in self._groups for parameter in group.fsdp_params]
        self._learning = [parameter for parameter in self._parameters if parameter.sharded_param.requires_grad]
        self._local_parameters = [Parameter(p.sharded_param.to_local().detach()) for p in self._learning]
        with host_region():
            self._present = torch.zeros(len(self._learning), dtype=torch.uint8)
            self._squares = torch.zeros(1, dtype=torch.float64)
        self._squares_here = self._squares.numpy()
        """Writing into a tensor allocates memory, writing into this NumPy view does not."""
        self._present_here = self._present.numpy()
        """Whether a parameter had a gradient on this rank; after `sync_gradients`, on any rank."""
        self._in_dummy = False
        for group in self._groups:
            group.post_backward = self._noting_gradients(group)

    def _voting_groups(self) -> list[Any]:
        """Make all collectives vote, and sum gradients instead of averaging; returns torch's groups, in one order."""
        for module in [module for module in cast(nn.Module, self._root).modules() if isinstance(module, FSDPModule)]:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True, recurse=False)
        # Groups also run outside the root (in generation); without this the first of them would be made the root.
        self._root._get_fsdp_state()._lazy_init()
        states = self._root._get_fsdp_state()._state_ctx.all_states
        groups = [group for state in states for group in state._fsdp_param_groups]
        for index, group in enumerate(groups):
            group._all_gather_comm = VotingAllGather(self.votes, index)
            group._reduce_scatter_comm = VotingReduceScatter(self.votes, index)
        return groups

    def local_parameters(self) -> dict[str, Parameter]:
        """This rank's parts by name, in the model's order. The optimizer updates them in place; a part may be empty."""
        by_id = {id(p.sharded_param): part for p, part in zip(self._learning, self._local_parameters, strict=True)}
        return {name: by_id[id(p)] for name, p in self.model.named_parameters() if id(p) in by_id}

    def full_parameters(self) -> dict[str, DTensor]:
        """As DTensors with their full shapes, by the names of `local_parameters`."""
        learning = {id(p.sharded_param) for p in self._learning}
        return {name: cast(DTensor, p) for name, p in self.model.named_parameters() if id(p) in learning}

    def first_elements(self) -> dict[str, int]:
        """By name: the flat index in the whole parameter at which this rank's part begins."""
        return {
            name: own_rows(whole).start * math.prod(whole.shape[1:]) for name, whole in self.full_parameters().items()
        }

    def sync_gradients(self) -> None:
        """After the last backward: give every part its gradient summed over ranks; None where no rank has one, which
        optimizers treat differently from zero. Allocates nothing. All ranks call this. Raises LostRankError."""
        with raising_lost_rank():
            dist.all_reduce(self._present, op=dist.ReduceOp.MAX, group=self.voted_group.group)
        for met, parameter, part in zip(self._present_here, self._learning, self._local_parameters, strict=True):
            gradient = parameter.sharded_param.grad
            part.grad = gradient.to_local() if met and gradient is not None else None

    def global_norm(self, norm_here: float) -> float:
        """The norm of the whole gradients, from all ranks' parts. PeerFailedError: another rank failed."""
        self._squares_here[0] = norm_here**2
        self.voted_group.ready()
        with raising_lost_rank():
            dist.all_reduce(self._squares, group=self.voted_group.group)
        return math.sqrt(self._squares_here[0])

    def drop_gradients(self) -> None:
        """Discard the gradients of local parameters, and of the full parameters that they are parts of."""
        self._present.zero_()
        for parameter, part in zip(self._learning, self._local_parameters, strict=True):
            parameter.sharded_param.grad = part.grad = None

    @property
    def recovers(self) -> bool:
        """Whether `recover` is known for this version of torch."""
        return recovers_with(torch.__version__)

    def recover(self) -> None:
        """Free all weights that a failed attempt gathered and all its gradients, including those in flight. Allocates
        nothing.

        torch's own reset does not free the gradients of gathered weights, nor an all-gather that failed while its
        result was copied out. LostRankError: recovery is unknown for this torch; all ranks must restart.
        """
        if not self.recovers:
            raise LostRankError(
                f"memory ran out, and Tunedeck cannot restore sharded weights with torch {torch.__version__}",
                expected=f"torch {' or '.join(KNOWN_TORCH)}",
                fix="the run continues from its last checkpoint; a smaller train.micro_batch needs no recovery",
            )
        self._root.reset_iter_state()
        for parameter in self._parameters:
            if "unsharded_accumulated_grad" in vars(parameter):  # until torch 2.14; later that is the leaf's gradient
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            parameter.free_unsharded_param()
        self.drop_gradients()

    def join_others(self, device: Device, report_retry: Callable[[OutOfMemory, str, int], None]) -> None:
        """After this rank failed in a micro-batch: launch the others' collectives up to their next vote, with its part
        of the weights and zeros as gradients; what it receives is dropped.

        Frees the failed attempt first. An allocation that fails here is tried again and passed to `report_retry` with
        the remedy and the attempt's number; LostRankError if it fails each time.
        """
        if self.votes.due is None:
            return
        free_failed_graph(device)
        self.recover()
        while (due := self.votes.due) is not None:
            try:
                retry_on_oom(partial(self._join, due), "recover", device, report_retry)
            except MemoryExhaustedError as error:
                raise LostRankError(
                    "memory ran out, and this rank has no memory left to finish the micro-batch with the "
                    f"others: {error}",
                    fix="the run continues from its last checkpoint",
                ) from error

    @torch.no_grad()
    def _join(self, due: Collective) -> None:
        """Take part in `due` on the current stream, on which its buffers are not reused before it is done."""
        group = self._groups[due.group]
        if due.kind == ALL_GATHER:
            processes, stream = group._all_gather_process_group, group.device_handle.current_stream()
            foreach_all_gather(
                group.fsdp_params, processes, False, stream, stream, group.device, group._all_gather_comm
            )
            return
        processes, launch = group._reduce_scatter_process_group, group._reduce_scatter_comm
        sent = launch.allocate((due.elements,), dtype=due.dtype, device=group.device).zero_()
        received = launch.allocate((due.elements // processes.size(),), dtype=due.dtype, device=group.device)
        launch(received, sent, processes, dist.ReduceOp.SUM)

    @contextmanager
    def forward_only(self, *, gathers_head: bool = False) -> Iterator[None]:
        """For passes without a backward: each group's weights are freed after use, the head's at the end.
        `gathers_head` keeps these throughout, for passes that call the model directly. PeerFailedError: another rank
        cannot take part."""
        for module, _ in self._kept:
            module.set_reshard_after_forward(True, recurse=False)
        try:
            if gathers_head:
                self._kept[-1][0].unshard()
            yield
        finally:
            for module, drops in self._kept:
                module.set_reshard_after_forward(drops, recurse=False)
                module.reshard()
            if self.recovers:
                self.recover()

    @contextmanager
    def dummy_micro_batch(self) -> Iterator[None]:
        """A dummy micro-batch: its zero gradients do not count as gradients in `sync_gradients`."""
        self._in_dummy = True
        try:
            yield
        finally:
            self._in_dummy = False

    def _noting_gradients(self, group: Any) -> Callable[..., None]:
        """`group`'s `post_backward`, first recording which parameters have gradients: torch adds zeros for the rest."""
        post_backward = group.post_backward
        inside = set(map(id, group.fsdp_params))
        mine = [(index, parameter) for index, parameter in enumerate(self._learning) if id(parameter) in inside]

        def noting(*unused: Any) -> None:
            for index, parameter in mine:
                if not self._in_dummy and hasattr(parameter, "_unsharded_param"):
                    self._present_here[index] |= parameter._unsharded_param.grad is not None
            post_backward(*unused)

        return noting
