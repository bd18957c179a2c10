"""The feed-forward half of mixture-of-experts layers, as `integrations/moe.py` of transformers 5.23 runs it by default:
tokens sorted by expert and multiplied in groups, so that memory does not depend on the routing.

Each token is there once per expert it goes to (K copies). The local variables are those of
`grouped_mm_experts_forward`: what they hold lives until it returns.
"""

from __future__ import annotations

from engine.budget.architecture import Architecture, Experts
from engine.budget.ghost import Ghost, Walk
from engine.budget.operations import (
    FLOAT,
    INDEX,
    activation,
    add_number,
    cast,
    gather,
    half_linear,
    halves,
    linear,
    multiply,
    narrow,
    saves_output,
    scale,
    softmax,
)
from engine.budget.packed import TOKEN
from engine.budget.tape import Storage


def mixture(walk: Walk, arch: Architecture, experts: Experts, x: Ghost, gradients: dict[str, int]) -> Ghost:
    """Router, experts, and the weighted sum. `gradients` holds the gradient bytes of the weights that are trained."""
    logits, scores, indices = _router(walk, arch, experts, x, gradients)
    output = _grouped_experts(walk, arch, experts, x, scores, gradients)
    del logits, indices  # held by the caller while the experts run
    return output


def _router(
    walk: Walk, arch: Architecture, experts: Experts, x: Ghost, gradients: dict[str, int]
) -> tuple[Ghost, Ghost, Ghost]:
    """Logits, scores of the chosen experts, and which they are.

    fp32 softmax over all experts for Mixtral and Qwen3, whose scores are then normalised; over the chosen for gpt-oss.
    """
    name = "mlp.router.weight" if arch.layout == "gpt_oss" else "mlp.gate.weight"
    if walk.autocast:
        logits = half_linear(walk, x, experts.count, experts.count * arch.hidden, name in gradients)
    else:
        logits = linear(walk, x, experts.count, gradients.get(name, 0), name in gradients)
    if arch.layout == "gpt_oss":
        chosen, indices = _top(walk, logits, experts)
        return logits, saves_output(walk, chosen), indices
    if arch.layout == "mixtral":
        probabilities = saves_output(walk, cast(walk, logits, FLOAT))
    else:
        probabilities = softmax(walk, logits, FLOAT)
    chosen, indices = _top(walk, probabilities, experts)
    chosen = _normalised(walk, chosen)
    return logits, chosen if arch.layout == "mixtral" else cast(walk, chosen, logits.itemsize), indices


def _top(walk: Walk, scores: Ghost, experts: Experts) -> tuple[Ghost, Ghost]:
    """The largest scores and which they are; backward scatters into all of them."""
    chosen = experts.per_token * TOKEN
    indices = walk.new(chosen, INDEX)
    saved = walk.save(indices) if scores.node is not None else None
    values = walk.single(scores, chosen, scores.itemsize, scores.size, saved)
    return values, indices


def _normalised(walk: Walk, scores: Ghost) -> Ghost:
    """`scores /= scores.sum()`: in place, so that a copy of what was there is saved beside the sums."""
    if scores.node is None:
        return scores
    saved = walk.save(walk.new(scores.elements, scores.itemsize), walk.new(TOKEN, scores.itemsize))
    return walk.view(scores, scores.elements, scores.size, saved)


def _grouped_experts(
    walk: Walk, arch: Architecture, experts: Experts, x: Ghost, scores: Ghost, gradients: dict[str, int]
) -> Ghost:
    """`grouped_mm_experts_forward`."""
    rows, biased = experts.per_token * TOKEN, arch.layout == "gpt_oss"
    width, hidden = rows * experts.intermediate, rows * arch.hidden
    expert_ids, permutation = walk.new(rows, INDEX), walk.new(rows, INDEX)
    selected = gather(walk, x, walk.new(rows, INDEX), hidden)
    sample_weights = gather(walk, scores, permutation, rows)
    histogram_input = walk.allocate(rows * FLOAT)
    biases = _biases(walk, expert_ids, 2 * width, x, gradients.get("mlp.experts.gate_up_proj_bias", 0), biased)
    output = _grouped(walk, selected, 2 * width, gradients.get("mlp.experts.gate_up_proj", 0), biases)
    output = _gpt_oss_gate(walk, output) if arch.layout == "gpt_oss" else _gate(walk, output)
    biases = _biases(walk, expert_ids, hidden, x, gradients.get("mlp.experts.down_proj_bias", 0), biased)
    output = _grouped(walk, output, hidden, gradients.get("mlp.experts.down_proj", 0), biases)
    weighted = multiply(walk, output, sample_weights)
    inverse = walk.new(rows, INDEX)
    counting = walk.allocate(rows * INDEX)
    del counting
    weighted = gather(walk, weighted, inverse, hidden)
    final = _sum_copies(walk, weighted, arch.hidden * TOKEN)
    del histogram_input
    return cast(walk, final, x.itemsize)


def _biases(walk: Walk, expert_ids: Ghost, elements: int, x: Ghost, weight: int, biased: bool) -> Ghost | None:
    """Each row's expert's bias, gathered: as large as what it is added to."""
    if not biased:
        return None

    def back(gradient: Storage) -> list[Storage | None]:
        walk.leaf_gradient(weight)
        return []

    saved = walk.save(expert_ids) if weight else None
    return walk.result(elements, x.itemsize, [], back, saved, trains=bool(weight))


def _grouped(walk: Walk, x: Ghost, elements: int, weight: int, biases: Ghost | None) -> Ghost:
    """`grouped_mm`: like a linear layer over all experts at once; biases are added in place."""
    size, biased = x.size, biases is not None

    def back(gradient: Storage) -> list[Storage | None]:
        grad_x = walk.allocate(size)
        if weight:
            walk.leaf_gradient(weight)
        return [grad_x, gradient] if biased else [grad_x]

    saved = walk.save(x if weight else None, None) if x.node is not None or weight else None
    return walk.result(elements, x.itemsize, [x, biases] if biases else [x], back, saved, trains=bool(weight))


def _gate(walk: Walk, gate_up: Ghost) -> Ghost:
    """act(gate) * up on two halves of one tensor."""
    gate, up = halves(walk, gate_up)
    return multiply(walk, activation(walk, gate), up)


def _gpt_oss_gate(walk: Walk, gate_up: Ghost) -> Ghost:
    """(up + 1) · gate · sigmoid(α · gate), both clamped first; every second column each."""
    gate, up = (narrow(walk, gate_up, gate_up.elements // 2) for _ in range(2))
    gate = _clamp(walk, gate, bounds=1)
    up = _clamp(walk, up, bounds=2)
    glu = multiply(walk, gate, saves_output(walk, scale(walk, gate)))
    return multiply(walk, add_number(walk, up), glu)


def _clamp(walk: Walk, x: Ghost, bounds: int) -> Ghost:
    """`clamp`: saves its input; backward compares it with each bound (bool) and zeroes what was cut."""
    size, elements = x.size, x.elements

    def back(gradient: Storage) -> list[Storage | None]:
        within = [walk.allocate(elements) for _ in range(bounds)]
        result = walk.allocate(size)
        del within
        return [result]

    saved = walk.save(x) if x.node is not None else None
    return walk.result(x.elements, x.itemsize, [x], back, saved)


def _sum_copies(walk: Walk, x: Ghost, elements: int) -> Ghost:
    """Sum over a token's experts; backward expands, and lays out what it expanded."""
    return walk.single(x, elements, x.itemsize, x.size)
