"""The strategy "replicated": every rank has the whole model and its optimizer, and gradients are summed over ranks.

Micro-batches contain no collectives, so ranks may run different numbers of micro-batches.

Try: `tunedeck train -p demo-2 -r demo --set parallel.strategy=replicated`
"""

from __future__ import annotations

from collections.abc import Callable

from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.catch_oom import retry_on_oom
from engine.device.oom import OutOfMemory
from engine.distributed.gradient_all_reduce import GradientAllReduce, broadcast_tensors
from engine.distributed.ranks import Ranks
from engine.evaluate.context import EvaluationContext
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.train.strategy.base import Strategy
from engine.train.strategy.shared_evaluation import share_evaluation


class Replicated(Strategy):
    """The strategy in which every rank has the whole model."""

    def __init__(
        self,
        loaded: LoadedModel,
        loss: LossFunction,
        ranks: Ranks,
        device: Device,
        report_retry: Callable[[OutOfMemory, str, int], None],
    ) -> None:
        """Copy rank 0's trainable weights and buffers to every rank, and allocate the buffer in which gradients are
        summed.

        Raises:
            MemoryExhaustedError: there is no room for the buffer.
            LostRankError: another rank is gone.
        """
        super().__init__(loaded, loss, ranks)
        broadcast_tensors([*(parameter.data for parameter in self.parameters), *loaded.model.buffers()])
        self._all_reduce = retry_on_oom(lambda: GradientAllReduce(self.parameters), "load", device, report_retry)

    def prepare_gradients(self, losses: list[float]) -> list[float]:
        """Allocate a zero gradient for each parameter that has a gradient only on other ranks; returns the sum over
        all ranks of each of `losses`."""
        missing = self._all_reduce.agree()
        totals = self.ranks.sums(losses)
        self._all_reduce.fill(missing)
        return totals

    def sync_gradients(self) -> None:
        """Sum gradients over ranks, with one all-reduce for each bucket. Raises LostRankError."""
        self._all_reduce.sum()

    def join_evaluation(self, context: EvaluationContext, data: TokenData) -> EvaluationContext:
        """Register all ranks to take their share of the samples of each pass that rank 0 requests in later evaluations
        of `data`; returns a context that makes these requests."""
        return share_evaluation(context, data, self.ranks)
