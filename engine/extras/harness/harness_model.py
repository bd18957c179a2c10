"""A loaded model as lm-evaluation-harness asks for it: log-likelihoods of continuations and of whole texts, and answers
up to a stop. Batches, backoff and resume are those of `tunedeck eval`.

Only `engine.extras.harness.harness` imports this file, and only where `lm_eval` is installed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import StoppingCriteria

from engine.architecture.positions import table_of_positions
from engine.config.schema.recipe import Generate
from engine.data.chat_template import ChatTemplate, TemplateRefusal
from engine.device.oom import ATTEMPTS, catch_oom
from engine.errors import DataError, MemoryExhaustedError
from engine.evaluate.answers import append_rows, read_rows
from engine.evaluate.generation import generate
from engine.model.decoder import autocast, eval_mode
from engine.model.head import find_head
from engine.model.loaded import LoadedModel
from engine.model.trained import decoder_of

MOST_ROWS = 64
"""Requests computed at once, before memory says otherwise."""

MOST_POSITIONS = 2048
"""Tokens that a model without a number of positions is given, as lm-evaluation-harness does."""

MOST_NEW_TOKENS = 256
"""Of a task that names no length, as in lm-evaluation-harness."""

Request = TypeVar("Request")
Result = TypeVar("Result")


class KeptResults:
    """Results by the hash of the request and of the weights, in a file that an interrupted evaluation left."""

    def __init__(self, path: Path | None, weights: str) -> None:
        self._path, self._weights = path, weights
        self._found: dict[str, Any] = {str(row["key"]): row["result"] for row in read_rows(path)}

    def key(self, kind: str, request: Any) -> str:
        return hashlib.blake2b(json.dumps([self._weights, kind, request]).encode(), digest_size=16).hexdigest()

    def get(self, key: str) -> Any:
        """None if it is unknown."""
        return self._found.get(key)

    def add(self, results: dict[str, Any]) -> None:
        """Raises OSError if they cannot be written."""
        self._found |= results
        append_rows(self._path, [{"key": key, "result": result} for key, result in results.items()])


class Scored(NamedTuple):
    """A continuation's log-likelihood, and whether it is what greedy decoding would write."""

    log_likelihood: float
    is_greedy: bool


