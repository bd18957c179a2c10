"""Opens a result with transformers and peft alone, as whoever receives it does, and computes the logits of some rows.

A script that `engine.model.reopened` runs in a separate process; it imports nothing of this project. It reads a request
(JSON) on standard input, and writes safetensors on standard output: the logits of each row, fp32 [S, V], with
{"lacking": names of weights that are in no file, "unread": names of tensors in no weight} as metadata.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors.torch import save
from torch import Tensor

MISSING_KEYS = re.compile(r"Found missing adapter keys while loading the checkpoint: \[(.*)\]")
"""peft's warning, the only place where `PeftModel.from_pretrained` names them."""


def open_model(request: dict[str, Any]) -> tuple[Any, dict[str, list[str]]]:
    """Return the model in evaluation mode, and the names of weights and tensors that do not fit."""
    shared = {"trust_remote_code": request["trust_remote_code"], "local_files_only": True}
    source = {"revision": request["revision"] or "main", **shared}
    of_base = request["config"] == request["model"]
    config = transformers.AutoConfig.from_pretrained(request["config"], **(source if of_base else shared))
    options = {"dtype": request["dtype"], "attn_implementation": request["attention"]}
    if request["quantization"]:
        kind, keys = request["quantization"]
        options |= {"quantization_config": getattr(transformers, kind)(**keys), "device_map": {"": "cpu"}}
    model, report = getattr(transformers, request["auto_class"]).from_pretrained(
        request["model"], config=config, use_safetensors=True, output_loading_info=True, **options, **source
    )
    if request["quantization"] and "dequantize" in request["quantization"][1]:
        model = model.to(getattr(torch, request["dtype"]))
    lacking = [*report["missing_keys"], *(str(entry[0]) for entry in report["mismatched_keys"])]
    found = {"lacking": sorted(lacking), "unread": sorted(report["unexpected_keys"])}
    if request["adapter"] is None:
        return model.eval(), found
    if request["embedding_rows"] > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(request["embedding_rows"], mean_resizing=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(model, request["adapter"])
    missing = [match[1] for each in seen if (match := MISSING_KEYS.search(str(each.message)))]
    found["lacking"] += [name.strip(" '\"") for names in missing for name in names.split(",")]
    return adapted.eval(), found


def compute(model: Any, rows: list[list[int]]) -> dict[str, Tensor]:
    """Return the logits of each row by its number."""
    found = {}
    with torch.no_grad():
        for number, row in enumerate(rows):
            ids = torch.tensor([row])
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            found[str(number)] = output.logits[0].float().contiguous()
    return found


def main() -> None:
    """Answer one request. What libraries print goes to standard error."""
    answer = os.dup(1)
    os.dup2(2, 1)
    transformers.utils.logging.disable_progress_bar()
    request = json.load(sys.stdin)
    model, found = open_model(request)
    logits = compute(model, request["token_rows"])
    with os.fdopen(answer, "wb") as file:
        file.write(save(logits, metadata={key: json.dumps(names) for key, names in found.items()}))


if __name__ == "__main__":
    main()
