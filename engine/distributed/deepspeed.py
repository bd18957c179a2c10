"""A model whose collectives, partitions and optimizer step are DeepSpeed's: ZeRO-2 and ZeRO-3 for those who have it.

The order of samples, micro-batches, the loss, the learning rate and checkpoints stay the engine's. DeepSpeed averages
gradients over ranks, and each rank's share of the loss is already divided by the targets of all, so a loss is
multiplied by their number before its backward. Its collectives cannot be voted on: a rank that runs out of memory
leaves others standing in one, and the attempt is over everywhere (`EndedByMemoryError`); then the next one starts.

Everything here is called by all ranks in the same order. This is the only file that imports deepspeed; what it knows
beyond the documented interface was read in 0.19.8. Try: `pytest tests/distributed/test_deepspeed.py` where it is
installed
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from engine.budget.zero import PREFETCH_ELEMENTS, REDUCE_ELEMENTS, require_deepspeed
from engine.data.batch import Batch
from engine.device.base import Device
from engine.device.oom import classify
from engine.distributed.host_gather import LostRankError
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import Whole

PERSISTENT_ELEMENTS = 10_000
"""ZeRO-3 leaves smaller parameters gathered: norms and biases of models up to this width, no matrices."""

GONE = re.compile(r"gloo|nccl|connection (?:closed|reset|refused)|broken pipe|timed out", re.IGNORECASE)
"""In the text of a plain RuntimeError of a collective when a peer is gone."""


class EndedByMemoryError(LostRankError):
    """Memory ran out on this rank while others wait for it in a collective: the attempt is over for all of them."""

    def __init__(self, found: str, lesson: dict[str, Any] | None = None) -> None:
        super().__init__(found, fix="the run goes on from its last checkpoint")
        self.lesson = lesson
        """What the next attempt should know; None where nothing was learned."""


class Zero:
    """`whole` and its optimizer under DeepSpeed: stage 2 keeps whole weights on every rank, stage 3 a part of each."""

    def __init__(
        self, whole: Whole, optimizer: torch.optim.Optimizer, ranks: Ranks, device: Device, *, stage: int,
        max_grad_norm: float,
    ) -> None:
        """Spread weights (rank 0's count), gradients and optimizer state over the ranks.

        Raises:
            EnvironmentProblem: deepspeed is not installed.
            LostRankError: another rank is gone.
        """
        learning = [p for group in optimizer.param_groups for p in group["params"]]
        self.whole, self.stage, self._ranks, self._device = whole, stage, ranks, device
        self._torch_optimizer = optimizer
        config = config_of(stage, learning, max_grad_norm)
        self._deepspeed = _imported(device)
        with _device_as_local_rank(device), losing_a_peer_ends_it():
            if stage == 3:
                self._deepspeed.zero.Init(module=whole, config_dict_or_path=config)
                for weight in whole.head.parameters():
                    self._deepspeed.zero.register_external_parameter(whole.head, weight)
            self._engine, self._optimizer, *_ = self._deepspeed.initialize(
                model=whole, optimizer=optimizer, config=config, dist_init_required=False
            )
        self._flats: list[Parameter] = (
            self._optimizer.fp32_partitioned_groups_flat if stage == 3 else
            self._optimizer.single_partition_of_fp32_groups
        )  # fmt: skip

    @property
    def spreads_weights(self) -> bool:
        """Whether no rank can compute anything alone (ZeRO-3)."""
        return self.stage == 3

    def flat_parts(self) -> list[tuple[dict[str, Any], Parameter]]:
        """(group of the optimizer, the fp32 weights of this rank in it, in one row): what the optimizer updates."""
        groups = self._torch_optimizer.param_groups
        if self.stage == 2:
            return list(zip(groups, self._flats, strict=True))
        group_of = self._optimizer.sub_group_to_group_id
        return [(groups[group_of[index]], flat) for index, flat in enumerate(self._flats)]

    def link_state(self) -> None:
        """Once the optimizer's state is allocated: from here on it can be read and set parameter by parameter."""
        if self.stage == 2:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def held(self) -> list[Tensor]:
        """The fp32 weights of this rank and their optimizer state."""
        states = [value for state in self._torch_optimizer.state.values() for value in state.values()]
        return [*self._flats, *(value for value in states if isinstance(value, Tensor))]

    @property
    def gradient_bytes(self) -> int:
        """Of this rank's sums of gradients, which are there from a step's first micro-batch to its end."""
        return sum(flat.numel() * flat.element_size() for flat in self._flats)

    def compute(self, batch: Batch) -> Tensor:
        """The loss of a batch; without gradients outside of DeepSpeed's bookkeeping of steps."""
        with losing_a_peer_ends_it():
            return (self._engine if torch.is_grad_enabled() else self.whole)(batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add to the sum of gradients over ranks; `last` of the step. Frees what the others' parts took."""
        self._engine.set_gradient_accumulation_boundary(last)
        with losing_a_peer_ends_it():
            self._engine.backward(self._ranks.size * loss, scale_wrt_gas=False)

    def step(self) -> float:
        """Clip and update; returns the norm before clipping. Where that is not finite nothing was applied."""
        with losing_a_peer_ends_it():
            self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def drop_gradients(self) -> None:
        """Forget micro-batches that no step follows."""
        self._optimizer.zero_grad(set_to_none=True)
        if self.stage == 2:
            for index in range(len(self._flats)):
                self._optimizer.averaged_gradients[index] = self._optimizer.all_grad_tensors[index] = None

    @contextmanager
    def head_gathered(self) -> Iterator[None]:
        """Inside, the head's weights are there for whoever looks at them."""
        with losing_a_peer_ends_it(), self._gathered(list(self.whole.head.parameters())):
            yield

    def on_first(self, parameters: Iterable[Parameter]) -> dict[Parameter, Tensor]:
        """Whole weights in rank 0's host memory, one at a time; empty on the others. ZeRO-3 only."""
        found: dict[Parameter, Tensor] = {}
        for parameter in dict.fromkeys(parameters):
            with losing_a_peer_ends_it(), self._gathered([parameter]):
                if self._ranks.is_first:
                    with self._device.host_region():
                        found[parameter] = parameter.detach().to("cpu", copy=True)
        return found

    @contextmanager
    def filled(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """Inside, weights may be overwritten in place by name; at the end every rank keeps its part of them."""
        if self.stage == 3:
            with self._device.host_region():
                wholes = {p: torch.empty(p.ds_shape, dtype=p.dtype) for p in parameters}  # type: ignore[attr-defined]
            with standing_in(wholes):
                yield
            for parameter, whole in wholes.items():
                parameter.ds_tensor.copy_(self._part(parameter, whole))  # type: ignore[attr-defined]
                if parameter.numel():
                    parameter.data.copy_(whole)
        else:
            yield
        self._optimizer.refresh_fp32_params()

    def masters(self, named: Iterable[tuple[str, Parameter]]) -> Iterator[tuple[str, Tensor]]:
        """(name, fp32 weights) of narrower ones, each whole, in turn; none where the weights themselves are fp32."""
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                with losing_a_peer_ends_it():
                    whole = self._deepspeed.utils.safe_get_full_fp32_param(parameter)
                yield name, whole

    def states(self, named: Iterable[tuple[str, Parameter]]) -> Iterator[tuple[str, Tensor]]:
        """(`parameter name::state name`, tensor), named and shaped as in a run of one process, in turn."""
        keys = self.shared_states()
        for name, parameter in named:
            for key, shared in keys.items():
                with losing_a_peer_ends_it():
                    whole = shared if shared is not None else (
                        self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
                    )
                yield f"{name}::{key}", whole

    def set_masters(self, parameter: Parameter, whole: Tensor) -> None:
        """Put back what `masters` gave."""
        tools = self._deepspeed.utils
        if self.stage == 3:
            tools.safe_set_local_fp32_param(parameter, self._part(parameter, whole))
        else:
            tools.safe_set_full_fp32_param(parameter, whole.to(parameter.device, torch.float32))

    def set_state(self, parameter: Parameter, key: str, whole: Tensor) -> None:
        """Put back what `states` gave. A count of steps holds for all parameters."""
        tools = self._deepspeed.utils
        if whole.dim() == 0:
            for state in self._torch_optimizer.state.values():
                state[key].copy_(whole)
        elif self.stage == 3:
            tools.safe_set_local_optimizer_state(parameter, self._part(parameter, whole), key)
        else:
            tools.safe_set_full_optimizer_state(parameter, whole.to(parameter.device, torch.float32), key)

    def shared_states(self) -> dict[str, Tensor | None]:
        """Name of a state = its value where all parameters share it (a count of steps), None where each has its own."""
        flat = self._flats[0]
        state = self._torch_optimizer.state.get(flat, {})
        tensors = {key: value for key, value in sorted(state.items()) if isinstance(value, Tensor)}
        return {key: None if value.shape == flat.shape else value for key, value in tensors.items()}

    def _gathered(self, parameters: list[Parameter]) -> Any:
        return self._deepspeed.zero.GatheredParameters(parameters) if self.stage == 3 else nullcontext()

    def _part(self, parameter: Parameter, whole: Tensor) -> Tensor:
        """This rank's equal part of a tensor in one row, the last one filled up with zeros."""
        count = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        part = torch.zeros(count, dtype=whole.dtype)
        here = whole.flatten()[self._ranks.rank * count : (self._ranks.rank + 1) * count]
        part[: len(here)] = here
        return part.to(parameter.ds_tensor.device)  # type: ignore[attr-defined]


def config_of(stage: int, learning: list[Parameter], max_grad_norm: float) -> dict[str, Any]:
    """What DeepSpeed is told; all else is left at its defaults. Gradients are reduced and summed in fp32."""
    bucket = max(1, min(REDUCE_ELEMENTS, sum(parameter.numel() for parameter in learning)))
    return {
        # Only bookkeeping: the engine says for each micro-batch whether it is the last of its step.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": learning[0].dtype == torch.bfloat16},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "stage3_prefetch_bucket_size": PREFETCH_ELEMENTS,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
        },
    }


@contextmanager
def standing_in(wholes: Mapping[Parameter, Tensor]) -> Iterator[None]:
    """Inside, these tensors are the parameters' data."""
    before = {parameter: parameter.data for parameter in wholes}
    try:
        for parameter, whole in wholes.items():
            parameter.data = whole
        yield
    finally:
        for parameter, data in before.items():
            parameter.data = data


@contextmanager
def losing_a_peer_ends_it() -> Iterator[None]:
    """Turn what a collective of DeepSpeed raises when a peer is gone into LostRankError. A failed allocation passes."""
    try:
        yield
    except RuntimeError as error:
        gone = isinstance(error, dist.DistError) or GONE.search(str(error))
        if not gone or classify(error) is not None:
            raise
        raise LostRankError(
            f"another rank is gone, stopped or stuck: {str(error).splitlines()[0][:300]}",
            fix="the run goes on from its last checkpoint",
        ) from error


def _imported(device: Device) -> Any:
    """The package. It chooses its accelerator when it is imported, by what the machine has unless it is told."""
    require_deepspeed()
    if device.torch_device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    return deepspeed


@contextmanager
def _device_as_local_rank(device: Device) -> Iterator[None]:
    """DeepSpeed takes the card whose number is LOCAL_RANK; the run's own may have another."""
    before, index = os.environ.get("LOCAL_RANK"), device.torch_device.index
    os.environ["LOCAL_RANK"] = str(index) if index is not None else before or "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before
