"""The feed-forward half of mixture-of-experts layers, as `integrations/moe.py` of transformers 5.23 runs it by default:
tokens sorted by expert and multiplied in groups, so that memory does not depend on the routing.

Each token is there once per expert it goes to (K copies).
"""

from __future__ import annotations

from engine.budget.architecture import Architecture, Experts
from engine.budget.ghost import TOKEN, Ghost, Storage, Walk
from engine.budget.operations import FLOAT, activation, cast, linear, multiply, narrow, saves_output

INDEX_BYTES = 8


def mixture(walk: Walk, arch: Architecture, experts: Experts, x: Ghost, gradients: dict[str, int]) -> Ghost:
    """Router, experts, and the weighted sum. `gradients` holds the gradient bytes of the weights that are trained."""
    scores = _router(walk, arch, experts, x, gradients)
    copies = experts.per_token
    selected = _gather(walk, x, copies * arch.hidden * TOKEN, copies)
    width = copies * experts.intermediate * TOKEN
    gate_up = _grouped(walk, selected, 2 * width, gradients.get("mlp.experts.gate_up_proj", 0))
    product = _gpt_oss_gate(walk, gate_up) if arch.layout == "gpt_oss" else _gate(walk, gate_up)
    output = _grouped(walk, product, copies * arch.hidden * TOKEN, gradients.get("mlp.experts.down_proj", 0))
    weighted = multiply(walk, output, scores)
    weighted = _gather(walk, weighted, weighted.elements, copies)
    return cast(walk, _sum_copies(walk, weighted, arch.hidden * TOKEN), x.itemsize)


def _router(walk: Walk, arch: Architecture, experts: Experts, x: Ghost, gradients: dict[str, int]) -> Ghost:
    """Scores of the chosen experts: fp32 softmax over all for Mixtral and Qwen3, over the chosen ones for gpt-oss."""
    name = "mlp.router.weight" if arch.layout == "gpt_oss" else "mlp.gate.weight"
    logits = linear(walk, x, experts.count, gradients.get(name, 0), name in gradients)
    if arch.layout == "gpt_oss":
        chosen = _top(walk, logits, experts)
        return saves_output(walk, chosen, chosen.itemsize)
    return _top(walk, saves_output(walk, cast(walk, logits, FLOAT), FLOAT), experts)


def _top(walk: Walk, scores: Ghost, experts: Experts) -> Ghost:
    """The largest scores and which they are; backward scatters into all of them."""
    size = scores.size
    indices = walk.new(experts.per_token * TOKEN, INDEX_BYTES)
    saved = walk.save(indices) if scores.node is not None else None
    return walk.result(
        experts.per_token * TOKEN, scores.itemsize, [scores], lambda gradient: [walk.allocate(size)], saved
    )


def _gather(walk: Walk, x: Ghost, elements: int, copies: int) -> Ghost:
    """Rows by index; the index is saved, backward adds into zeros."""
    size = x.size
    index = walk.new(copies * TOKEN, INDEX_BYTES)
    saved = walk.save(index) if x.node is not None else None
    return walk.result(elements, x.itemsize, [x], lambda gradient: [walk.allocate(size)], saved)


def _grouped(walk: Walk, x: Ghost, elements: int, weight: int) -> Ghost:
    """`grouped_mm`: like a linear layer over all experts at once."""
    size = x.size

    def back(gradient: Storage) -> list[Storage | None]:
        grad_x = walk.allocate(size)
        if weight:
            walk.leaf_gradient(weight)
        return [grad_x]

    saved = walk.save(x if weight else None, None) if x.node is not None or weight else None
    return walk.result(elements, x.itemsize, [x], back, saved, trains=bool(weight))


def _gate(walk: Walk, gate_up: Ghost) -> Ghost:
    """act(gate) * up on two halves of one tensor."""
    gate, up = narrow(walk, gate_up, 1, 2), narrow(walk, gate_up, 1, 2)
    return multiply(walk, activation(walk, gate), up)


def _gpt_oss_gate(walk: Walk, gate_up: Ghost) -> Ghost:
    """(up + 1) · gate · sigmoid(α · gate), both clamped first."""
    gate, up = narrow(walk, gate_up, 1, 2), narrow(walk, gate_up, 1, 2)
    gate, up = activation(walk, gate), activation(walk, up)
    sigmoid = saves_output(walk, _scaled(walk, gate), gate.itemsize)
    glu = multiply(walk, gate, sigmoid)
    return multiply(walk, _shifted(walk, up), glu)


def _scaled(walk: Walk, x: Ghost) -> Ghost:
    """A product with a number."""
    size = x.size
    return walk.result(x.elements, x.itemsize, [x], lambda gradient: [walk.allocate(size)])


def _shifted(walk: Walk, x: Ghost) -> Ghost:
    """A sum with a number."""
    return walk.result(x.elements, x.itemsize, [x], lambda gradient: [gradient])


def _sum_copies(walk: Walk, x: Ghost, elements: int) -> Ghost:
    """Sum over a token's experts; backward expands by view."""
    return walk.result(elements, x.itemsize, [x], lambda gradient: [gradient])
