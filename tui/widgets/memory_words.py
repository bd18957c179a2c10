"""Where the peak of a prediction lies and what moves it, in words: for Launch, Run and the Memory screen.

Functions from the figures of a plan to text; they read no files.

Try: `python -c "from tui.widgets.memory_words import *; print(peak_sentence('optimizer_step', {'optimizer': 8}))"`
"""

from __future__ import annotations

from collections.abc import Mapping

PHASES = {
    "load": "loading", "forward": "forward pass", "loss_backward": "loss", "layer_first": "backward pass",
    "layer_last": "end of the backward pass", "embedding_backward": "embedding's gradient",
    "optimizer_step": "optimizer step", "evaluate": "evaluation", "generate": "generation",
}  # fmt: skip
"""The plan's phases in words, by the names that `tunedeck plan` prints."""

REASONS = {
    "load": "weights are loaded",
    "forward": "each layer keeps its activations for the backward pass",
    "loss_backward": "logits exist for the whole vocabulary at every token",
    "layer_first": "the first gradients appear while all activations are still kept",
    "layer_last": "all gradients exist, and few activations are left",
    "embedding_backward": "the gradient of the largest embedding table is computed",
    "optimizer_step": "gradients and optimizer state exist together",
    "evaluate": "a batch is evaluated; nothing is kept for backward",
    "generate": "answers are generated, with their key-value cache",
}
"""What takes memory in each phase."""

MOVES = {
    "weights": "a smaller or quantized model, or more devices that share it (sharding)",
    "adapters": "a lower method.rank",
    "gradients": "fewer trained weights, such as LoRA's, or more devices that share them (sharding)",
    "optimizer": "fewer trained weights, such as LoRA's, an 8-bit optimizer, or offloading its state to the host",
    "activations": (
        "a smaller micro-batch, shorter sequences, gradient checkpointing, or offloading activations to the host"
    ),
    "recompute": "a smaller micro-batch, or shorter sequences",
    "loss": "a smaller micro-batch, shorter sequences, or a chunked loss",
    "buffers": "a smaller micro-batch, or shorter sequences",
}
"""What lowers each component. Of the other components, which are not the model's tensors, nothing does."""

MOVES_IN = {
    "generate": "a lower generate.max_new_tokens, shorter prompts, or evaluations without generated answers",
    "evaluate": "a smaller micro-batch, or shorter sequences",
}
"""What lowers everything but the weights where nothing is kept for a backward pass."""

UNTOUCHED = ("workspace", "context", "fragmentation")
"""Components that no setting moves, and that are therefore not named as the largest."""


def phase_words(phase: str) -> str:
    """A phase of a plan in words; a phase that this version does not know as it is."""
    return PHASES.get(phase, phase)


def largest_component(components: Mapping[str, int]) -> str:
    """The largest component that a setting can move; empty if there is none."""
    movable = {name: count for name, count in components.items() if count > 0 and name not in UNTOUCHED}
    return max(movable, key=movable.__getitem__, default="")


def peak_sentence(phase: str, components: Mapping[str, int]) -> str:
    """Where the peak lies and what takes most of it, such as "the peak is in the backward pass; largest part:
    activations, 92 %"; empty if there are no components."""
    largest, total = largest_component(components), sum(components.values())
    if not largest:
        return ""
    return (
        f"the peak is in the {phase_words(phase)}; largest part: {largest}, {100 * components[largest] / total:.0f} %"
    )


def moves_sentence(phase: str, components: Mapping[str, int]) -> str:
    """What lowers the largest component of a peak in `phase`; empty if this version knows nothing that does."""
    largest = largest_component(components)
    if largest not in MOVES:
        return ""
    in_training = largest in ("weights", "adapters", "gradients", "optimizer") or phase not in MOVES_IN
    return f"to lower {largest}: {MOVES[largest] if in_training else MOVES_IN[phase]}"
