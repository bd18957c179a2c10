"""From the last layer's output to the loss: the last norm, the gathered targets, the head, and the three losses.

A `Walk` goes through the same steps as `engine.model.loss`, with every token a target, which is the most there can be.
"""

from __future__ import annotations

from engine.budget.architecture import Architecture
from engine.budget.ghost import TOKEN, Ghost, Storage, Walk
from engine.budget.layer import rms_norm
from engine.budget.operations import FLOAT, cast, linear
from engine.budget.parameters import outer_parameters
from engine.budget.setting import Setting
from engine.budget.static import rounded, selected_outer


class Head:
    """The end of the model. `trained` weights are those outside the layers that the recipe trains."""

    def __init__(self, walk: Walk, arch: Architecture, setting: Setting) -> None:
        self.walk = walk
        self.arch = arch
        self.setting = setting
        self.trained = selected_outer(arch, setting)
        outer = outer_parameters(arch)
        self.norm_name = next(p.name for p in outer if p.name.endswith(("norm.weight", "ln_f.weight")))
        self.table_name = "lm_head.weight" if not arch.tied else outer[0].name

    def forward(self, hidden: Ghost) -> Ghost:
        """The loss of a micro-batch."""
        hidden = self.norm(hidden)
        hidden = gather(self.walk, hidden)
        return self.plain(hidden)

    def norm(self, hidden: Ghost) -> Ghost:
        """The last norm."""
        weight = rounded(self.arch.hidden * self.setting.base_bytes)
        trained = self.norm_name in self.trained
        return rms_norm(self.walk, hidden, TOKEN, weight, trained, unit_offset=self.arch.unit_offset_norm)

    def plain(self, hidden: Ghost) -> Ghost:
        """Logits of all targets at once, in fp32, and cross entropy."""
        walk, arch = self.walk, self.arch
        weight = rounded(arch.vocab * arch.hidden * self.setting.base_bytes)
        logits = linear(walk, hidden, arch.vocab, weight, self.table_name in self.trained)
        logits = cast(walk, logits, FLOAT)
        return negative_log_likelihood(walk, log_softmax(walk, logits))


def gather(walk: Walk, hidden: Ghost) -> Ghost:
    """`hidden[positions]`: a copy of the target rows; backward scatters into zeros of the full size."""
    size = hidden.size
    return walk.result(hidden.elements, hidden.itemsize, [hidden], lambda gradient: [walk.allocate(size)])


def log_softmax(walk: Walk, logits: Ghost) -> Ghost:
    """Saves its output; backward makes the gradient of the logits."""
    size = logits.size
    saved = walk.save() if logits.node is not None else None
    output = walk.result(logits.elements, logits.itemsize, [logits], lambda gradient: [walk.allocate(size)], saved)
    if saved is not None:
        walk.save_into(saved, output)
    return output


def negative_log_likelihood(walk: Walk, scores: Ghost) -> Ghost:
    """One number; backward makes a tensor as large as the scores."""
    size = scores.size

    def back(gradient: Storage) -> list[Storage | None]:
        return [walk.allocate(size)]

    saved = walk.save(scores) if scores.node is not None else None
    return walk.result(0, FLOAT, [scores], back, saved)