class HarnessModel(TemplateLM):
    """See `lm_eval.api.model.LM`."""

    def __init__(
        self, loaded: LoadedModel, settings: Generate, positions: int, kept: KeptResults,
        notify: Callable[[str], None], template_args: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokenizer = loaded.tokenizer
        self._loaded, self._settings, self._kept, self._notify = loaded, settings, kept, notify
        self._rows, self._template_args = MOST_ROWS, template_args
        self.max_length = positions

    @classmethod
    def positions_of(cls, facts: dict[str, Any]) -> int:
        """Tokens that prompt and answer may have, by a model's config."""
        return table_of_positions(facts) or int(facts.get("max_position_embeddings") or MOST_POSITIONS)

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of sequence."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text without a context."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Raises DataError if the template refuses the messages."""
        template = ChatTemplate(self.tokenizer, variables=self._template_args)
        try:
            return template.render(chat_history, None, prompt=add_generation_prompt)
        except TemplateRefusal as refusal:
            raise DataError(str(refusal), fix="--set evaluate.harness_template=off") from refusal

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, with the tokenizer's own special tokens, unless the text begins with the first of them."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the model's positions, each with one token of context."""
        windows = [
            [make_disjoint_window(window) for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1)]
            for request in requests
        ]  # fmt: skip
        scored = iter(self._loglikelihood_tokens([(None, *window) for text in windows for window in text]))
        return [sum(next(scored)[0] for _ in text) for text in windows]

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        pairs = [(list(map(int, context)), list(map(int, continuation))) for _, context, continuation in requests]
        found = self._computed("loglikelihood", pairs, lambda pair: len(pair[0]) + len(pair[1]), self._score)
        return [(float(total), bool(greedy)) for total, greedy in found]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[Any]]:
        """(log-likelihood, is greedy) of each continuation, in one forward pass; rows are padded on the right."""
        loaded = self._loaded
        rows = [(context + continuation)[-(self.max_length + 1) :][:-1] for context, continuation in pairs]
        kept = [continuation[-self.max_length :] for _, continuation in pairs]
        width, pad_id = max(map(len, rows)), int(self.tokenizer.pad_token_id)
        with loaded.device.host_region():
            ids_BS = torch.full((len(rows), width), pad_id, dtype=torch.long)
            mask_BS = torch.zeros_like(ids_BS)
            for number, row in enumerate(rows):
                ids_BS[number, : len(row)] = torch.tensor(row)
                mask_BS[number, : len(row)] = 1
            places = torch.tensor([number * width + len(row) - len(target) + at for number, (row, target) in
                                   enumerate(zip(rows, kept, strict=True)) for at in range(len(target))])  # fmt: skip
            target_N = torch.tensor([token for target in kept for token in target])
        upload = loaded.device.upload
        mask = upload(mask_BS) if loaded.attends_to_padding else None
        with eval_mode(loaded.model), autocast(loaded):
            hidden_BSH: Tensor = decoder_of(loaded.base)(
                input_ids=upload(ids_BS), attention_mask=mask, use_cache=False
            ).last_hidden_state
            hidden_NH = hidden_BSH.flatten(0, 1).index_select(0, upload(places))
            logits_NV = find_head(loaded.base).logits(hidden_NH)
            likely_N = logits_NV.log_softmax(-1).gather(1, upload(target_N)[:, None])[:, 0]
            same_N = logits_NV.argmax(-1) == upload(target_N)
        found, start = [], 0
        for target in kept:
            end = start + len(target)
            found.append([float(likely_N[start:end].sum()), bool(same_N[start:end].all())])
            start = end
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers that end before the first of a request's stops, each from as much of its prompt as there is room
        for."""
        asked = [[request.args[0], dict(request.args[1])] for request in requests]
        found: dict[int, str] = {}
        for options in {json.dumps(settings, sort_keys=True): settings for _, settings in asked}.values():
            same = [number for number, (_, settings) in enumerate(asked) if settings == options]
            prompts = [asked[number][0] for number in same]
            found |= dict(zip(same, self._answers(prompts, dict(options)), strict=True))
        return [found[number] for number in range(len(requests))]

    def _answers(self, prompts: list[str], options: dict[str, Any]) -> list[str]:
        given = normalize_gen_kwargs(options, MOST_NEW_TOKENS)
        until = [text for text in given.get("until") or [] if text]
        new_tokens = min(int(given["max_gen_toks"]), self.max_length - 1)
        sampled = {name: given[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty")
                   if given.get("do_sample") and given.get(name) is not None}  # fmt: skip
        settings = Generate(max_new_tokens=new_tokens, seed=self._settings.seed, **sampled)
        room = max(1, self.max_length - new_tokens)
        requests = [
            (self.tok_encode(prompt)[-room:], number if sampled else 0) for number, prompt in enumerate(prompts)
        ]
        kind = f"generate {settings.model_dump_json()} {json.dumps(until)}"
        answer = partial(self._generate, settings=settings, until=until)
        texts = self._computed(kind, requests, lambda request: len(request[0]), answer)
        return [postprocess_generated_text(text, until, None) for text in texts]

    def _generate(self, requests: Sequence[tuple[list[int], int]], settings: Generate, until: list[str]) -> list[str]:
        prompts, draws = [ids for ids, _ in requests], [draw for _, draw in requests]
        stop = StopOnTexts(self.tokenizer, until, max(map(len, prompts))) if until else None
        with eval_mode(self._loaded.model):
            answers = generate(self._loaded, prompts, draws, settings, stop=stop)
        return [str(self.tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]

    def _computed(
        self, kind: str, requests: Sequence[Request], length: Callable[[Request], int],
        compute: Callable[[Sequence[Request]], Sequence[Result]],
    ) -> list[Result]:  # fmt: skip
        """The results of all requests: those that are kept, the others in batches, longest first; a batch that runs out
        of memory is halved. Raises MemoryExhaustedError if one request does not fit."""
        keys = [self._kept.key(kind, request) for request in requests]
        waiting = {key: request for key, request in zip(keys, requests, strict=True) if self._kept.get(key) is None}
        order = sorted(waiting, key=lambda key: -length(waiting[key]))
        failures, done = 0, 0
        while order:
            batch = order[: self._rows]
            made: list[Sequence[Result]] = []
            chosen = [waiting[key] for key in batch]
            failure = catch_oom(lambda: made.append(compute(chosen)), self._loaded.device, "evaluate")  # noqa: B023
            if failure is None:
                self._kept.add(dict(zip(batch, made[0], strict=True)))
                del order[: len(batch)]
                done, failures = done + len(batch), 0
                self._notify(f"{done} of {len(waiting)} requests")
                continue
            self._loaded.device.release_cached()
            failures += 1
            if len(batch) == 1 and failures >= ATTEMPTS:
                raise MemoryExhaustedError(
                    f"out of memory in {kind.split()[0]} of one request of {length(chosen[0])} tokens",
                    fix="use a profile with more memory, or leave the task out",
                )
            self._rows = max(1, len(batch) // 2)
            self._notify(f"out of memory; continuing with {self._rows} requests at a time")
        return [self._kept.get(key) for key in keys]


class StopOnTexts(StoppingCriteria):
    """Ends a row whose answer contains one of some texts."""

    def __init__(self, tokenizer: Any, until: list[str], width: int) -> None:
        """`width`: tokens of the padded prompts."""
        self._tokenizer, self._until, self._width = tokenizer, until, width
        self._looked_at = 8 + max(len(tokenizer.encode(text, add_special_tokens=False)) for text in until)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """bool[B] for tokens [B, S + T]: only the last tokens are decoded, because each call sees one more."""
        tails = input_ids[:, self._width :][:, -self._looked_at :].tolist()
        texts = [self._tokenizer.decode(tail, skip_special_tokens=True) for tail in tails]
        ended = [any(stop in text for stop in self._until) for text in texts]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)
