"""RMSNorm in a walk: eight operations of torch, gone through at once.

A layer has two to six of them, and nothing from outside comes between their operations. So the maxima of what they hold
are written down here, instead of being found again for every norm: those of `Qwen2RMSNorm.forward` and of its backward
pass, operation by operation, less those that another one exceeds.

Try: `python -m pytest tests/budget/test_accuracy.py`
"""

from __future__ import annotations

from engine.budget.ghost import Ghost, Walk
from engine.budget.operations import FLOAT
from engine.budget.tape import Node, Operation, Saved


def rms_norm(walk: Walk, x: Ghost, rows: int, weight: int, trained: bool, width: int, *, wide: bool) -> Ghost:
    """fp32 copy, square, mean, its root's reciprocal, product, product with the weight, and back to the dtype of `x`.

    Each of `rows` has a root of its own. `weight`: bytes of the weight's gradient; `width`: its itemsize. With `wide`
    (Gemma, gpt-oss) the weight is multiplied before the cast back, else after it.
    """
    before, narrow, full, root = x.node, x.size, x.elements * FLOAT, rows * FLOAT
    copied = x.itemsize < FLOAT  # of an input in fp32 no copy is made, and the input itself is saved
    itemsize = x.itemsize if wide or x.itemsize > width else width
    product = full if wide else x.elements * itemsize
    factor = narrow if copied and not wide else full  # what the weight is multiplied with, saved for its gradient
    kept_full = kept_root = kept_factor = 0
    saved: Saved = []
    trained = trained and walk.learning
    if before is not None:
        kept_full, kept_root = walk.stays(full), walk.stays(root)
        if not copied:
            saved = walk.save(x)
    walk.reach(full + full + root if copied else full + root)  # (a copy,) its square and their mean; or the product
    if before is not None:
        walk.mark()
        walk.keep(kept_root + kept_full if copied else kept_root)
    made = full + narrow if copied and not wide else full  # and cast
    if trained:
        kept_factor = walk.stays(factor)
        walk.mark(made)
    walk.reach(made + product + narrow if copied and wide else made + product)
    walk.keep(kept_factor)
    output = walk.new(x.elements, itemsize)
    if before is None and not trained:
        return output
    return walk.taped(
        output,
        _Norm(
            before, output.size, saved, copied=copied, wide=wide, narrow=narrow, full=full, root=root, factor=factor,
            product=product, weight=weight if trained else None, kept_full=kept_full, kept_root=kept_root,
            kept_factor=kept_factor,
        ),
    )  # fmt: skip


class _Norm(Operation):
    """One of them: how many bytes each tensor has, and how many of those that are saved stay on the device."""

    __slots__ = (
        "before", "copied", "factor", "full", "kept_factor", "kept_full", "kept_root", "narrow", "product", "root",
        "weight", "wide",
    )  # fmt: skip

    def __init__(
        self, before: Node | None, size: int, saved: Saved, *, copied: bool, wide: bool, narrow: int, full: int,
        root: int, factor: int, product: int, weight: int | None, kept_full: int, kept_root: int, kept_factor: int,
    ) -> None:  # fmt: skip
        self.before, self.size, self.saved, self.gradient, self.joins = before, size, saved, None, False
        self.copied, self.wide, self.narrow, self.full, self.root = copied, wide, narrow, full, root
        self.factor, self.product, self.weight = factor, product, weight
        self.kept_full, self.kept_root, self.kept_factor = kept_full, kept_root, kept_factor

    def go_back(self, walk: Walk) -> None:
        """From the gradient of the output to those of the weight and of the input."""
        self._through_weight(walk)
        full, before = self.full, self.before
        if before is None:
            return
        lent_full, kept_root = full - self.kept_full, self.kept_root
        if self.copied:
            # Backward of the square: gradients of the copy and of the square, and what twice the copy is made with.
            walk.reach(5 * full + lent_full - kept_root)
            walk.live -= kept_root + self.kept_full
            walk.hand_on(before, walk.allocate(self.narrow))
            return
        walk.reach(3 * full + self.root + lent_full + self.root - kept_root)
        walk.live += self.root
        walk.hand_on(before, walk.allocate(full))
        walk.live -= self.root + kept_root
        walk.reach(4 * full + lent_full)
        self.saved = None
        walk.hand_on(before, walk.allocate(full))

    def _through_weight(self, walk: Walk) -> None:
        """Both gradients are made in the wider dtype; then the weight's is summed."""
        incoming, product, factor, learns = self.take(), self.product, self.factor, self.before is not None
        if self.copied and self.wide:
            incoming = walk.exchange(incoming, product)
        walk.bring_back()
        if self.weight is None:
            walk.reach(product + factor if factor != product else product)
            return
        around = factor - self.kept_factor + product
        if learns:
            walk.reach(around + product + (factor if factor != product else 0))
        beside = around + (factor if learns else 0)
        walk.live += beside
        walk.leaf_gradient(self.weight)
        walk.live -= beside
        del incoming
        walk.live -= self.kept_factor
