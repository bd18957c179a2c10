"""Initial router rows from hidden states: each token is routed to the experts whose own data give the base model hidden
states most similar to the token's.

The row of an expert in a layer is the mean input of that layer's feed-forward block over the expert's own samples,
minus the mean over all experts, scaled to length one.

Try: a stage of kind = "assemble" with router = "hidden".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.data.prepare import prepare_data
from engine.data.tokens import TokenData
from engine.device import open_device
from engine.device.oom import classify
from engine.errors import MemoryExhaustedError
from engine.model.load import LoadedModel, load_model
from engine.model.tokenizer import load_tokenizer
from engine.spec.schema.run import RunSpec

SAMPLES = 64
"""Most samples of each expert's data that the model is run on; more would change the mean of thousands of tokens very
little."""


def hidden_router_rows(
    base: RunSpec, experts: Sequence[RunSpec], notify: Callable[[str], None]
) -> Callable[[int], Tensor]:
    """Run the model of `base` over samples of each expert's data; `notify` is called with sentences on the progress.
    Returns a function from the number of a layer to the weights of its router, fp32 [experts, hidden]: for each expert,
    the mean input of that layer's feed-forward block over its samples, minus the mean over experts, scaled to length 1.

    If all experts have equal data, their means are equal and all rows are zero: the router then has to learn
    everything.

    Raises MemoryExhaustedError when one sample does not fit.
    """
    device = open_device(base)
    with device.activate():
        tokenizer = load_tokenizer(base.recipe.model, trust_remote_code=base.limits.trust_remote_code)
        with device.host_region():
            data = [prepare_data(expert, tokenizer, notify=notify).train for expert in experts]
        notify("loading model")
        loaded = load_model(base, device, tokenizer)
        means = []
        for number, samples in enumerate(data, 1):
            notify(f"hidden states of expert {number} of {len(data)}")
            means.append(_layer_means(loaded, samples))
    means_ELH = torch.stack(means)
    centred_ELH = means_ELH - means_ELH.mean(dim=0, keepdim=True)
    rows_ELH = centred_ELH / centred_ELH.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return lambda layer: rows_ELH[:, layer]


def _layer_means(loaded: LoadedModel, data: TokenData) -> Tensor:
    """Return the mean input of each layer's feed-forward block over the tokens of up to SAMPLES samples of `data`: fp32
    [layers, hidden], on the host."""
    decoder = loaded.base.get_decoder()
    layers = decoder.layers
    sums_LH = torch.zeros(len(layers), loaded.base.config.get_text_config().hidden_size)
    tokens = 0

    def add(layer: int, hidden_BSH: Tensor) -> None:
        sums_LH[layer] += hidden_BSH.detach().float().sum(dim=(0, 1)).cpu()

    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _module, inputs, index=index: add(index, inputs[0]))
        for index, layer in enumerate(layers)
    ]
    was_training = loaded.model.training
    loaded.model.eval()
    try:
        with torch.no_grad():
            for row in range(min(SAMPLES, len(data))):
                ids_BS = torch.as_tensor(data[row].input_ids, dtype=torch.long).unsqueeze(0)
                decoder(input_ids=ids_BS.to(loaded.device.torch_device))
                tokens += ids_BS.shape[1]
    except (RuntimeError, MemoryError) as error:
        if classify(error) is None:
            raise
        raise MemoryExhaustedError(
            "one sample of an expert does not fit beside the model while hidden states are collected",
            fix='lower data.max_length, or set router = "random" in the stage that assembles',
        ) from error
    finally:
        loaded.model.train(was_training)
        for hook in hooks:
            hook.remove()
    return sums_LH / max(tokens, 1)
