"""RMSNorm in a walk: eight operations of torch, gone through at once.

A layer has two to six of them, and nothing from outside comes between their operations. So the maxima of what they hold
are written down here, instead of being found again for every norm: those of `Qwen2RMSNorm.forward` and of its backward
pass, operation by operation, less those that another one exceeds.

Try: `python -m pytest tests/budget/test_accuracy.py`
"""

from __future__ import annotations

from engine.budget.ghost import Ghost, Node, Storage, Walk
from engine.budget.operations import FLOAT


def rms_norm(walk: Walk, x: Ghost, rows: int, weight: int, trained: bool, width: int, *, wide: bool) -> Ghost:
    """fp32 copy, square, mean, its root's reciprocal, product, product with the weight, and back to the dtype of `x`.

    Each of `rows` has a root of its own. `weight`: bytes of the weight's gradient; `width`: its itemsize. With `wide`
    (Gemma, gpt-oss) the weight is multiplied before the cast back, else after it.
    """
    return _Norm(walk, x, rows, weight, trained, width, wide).forward(x)


class _Norm:
    """One of them: how many bytes each tensor has."""

    def __init__(
        self, walk: Walk, x: Ghost, rows: int, weight: int, trained: bool, width: int, wide: bool
    ) -> None:
        self.walk, self.before, self.weight, self.trained, self.wide = walk, x.node, weight, trained, wide
        self.narrow, self.full, self.root = x.size, x.elements * FLOAT, rows * FLOAT
        self.copy = self.full if x.itemsize < FLOAT else 0
        """Of an input in fp32 none is made, and the input itself is saved."""
        self.itemsize = x.itemsize if wide else max(x.itemsize, width)
        self.factor = self.full if wide or not self.copy else self.narrow
        """What the weight is multiplied with, and saved for its gradient."""
        self.product = self.full if wide else x.elements * self.itemsize
        learns = self.before is not None
        self.kept_full, self.lent_full = walk.keeps(self.full) if learns else (0, 0)
        self.kept_root, self.lent_root = walk.keeps(self.root) if learns else (0, 0)
        self.kept_factor, self.lent_factor = walk.keeps(self.factor) if trained else (0, 0)

    def forward(self, x: Ghost) -> Ghost:
        """The output, and one node for all of it."""
        walk, copy, full = self.walk, self.copy, self.full
        saved = walk.save(x) if self.before is not None and not copy else []
        walk.reach(copy + full + self.root)  # the copy and its square, with the mean; or its product with the root
        if self.before is not None:
            walk.mark()
        walk.keep(self.kept_root + (self.kept_full if copy else 0))
        cast = self.narrow if copy and not self.wide else 0
        if self.trained:
            walk.mark(full + cast)
        walk.reach(full + cast + self.product + (self.narrow if copy and self.wide else 0))
        walk.keep(self.kept_factor)
        return walk.chain(walk.new(x.elements, self.itemsize), self.before, self.backward, saved, trains=self.trained)

    def backward(self, node: Node) -> None:
        """From the gradient of the output to those of the weight and of the input."""
        walk, full = self.walk, self.full
        self._through_weight(node.take())
        if self.before is None:
            return
        if self.copy:
            # Backward of the square: gradients of the copy and of the square, and what twice the copy is made with.
            walk.reach(5 * full + self.lent_full - self.kept_root)
            walk.live -= self.kept_root + self.kept_full
            made = walk.allocate(self.narrow)
        else:
            walk.reach(3 * full + self.root + self.lent_full + self.lent_root)
            walk.live += self.root
            walk.hand_on(self.before, walk.allocate(full))
            walk.live -= self.root + self.kept_root
            walk.reach(4 * full + self.lent_full)
            node.saved = None
            made = walk.allocate(full)
        walk.hand_on(self.before, made)

    def _through_weight(self, incoming: Storage) -> None:
        """Both gradients are made in the wider dtype; then the weight's is summed."""
        walk, product, learns = self.walk, self.product, self.before is not None
        if self.copy and self.wide:
            incoming = walk.exchange(incoming, product)
        walk.bring_back()
        around = self.lent_factor + (product if self.trained else 0)
        if learns:
            walk.reach(around + product + (self.factor if self.factor != product else 0))
        if self.trained:
            beside = around + (self.factor if learns else 0)
            walk.live += beside
            walk.leaf_gradient(self.weight)
            walk.live -= beside
        del incoming
        walk.live -= self.kept_factor
