"""Traces the feed-forward block of mixture-of-experts layers, as `integrations/moe.py` of transformers 5.23 runs it,
with the local variables of `grouped_mm_experts_forward`. Each token is copied once per expert, and copies are
multiplied in groups, so memory does not depend on the routing."""

from __future__ import annotations

from typing import NamedTuple

from engine.architecture.facts import Architecture, Experts
from engine.architecture.parameters import Parameter
from engine.budget.calibration import round_to_blocks
from engine.budget.trace.memory_trace import MemoryTrace, Storage, TracedTensor
from engine.budget.trace.operations import (
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
from engine.budget.trace.polynomial import BYTE, NO_BYTES, TOKEN, BytesPolynomial

RANK_STEP = 8
"""Kernels of grouped products want rows of 16 bytes: ranks of adapters on experts are filled up with zeros to a
multiple of this (`engine.model.adapted_experts`)."""


class ExpertAdapter(NamedTuple):
    """The adapters of all experts on one weight: A [experts · rank, inputs] and B [outputs, experts · rank]."""

    experts: int
    rank: int
    inputs: int
    outputs: int
    itemsize: int
    """Bytes per value of A and B."""

    @classmethod
    def of(cls, parameter: Parameter, rank: int, itemsize: int) -> ExpertAdapter:
        (_, inputs), (outputs, _) = parameter.adapter_shapes(rank)
        return cls(parameter.shape[0], rank, inputs, outputs, itemsize)

    @property
    def filled(self) -> int:
        return -(-self.rank // RANK_STEP) * RANK_STEP


def mixture(
    trace: MemoryTrace,
    arch: Architecture,
    experts: Experts,
    x: TracedTensor,
    gradients: dict[str, int],
    adapters: dict[str, ExpertAdapter],
) -> TracedTensor:
    """`gradients`: bytes of the gradient of each trained parameter of the layer, by name; `adapters` by the name of
    their weight."""
    logits, scores, indices = _router(trace, arch, experts, x, gradients)
    output = _grouped_experts(trace, arch, experts, x, scores, gradients, adapters)
    del logits, indices  # local variables of the caller refer to them while the experts run
    return output


def _router(
    trace: MemoryTrace, arch: Architecture, experts: Experts, x: TracedTensor, gradients: dict[str, int]
) -> tuple[TracedTensor, TracedTensor, TracedTensor]:
    """Returns the logits, and the scores and indices of the chosen experts. Mixtral and Qwen3 normalise the chosen
    scores of an fp32 softmax over all experts; gpt-oss takes a softmax over the chosen alone."""
    name = "mlp.router.weight" if arch.layout == "gpt_oss" else "mlp.gate.weight"
    if trace.autocast:
        logits = half_linear(trace, x, experts.count, experts.count * arch.hidden, name in gradients)
    else:
        logits = linear(trace, x, experts.count, gradients.get(name, 0), name in gradients)
    if arch.layout == "gpt_oss":
        chosen, indices = _top(trace, logits, experts)
        return logits, saves_output(trace, chosen), indices
    if arch.layout == "mixtral":
        probabilities = saves_output(trace, cast(trace, logits, FLOAT))
    else:
        probabilities = softmax(trace, logits, FLOAT)
    chosen, indices = _top(trace, probabilities, experts)
    chosen = _normalised(trace, chosen)
    return logits, chosen if arch.layout == "mixtral" else cast(trace, chosen, logits.itemsize), indices


def _top(trace: MemoryTrace, scores: TracedTensor, experts: Experts) -> tuple[TracedTensor, TracedTensor]:
    """`torch.topk`: largest scores and their indices; backward scatters into zeros for all experts."""
    chosen = experts.per_token * TOKEN
    indices = trace.new(chosen, INDEX)
    saved = trace.save(indices) if scores.node is not None else None
    values = trace.unary(scores, chosen, scores.itemsize, saved)
    return values, indices


def _normalised(trace: MemoryTrace, scores: TracedTensor) -> TracedTensor:
    """`scores /= scores.sum()`, in place: the sums and a copy of the undivided scores are saved for backward."""
    if scores.node is None:
        return scores
    saved = trace.save(trace.new(scores.elements, scores.itemsize), trace.new(TOKEN, scores.itemsize))
    output = TracedTensor(scores.storage, scores.elements, scores.itemsize)
    return trace.on_tape(output, [scores], trace.new_gradient(scores), saved)


def _grouped_experts(
    trace: MemoryTrace,
    arch: Architecture,
    experts: Experts,
    x: TracedTensor,
    scores: TracedTensor,
    gradients: dict[str, int],
    adapters: dict[str, ExpertAdapter],
) -> TracedTensor:
    """`grouped_mm_experts_forward`: the copies of each token are gathered by expert, pass the experts' layers, are
    multiplied by `scores` and summed per token. `gradients` and `adapters` as in `mixture`."""
    rows, biased = experts.per_token * TOKEN, arch.layout == "gpt_oss"
    width, hidden = rows * experts.intermediate, rows * arch.hidden
    expert_ids, permutation = trace.new(rows, INDEX), trace.new(rows, INDEX)
    selected = gather(trace, x, trace.new(rows, INDEX), hidden)
    sample_weights = gather(trace, scores, permutation, rows)
    histogram_input = trace.allocate(rows * FLOAT)
    biases = _biases(trace, expert_ids, 2 * width, x, gradients.get("mlp.experts.gate_up_proj_bias", 0), biased)
    adapter, weight = adapters.get("mlp.experts.gate_up_proj"), gradients.get("mlp.experts.gate_up_proj", 0)
    output = _grouped(trace, selected, 2 * width, weight, biases)
    output = _with_adapter(trace, output, selected, rows, adapter) if adapter else output
    output = _gpt_oss_gate(trace, output) if arch.layout == "gpt_oss" else _gate(trace, output)
    biases = _biases(trace, expert_ids, hidden, x, gradients.get("mlp.experts.down_proj_bias", 0), biased)
    adapter, weight = adapters.get("mlp.experts.down_proj"), gradients.get("mlp.experts.down_proj", 0)
    joined = output
    output = _grouped(trace, joined, hidden, weight, biases)
    output = _with_adapter(trace, output, joined, rows, adapter) if adapter else output
    del joined
    weighted = multiply(trace, output, sample_weights)
    inverse = trace.new(rows, INDEX)
    counting = trace.allocate(rows * INDEX)
    del counting
    weighted = gather(trace, weighted, inverse, hidden)
    final = _sum_copies(trace, weighted, arch.hidden * TOKEN)
    del histogram_input
    return cast(trace, final, x.itemsize)


def _biases(
    trace: MemoryTrace, expert_ids: TracedTensor, elements: BytesPolynomial, x: TracedTensor, weight: int, biased: bool
) -> TracedTensor | None:
    """Gather the bias of each row's expert into a tensor of `elements` values; None unless `biased`. `weight`: bytes of
    the biases' gradient, 0 if they are not trained."""
    if not biased:
        return None

    def back(gradient: Storage) -> list[Storage | None]:
        trace.leaf_gradient(weight)
        return []

    saved = trace.save(expert_ids) if weight else None
    return trace.result(elements, x.itemsize, [], back, saved, trains=bool(weight))


def _grouped(
    trace: MemoryTrace, x: TracedTensor, elements: BytesPolynomial, weight: int, biases: TracedTensor | None
) -> TracedTensor:
    """`grouped_mm`: a linear layer of all experts at once, with `elements` values of output, to which `biases` are
    added in place. `weight`: bytes of the weight's gradient, 0 if it is not trained."""
    size, biased = x.size, biases is not None

    def back(gradient: Storage) -> list[Storage | None]:
        grad_x = trace.allocate(size)
        if weight:
            trace.leaf_gradient(weight)
        return [grad_x, gradient] if biased else [grad_x]

    saved = trace.save(x if weight else None, None) if x.node is not None or weight else None
    return trace.result(elements, x.itemsize, [x, biases] if biases else [x], back, saved, trains=bool(weight))


def _with_adapter(
    trace: MemoryTrace, output: TracedTensor, x: TracedTensor, rows: BytesPolynomial, adapter: ExpertAdapter
) -> TracedTensor:
    """Add (x · Aᵀ) · Bᵀ to the output of a grouped product, in place (`engine.model.adapted_experts`)."""
    a, b = (
        _factor(trace, adapter, adapter.inputs, x.itemsize),
        _factor(trace, adapter, adapter.outputs, x.itemsize, True),
    )
    low_rank = scale(trace, _product(trace, x, a, adapter.filled * rows))
    added = _product(trace, low_rank, b, output.elements)
    return trace.on_tape(TracedTensor(output.storage, output.elements, output.itemsize), [output, added], _to_both)


def _to_both(gradient: Storage) -> list[Storage | None]:
    return [gradient, gradient]


def _factor(
    trace: MemoryTrace, adapter: ExpertAdapter, width: int, itemsize: int, copied: bool = False
) -> TracedTensor:
    """A or B in the dtype of the input, filled up to whole rows; B is also `copied` into the order of the experts."""
    count = adapter.experts * adapter.rank * width
    size, filled = round_to_blocks(count * adapter.itemsize), adapter.experts * adapter.filled * width
    widened, fills = itemsize != adapter.itemsize, adapter.filled != adapter.rank

    def back(gradient: Storage) -> list[Storage | None]:
        ordered = trace.allocate(count * itemsize * BYTE) if copied or fills else None
        gradient_of_leaf = trace.allocate(size * BYTE) if widened else ordered or gradient
        del ordered
        trace.adopt_gradient(gradient_of_leaf)
        return []

    narrowed = trace.allocate(count * itemsize * BYTE) if widened else None
    if fills or copied:
        made = trace.result(filled * BYTE, itemsize, [], back, trains=True)
    else:
        made = TracedTensor(narrowed or trace.allocate(NO_BYTES), filled * BYTE, itemsize)
        made = trace.on_tape(made, [], back, trains=True)
    del narrowed
    return made


def _product(trace: MemoryTrace, x: TracedTensor, weight: TracedTensor, elements: BytesPolynomial) -> TracedTensor:
    """A grouped product with a weight that learns."""
    size, weight_size, wanted = x.size, weight.size, x.node is not None

    def back(gradient: Storage) -> list[Storage | None]:
        grad_x = trace.allocate(size) if wanted else None
        return [grad_x, trace.allocate(weight_size)]

    saved = trace.save(x, weight if wanted else None)
    return trace.result(elements, x.itemsize, [x, weight], back, saved)


def _gate(trace: MemoryTrace, gate_up: TracedTensor) -> TracedTensor:
    """act(gate) * up, where gate and up are the halves of `gate_up`."""
    gate, up = halves(trace, gate_up)
    return multiply(trace, activation(trace, gate), up)


def _gpt_oss_gate(trace: MemoryTrace, gate_up: TracedTensor) -> TracedTensor:
    """(up + 1) · gate · sigmoid(α · gate), where gate and up are every second column of `gate_up`, clamped."""
    gate, up = (narrow(trace, gate_up, gate_up.elements // 2) for _ in range(2))
    gate = _clamp(trace, gate, bounds=1)
    up = _clamp(trace, up, bounds=2)
    glu = multiply(trace, gate, saves_output(trace, scale(trace, gate)))
    return multiply(trace, add_number(trace, up), glu)


def _clamp(trace: MemoryTrace, x: TracedTensor, bounds: int) -> TracedTensor:
    """`clamp` with one or two `bounds` saves its input; backward makes a bool mask for each, and zeroes."""
    size, elements = x.size, x.elements

    def back(gradient: Storage) -> list[Storage | None]:
        within = [trace.allocate(elements) for _ in range(bounds)]
        result = trace.allocate(size)
        del within
        return [result]

    saved = trace.save(x) if x.node is not None else None
    return trace.result(x.elements, x.itemsize, [x], back, saved)


def _sum_copies(trace: MemoryTrace, x: TracedTensor, elements: BytesPolynomial) -> TracedTensor:
    """The sum over each token's experts; backward makes a contiguous copy of the expanded gradient."""
    return trace.unary(x, elements, x.itemsize)
