"""Opens a run's result with transformers and peft alone before the run is reported as done, and gives the account of
what is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin

from engine.architecture.lookup import added_tokens
from engine.architecture.model_folder import stored_quantisation
from engine.config.schema.run import RunSpec
from engine.device.oom import catch_oom
from engine.errors import UsageError
from engine.model.adapters import router_modules
from engine.model.config import auto_class
from engine.model.load import DEQUANTISING, nf4_config
from engine.model.loaded import LoadedModel
from engine.model.reference import BASE_FOLDER, find_starting_weights
from engine.model.reopened import (
    ROWS,
    NotTriedError,
    PlainRequest,
    account_of_result,
    compare,
    open_plainly,
    own_logits,
    plain_attention,
    token_rows,
    weight_bytes,
)
from engine.model.token_rows import token_ids
from engine.model.trained import embedding_rows
from engine.model.weight_account import WeightAccount
from engine.train.step.context import StepContext
from engine.train.step.failures import gather_failures


def rows_of_run(spec: RunSpec, loaded: LoadedModel) -> tuple[tuple[int, ...], ...]:
    """The token ids of the rows that are compared; the tokens that the run added are in one of them."""
    added = token_ids(loaded.tokenizer, added_tokens(spec.recipe.model))
    return token_rows(loaded.tokenizer, ROWS, added)


def logits_of_run(spec: RunSpec, context: StepContext, weights: Path | None) -> list[Tensor] | None:
    """The logits of `rows_of_run` by the run's own model, on rank 0; None elsewhere, and where memory ran out. All
    ranks call this. `weights`: the checkpoint's weights to load before, if the result is not of the last step."""
    strategy, ranks, found = context.strategy, context.ranks, list[Tensor]()

    def compute() -> None:
        if weights is not None:
            context.loaded.load_weights(weights)
        found[:] = own_logits(context.loaded, rows_of_run(spec, context.loaded))

    if not (ranks.is_rank0 or strategy.gathers_in_passes):
        return None
    failure = catch_oom(lambda: strategy.run_whole(compute), context.device, "result")
    failed = gather_failures(ranks, failure, None, context.device) if strategy.gathers_in_passes else failure
    context.device.release_cached()
    return None if failed or not ranks.is_rank0 else found


def open_result(
    spec: RunSpec,
    loaded: LoadedModel,
    folder: Path,
    name: str,
    ours: Sequence[Tensor] | None,
    unread: Mapping[str, str],
) -> WeightAccount:
    """Open the result in `folder`, which will be called `name`, and compare it with `ours`. `unread`: tensors of the
    base that were copied into it, with the reason. Raises EnvironmentProblem: it does not open, lacks weights, or
    computes something else."""
    if ours is None:
        return account_of_result(folder, unread, "not opened: memory ran out when its logits were computed", path=name)
    try:
        answer = open_plainly(_request(spec, loaded, folder))
    except NotTriedError as reason:
        return account_of_result(folder, unread, f"not opened: {reason}", path=name)
    tools = "peft and transformers" if loaded.kind == "adapter" else "transformers"
    vocabulary = max(loaded.tokenizer.get_vocab().values()) + 1
    routers = bool(router_modules(loaded.base))
    told = compare([row[:, :vocabulary] for row in ours], answer.logits, loaded.precision.compute, has_routers=routers)
    return account_of_result(folder, unread, f"with {tools} alone: {told}", path=name)


def _request(spec: RunSpec, loaded: LoadedModel, folder: Path) -> PlainRequest:
    """What others type to open it. Raises NotTriedError if the base is gone."""
    base = loaded.base
    shared: dict[str, Any] = {
        "name": "the result",
        "auto_class": auto_class(base.config).__name__,
        "token_rows": rows_of_run(spec, loaded),
        "attention": plain_attention(base.config, loaded.attention),
        "trust_remote_code": spec.limits.trust_remote_code,
        "size_bytes": weight_bytes(base),
    }
    if loaded.kind == "model":
        return PlainRequest(model=str(folder), config=str(folder), **shared)
    own = not loaded.base_exists_elsewhere
    try:
        start = find_starting_weights(spec.recipe.model)
    except UsageError as gone:  # it was moved while the run trained
        raise NotTriedError(gone.found) from gone
    model = str(folder / BASE_FOLDER) if own else start.base
    return PlainRequest(
        model=model,
        config=str(folder) if (folder / "config.json").is_file() else model,
        revision=None if own else start.revision,
        adapter=str(folder),
        dtype=str(loaded.precision.weights).removeprefix("torch."),
        embedding_rows=embedding_rows(base),
        quantization=None if own else _quantization(spec, loaded),
        **shared,
    )


def _quantization(spec: RunSpec, loaded: LoadedModel) -> tuple[str, dict[str, Any]] | None:
    """transformers' class and keys with which the base is opened as the run did."""
    config: QuantizationConfigMixin
    if spec.recipe.model.quantize == "nf4":
        config = nf4_config(loaded.precision.compute)
        return type(config).__name__, {key: value for key, value in config.to_dict().items() if key[0] != "_"}
    stored = stored_quantisation(loaded.config.to_dict())
    return (DEQUANTISING[stored].__name__, {"dequantize": True}) if stored in DEQUANTISING else None
