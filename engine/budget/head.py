"""From the last layer's output to the loss: the last norm, the gathered targets, the head, and the three losses.

A `Walk` goes through the same steps as `engine.model.loss`, with every token a target, which is the most there can be.
"""

from __future__ import annotations

from engine.budget.architecture import Architecture
from engine.budget.ghost import Ghost, Walk
from engine.budget.norm import rms_norm
from engine.budget.operations import FLOAT, cast, half_linear, layer_norm, linear, saves_output, scale
from engine.budget.packed import CHUNK, SEVERAL, TOKEN
from engine.budget.parameters import outer_parameters
from engine.budget.selection import selected_outer
from engine.budget.setting import Setting
from engine.budget.static import rounded
from engine.budget.tape import Storage


class Head:
    """The end of the model. `trained` weights are those outside the layers that the recipe trains."""

    def __init__(self, walk: Walk, arch: Architecture, setting: Setting) -> None:
        self.walk = walk
        self.arch = arch
        self.setting = setting
        self.trained = selected_outer(arch, setting.patterns)
        outer = outer_parameters(arch)
        self.norm_name = next(p.name for p in outer if p.name.endswith(("norm.weight", "ln_f.weight")))
        self.table_name = "lm_head.weight" if not arch.tied else outer[0].name
        self.weight = rounded(arch.vocab * arch.hidden * setting.base_bytes)

    def forward(self, hidden: Ghost) -> Ghost:
        """The loss of a micro-batch."""
        hidden = self.norm(hidden)
        hidden = gather(self.walk, hidden)
        if self.setting.loss == "plain":
            return self.plain(hidden)
        if self.setting.loss == "fused":
            return self.fused(hidden)
        return self.recomputed(hidden) if self.wrapped else self.chunked(hidden)

    @property
    def wrapped(self) -> bool:
        """Beside adapters a trained head is a copy inside peft's wrapper, no plain linear layer any more."""
        return self.setting.lora and self.table_name in self.trained

    def norm(self, hidden: Ghost) -> Ghost:
        """The last norm."""
        weight = rounded(self.arch.hidden * self.setting.base_bytes)
        trained = self.norm_name in self.trained
        if self.arch.layout == "gpt2":
            return layer_norm(self.walk, hidden, weight, trained)
        return rms_norm(self.walk, hidden, TOKEN, weight, trained, self.setting.base_bytes, wide=self.arch.wide_norm)

    def plain(self, hidden: Ghost) -> Ghost:
        """Logits of all targets at once, in fp32, and cross entropy."""
        walk = self.walk
        trained = self.table_name in self.trained
        if self.walk.autocast:
            logits = half_linear(walk, hidden, self.arch.vocab, self.arch.vocab * self.arch.hidden, trained)
        else:
            logits = linear(walk, hidden, self.arch.vocab, self.weight, trained)
        logits = cast(walk, logits, FLOAT)
        if self.arch.logit_softcap is not None:
            logits = scale(walk, logits)
            logits = saves_output(walk, logits)
            logits = scale(walk, logits)
        return negative_log_likelihood(walk, saves_output(walk, logits))

    def chunked(self, hidden: Ghost) -> Ghost:
        """`engine.model.chunked`: gradients are made in the forward pass, a chunk of logits at a time."""
        walk, vocab, size = self.walk, self.arch.vocab, hidden.size
        trained = self.table_name in self.trained
        saved = [walk.allocate(size)] if walk.learning else []
        if trained and walk.learning:
            saved.append(walk.allocate(self.weight))
        narrow = self.setting.base_bytes
        capped = 2 if self.arch.logit_softcap is not None else 0  # the capped logits, and their slope for backward
        logits = narrow if narrow < FLOAT or capped else 0  # fp32 logits are worked on in place
        if capped and not walk.learning:
            capped = int(narrow < FLOAT)
        logits_and_work = walk.allocate(vocab * (logits + FLOAT * (1 + capped)) * CHUNK)
        del logits_and_work

        def back(gradient: Storage) -> list[Storage | None]:
            if trained:
                walk.adopt_gradient(saved.pop())
            return [saved.pop()]

        return walk.result(0, FLOAT, [hidden], back, trains=trained)

    def fused(self, hidden: Ghost) -> Ghost:
        """torch's `linear_cross_entropy`: a chunk of logits forward and again backward, in the hidden states' dtype.

        With each chunk of backward the head's rows of the targets; a learning head's gradient twice, of all and of the
        chunk.
        """
        walk, size, weight = self.walk, hidden.size, self.weight
        narrow, trained = self.setting.base_bytes, self.table_name in self.trained
        logits, rows = self.arch.vocab * narrow * CHUNK, self.arch.hidden * narrow * CHUNK

        def back(gradient: Storage) -> list[Storage | None]:
            scores, made = walk.allocate(logits), walk.allocate(size)
            whole = [walk.allocate(weight), walk.allocate(weight)] if trained else []
            chosen = walk.allocate(rows)
            del scores, chosen
            if trained:
                walk.adopt_gradient(whole[0])
            return [made]

        scores = walk.allocate(logits)
        del scores
        saved = walk.save(hidden)
        return walk.result(0, FLOAT, [hidden], back, saved, trains=trained)

    def recomputed(self, hidden: Ghost) -> Ghost:
        """A head that is no plain linear layer: chunks under checkpointing, computed again in backward, last first.

        With several chunks the weight's gradients are added up out of place, and the hidden states' are joined.
        """
        walk, vocab, size, weight = self.walk, self.arch.vocab, hidden.size, self.weight
        narrow = self.setting.base_bytes
        capped = 2 if self.arch.logit_softcap is not None else 0

        def back(gradient: Storage) -> list[Storage | None]:
            earlier = walk.allocate(weight * SEVERAL)
            scores = walk.allocate(vocab * FLOAT * (3 + capped // 2) * CHUNK)
            del scores
            logits_gradient = walk.allocate(vocab * narrow * CHUNK)
            pieces = walk.allocate(size)
            made = walk.allocate(weight)
            del logits_gradient
            total = walk.allocate(weight * SEVERAL)
            del earlier, total
            walk.adopt_gradient(made)
            joined = walk.allocate(size)
            del pieces
            return [joined]

        logits_and_work = walk.allocate(vocab * FLOAT * (2 + capped) * CHUNK)
        del logits_and_work
        saved = walk.save(hidden)
        return walk.result(0, FLOAT, [hidden], back, saved, trains=True)


def gather(walk: Walk, hidden: Ghost) -> Ghost:
    """`hidden.index_select(0, positions)`: a copy of the target rows, whose numbers (int64) are saved.

    Backward adds into zeros of the full size. Where every position has a target nothing is copied.
    """
    saved = walk.save(walk.new(TOKEN, 8)) if hidden.node is not None else None
    return walk.single(hidden, hidden.elements, hidden.itemsize, hidden.size, saved)


def negative_log_likelihood(walk: Walk, scores: Ghost) -> Ghost:
    """One number; backward makes a tensor as large as the scores."""
    saved = walk.save(scores) if scores.node is not None else None
    return walk.single(scores, 0, FLOAT, scores.size, saved)
