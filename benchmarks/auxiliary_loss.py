"""Measures how much the gradient of the auxiliary loss of a mixture of experts depends on how a step is cut into
micro-batches, for transformers' formula and for the engine's.

Prints the gradient's difference from that of the uncut step, relative to its norm, for 2, 4 and 16 micro-batches.
transformers computes its loss for each micro-batch; gradient accumulation averages these. The sequences are of
different lengths and of 16 kinds of text, which a mixture sends to different experts.

Try: `python -m benchmarks.auxiliary_loss`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from engine.model.expert_balance import ExpertBalance

SEQUENCES, LONGEST, EXPERTS, PER_TOKEN, LAYERS = 16, 64, 8, 2, 4
CUTS = (1, 2, 4, 16)

Rows = tuple[Tensor, Tensor]
"""Token ids [B, S] and the tokens of each row [B]."""


def main() -> None:
    """Print the relative differences of the gradient, a line per formula."""
    model, rows = small_mixture(), sequences()
    for name, loss in (("transformers", of_transformers), ("tunedeck", of_the_engine)):
        whole, *cut = [gradient(model, rows, pieces, loss) for pieces in CUTS]
        for pieces, each in zip(CUTS[1:], cut, strict=True):
            print(f"{name:<13}{pieces:>3} micro-batches: {float((each - whole).norm() / whole.norm()):.2g}")


def small_mixture() -> MixtralForCausalLM:
    """A Mixtral of four layers with random weights. Router weights are enlarged, so that different texts go to
    different experts."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=PER_TOKEN,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.mul_(20.0)
    return model


def sequences() -> Rows:
    """(token ids [B, S], tokens of each row [B]). Each row draws its tokens from 16 ids that no other row uses, and is
    padded to the longest row."""
    drawn = torch.Generator().manual_seed(1)
    tokens_B = torch.randint(LONGEST // 4, LONGEST + 1, (SEQUENCES,), generator=drawn)
    ids_BS = torch.randint(0, 16, (SEQUENCES, LONGEST), generator=drawn) + 16 * torch.arange(SEQUENCES)[:, None]
    return ids_BS, tokens_B


def gradient(
    model: MixtralForCausalLM, rows: Rows, pieces: int, loss: Callable[[Sequence[Tensor], Tensor, int, int], Tensor]
) -> Tensor:
    """Return the gradient with respect to all weights, as one vector, of a step that is cut into `pieces`
    micro-batches. `loss` gets the router logits of each layer, the tokens of each row, `pieces` and the tokens of the
    step."""
    model.zero_grad(set_to_none=True)
    ids_BS, tokens_B = rows
    for ids, tokens in zip(ids_BS.chunk(pieces), tokens_B.chunk(pieces), strict=True):
        width = int(tokens.max())
        logits = model.model(input_ids=ids[:, :width], output_router_logits=True).router_logits
        loss(logits, tokens, pieces, int(tokens_B.sum())).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def of_transformers(logits: Sequence[Tensor], tokens_B: Tensor, pieces: int, step_tokens: int) -> Tensor:
    """Return transformers' auxiliary loss of one micro-batch, a scalar divided by `pieces`, the number of
    micro-batches. `logits` has a tensor [B·S, E] for each layer."""
    mask = (torch.arange(int(tokens_B.max())) < tokens_B[:, None]).long()
    found = load_balancing_loss_func(cast(tuple[Tensor], tuple(logits)), EXPERTS, PER_TOKEN, mask)
    assert isinstance(found, Tensor)
    return found / pieces


def of_the_engine(logits: Sequence[Tensor], tokens_B: Tensor, pieces: int, step_tokens: int) -> Tensor:
    """Return the engine's auxiliary loss of one micro-batch, a scalar divided by `step_tokens`, the tokens of the step.
    `logits` has a tensor [B·S, E] for each layer."""
    balance = ExpertBalance(tuple(range(LAYERS)), EXPERTS, PER_TOKEN, weight=1.0, watched=False)
    found = balance.routing(logits, tokens_B, int(tokens_B.max())).auxiliary
    assert found is not None
    return found / step_tokens


if __name__ == "__main__":
    main()
