"""A small decoder that proofs among ranks train in place of the run's model, whole or in shards.

Its sizes do not divide by numbers of ranks, so that parts of parameters are unequal and padded. Weights are the same
on every rank and at each call.

Shapes: B rows, S tokens, W features.

Try: `pytest tests/distributed/test_rank_proofs.py`
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Parameter
from torch.nn import functional as F

from engine.distributed.sharded import ShardedModel
from engine.train.proofs.record import drawn
from engine.train.setup import TrainingSetup

WIDTH, HIDDEN, HEADS, VOCABULARY, ADAPTER_RANK = 36, 50, 2, 61, 3
ROWS, TOKENS = 2, 7


class Projection(nn.Module):
    """A linear layer, with `lora` a frozen one with a trained adapter."""

    def __init__(self, weight_OI: Tensor, lora: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.weight = Parameter(weight_OI, requires_grad=lora is None)
        self.a_RI = Parameter(lora[0]) if lora else None
        self.b_OR = Parameter(lora[1]) if lora else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        output = F.linear(x, self.weight)
        if self.a_RI is None or self.b_OR is None:
            return output
        return output + F.linear(F.linear(x, self.a_RI), self.b_OR)


class Layer(nn.Module):
    """A decoder layer: causal attention and an MLP, each on top of a residual."""

    def __init__(self, norm_W: Tensor, projections: list[Projection], *, lora: bool) -> None:
        super().__init__()
        self.norm = Parameter(norm_W, requires_grad=not lora)
        self.qkv, self.out, self.up, self.down = projections

    def forward(self, x_BSW: Tensor) -> Tensor:
        """Apply the layer to hidden states."""
        heads = self.qkv(F.rms_norm(x_BSW, (WIDTH,), self.norm)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x_BSW = x_BSW + self.out(attended)
        added: Tensor = self.down(F.silu(self.up(x_BSW)))
        return x_BSW + added


class SmallDecoder(nn.Module):
    """Embedding, `layers` layers, head. With `lora` only adapters are trained, else everything."""

    def __init__(self, setup: TrainingSetup, dtype: torch.dtype, *, layers: int, lora: bool) -> None:
        super().__init__()
        self._setup, self._dtype, self._lora, self._drawn = setup, dtype, lora, 0
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, _weight=self._weight(VOCABULARY, WIDTH) * 2)
        self.embedding.weight.requires_grad_(not lora)
        self.layers = nn.ModuleList(self._layer() for _ in range(layers))
        self.head = self._projection(VOCABULARY, WIDTH)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """The mean of the token losses of predicting each next token."""
        x_BSW = self.embedding(ids_BS)
        for layer in self.layers:
            x_BSW = layer(x_BSW)
        logits_BSV = self.head(x_BSW)
        return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten())

    def _layer(self) -> Layer:
        shapes = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
        norm_W = 1 + self._weight(1, WIDTH)[0]
        return Layer(norm_W, [self._projection(*shape) for shape in shapes], lora=self._lora)

    def _projection(self, outputs: int, inputs: int) -> Projection:
        weight_OI = self._weight(outputs, inputs)
        if not self._lora:
            return Projection(weight_OI, None)
        return Projection(weight_OI, (self._weight(ADAPTER_RANK, inputs), 0.1 * self._weight(outputs, ADAPTER_RANK)))

    def _weight(self, outputs: int, inputs: int) -> Tensor:
        self._drawn += 1
        weight_OI: Tensor = drawn((outputs, inputs), self._dtype, self._setup, 100 + self._drawn) / inputs**0.5
        return weight_OI


def shard(setup: TrainingSetup, decoder: SmallDecoder, *, drops_weights: bool) -> ShardedModel:
    """Spread a decoder over all ranks of the run as the run's own model would be. All ranks call this."""
    device, ranks = setup.context.device, setup.context.ranks
    return ShardedModel(
        decoder,
        decoder,
        [*([layer] for layer in decoder.layers), [decoder.embedding], [decoder.head]],
        mesh_of(setup),
        ranks.voted_group(),
        head=decoder.head,
        drops_weights=drops_weights,
        fill=lambda modules: nullcontext(),
        host_region=device.host_region,
    )


def mesh_of(setup: TrainingSetup) -> DeviceMesh:
    """The mesh of all ranks, which is the group of all ranks that exists already."""
    with setup.context.device.host_region():
        return init_device_mesh(setup.context.device.torch_device.type, (setup.context.ranks.size,))


def batch(setup: TrainingSetup, number: int) -> Tensor:
    """Token ids [ROWS, TOKENS] on the device, the same at each call with this `number`."""
    device = setup.context.device
    with device.host_region():
        ids_BS = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(number))
    return device.upload(ids_BS)
