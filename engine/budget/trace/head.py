"""Traces the model from the last layer's output to the loss, as `engine.model.loss` computes it: last norm, choice of
target rows, head, and the losses. Only target tokens go through the head."""

from __future__ import annotations

from engine.architecture.facts import Architecture
from engine.architecture.parameters import outer_parameters
from engine.budget.calibration import round_to_blocks
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, Storage, TracedTensor
from engine.budget.trace.operations import (
    FLOAT,
    INDEX,
    cast,
    gather,
    half_linear,
    layer_norm,
    linear,
    rms_norm,
    saves_output,
    scale,
)
from engine.budget.trace.polynomial import BYTE, CHUNK, NO_BYTES, SEVERAL, TARGET, TOKEN
from engine.budget.trace.trainable import tables_with_rows, trainable_outer


class Head:
    def __init__(self, trace: MemoryTrace, arch: Architecture, config: MemoryConfig) -> None:
        self.trace = trace
        self.arch = arch
        self.config = config
        self.trained = trainable_outer(arch, config.patterns)
        outer = outer_parameters(arch)
        self.norm_name = next(p.name for p in outer if p.name.endswith(("norm.weight", "ln_f.weight")))
        self.table_name = "lm_head.weight" if not arch.tied else outer[0].name
        # Rows of the head are trained, of added tokens.
        self.rows = bool(tables_with_rows(arch, config))
        self.row_bytes = round_to_blocks(config.token_rows * arch.hidden * FLOAT) if self.rows else 0
        self.weight = round_to_blocks(arch.vocab * arch.hidden * config.base_bytes)

    def forward(self, handed: list[TracedTensor]) -> TracedTensor:
        """Trace from the last layer's output, the one element of `handed`, to the loss of the micro-batch.

        The element is taken out of the list: its memory is free once the norm has run, however Python holds arguments.
        """
        hidden = self.norm(handed.pop())
        hidden = self.gather_targets(hidden)
        if self.config.loss == "plain":
            return self.plain(hidden)
        if self.config.loss == "fused":
            return self.fused(hidden)
        return self.recomputed(hidden) if self.wrapped else self.chunked(hidden)

    def gather_targets(self, hidden: TracedTensor) -> TracedTensor:
        """`hidden.index_select(0, positions)`: a copy of the target rows, whose indices are saved for backward. The
        engine makes no copy if every position is a target; the trace always counts one."""
        index = self.trace.new(TARGET, INDEX) if hidden.node is not None else None
        return gather(self.trace, hidden, index, self.arch.hidden * TARGET)

    @property
    def wrapped(self) -> bool:
        """Whether peft wraps the head in a module of its own, as it does when LoRA also trains the head."""
        return self.config.lora and self.table_name in self.trained

    def norm(self, hidden: TracedTensor) -> TracedTensor:
        weight = round_to_blocks(self.arch.hidden * self.config.base_bytes)
        trained = self.norm_name in self.trained
        if self.arch.layout == "gpt2":
            return layer_norm(self.trace, hidden, weight, trained)
        return rms_norm(self.trace, hidden, TOKEN, weight, trained, self.config.base_bytes, wide=self.arch.wide_norm)

    def plain(self, hidden: TracedTensor) -> TracedTensor:
        """Cross entropy of the fp32 logits of all targets at once."""
        trace = self.trace
        trained = self.table_name in self.trained
        if self.trace.autocast:
            logits = half_linear(
                trace, hidden, self.arch.vocab, self.arch.vocab * self.arch.hidden, trained, row=TARGET
            )
        elif self.rows:
            logits = self.with_rows(hidden)
        else:
            logits = linear(trace, hidden, self.arch.vocab, self.weight, trained, row=TARGET)
        logits = cast(trace, logits, FLOAT)
        if self.arch.logit_softcap is not None:
            logits = scale(trace, logits)
            logits = saves_output(trace, logits)
            logits = scale(trace, logits)
        return negative_log_likelihood(trace, saves_output(trace, logits))

    def with_rows(self, hidden: TracedTensor) -> TracedTensor:
        """The frozen head's product with some of its logits replaced: saves its input, as a trained head does."""
        trace, size, rows = self.trace, hidden.size, self.row_bytes

        def back(gradient: Storage) -> list[Storage | None]:
            made = trace.allocate(size) if hidden.node is not None else None
            trace.leaf_gradient(rows)
            return [made]

        return trace.result(self.arch.vocab * TARGET, hidden.itemsize, [hidden], back, trace.save(hidden), trains=True)

    def chunked(self, hidden: TracedTensor) -> TracedTensor:
        """`engine.model.chunked`: forward computes logits and the gradients of hidden states and head, chunk by chunk;
        these gradients are kept until backward. Liger's kernel writes the gradient over the logits, where torch's
        operations compute it in an fp32 copy of them."""
        trace, vocab, size = self.trace, self.arch.vocab, hidden.size
        trained = self.table_name in self.trained
        saved = [trace.allocate(size)] if trace.learning else []
        if trained and trace.learning:
            saved.append(trace.allocate(self.weight * BYTE))
        if self.rows and trace.learning:
            saved.append(trace.allocate(self.row_bytes * BYTE))
        narrow = self.config.base_bytes
        capped = 2 if self.arch.logit_softcap is not None else 0  # the capped logits, and the derivative of the cap
        logits = narrow if narrow < FLOAT or capped else 0  # 0: fp32 logits are overwritten in place
        if capped and not trace.learning:
            capped = int(narrow < FLOAT)
        each = narrow if self.config.loss == "liger" else logits + FLOAT * (1 + capped)
        logits_and_work = trace.allocate(vocab * each * CHUNK)
        del logits_and_work

        def back(gradient: Storage) -> list[Storage | None]:
            if trained or self.rows:
                trace.adopt_gradient(saved.pop())
            return [saved.pop()]

        return trace.result(NO_BYTES, FLOAT, [hidden], back, trains=trained or self.rows)

    def fused(self, hidden: TracedTensor) -> TracedTensor:
        """torch's `linear_cross_entropy`: logits in the hidden states' dtype, chunk by chunk, in forward and again in
        backward.

        Each chunk of backward also gathers the head's rows of its targets. A trained head has two tensors of its
        gradient's size: the sum over chunks, and the current chunk's.
        """
        trace, size, weight = self.trace, hidden.size, self.weight
        narrow, trained = self.config.base_bytes, self.table_name in self.trained
        logits, rows = self.arch.vocab * narrow * CHUNK, self.arch.hidden * narrow * CHUNK

        def back(gradient: Storage) -> list[Storage | None]:
            scores, made = trace.allocate(logits), trace.allocate(size)
            whole = [trace.allocate(weight * BYTE), trace.allocate(weight * BYTE)] if trained else []
            chosen = trace.allocate(rows)
            del scores, chosen
            if trained:
                trace.adopt_gradient(whole[0])
            return [made]

        scores = trace.allocate(logits)
        del scores
        saved = trace.save(hidden)
        return trace.result(NO_BYTES, FLOAT, [hidden], back, saved, trains=trained)

    def recomputed(self, hidden: TracedTensor) -> TracedTensor:
        """The chunked loss of a head wrapped by peft: each chunk is checkpointed, and recomputed from the last to the
        first. Several chunks add gradients of the head out of place, and concatenate those of the hidden states."""
        trace, vocab, size, weight = self.trace, self.arch.vocab, hidden.size, self.weight
        narrow = self.config.base_bytes
        capped = 2 if self.arch.logit_softcap is not None else 0

        def back(gradient: Storage) -> list[Storage | None]:
            earlier = trace.allocate(weight * SEVERAL)
            scores = trace.allocate(vocab * FLOAT * (3 + capped // 2) * CHUNK)
            del scores
            logits_gradient = trace.allocate(vocab * narrow * CHUNK)
            pieces = trace.allocate(size)
            made = trace.allocate(weight * BYTE)
            del logits_gradient
            total = trace.allocate(weight * SEVERAL)
            del earlier, total
            trace.adopt_gradient(made)
            joined = trace.allocate(size)
            del pieces
            return [joined]

        logits_and_work = trace.allocate(vocab * FLOAT * (2 + capped) * CHUNK)
        del logits_and_work
        saved = trace.save(hidden)
        return trace.result(NO_BYTES, FLOAT, [hidden], back, saved, trains=True)


def negative_log_likelihood(trace: MemoryTrace, scores: TracedTensor) -> TracedTensor:
    """`F.nll_loss`: the output is one number; backward allocates a tensor as large as `scores`."""
    saved = trace.save(scores) if scores.node is not None else None
    return trace.unary(scores, NO_BYTES, FLOAT, saved)
