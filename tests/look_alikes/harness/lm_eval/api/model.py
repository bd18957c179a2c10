from __future__ import annotations

from typing import Any


class TemplateLM:
    tokenizer: Any

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Of each continuation after its context."""
        pairs = []
        for request in requests:
            context, continuation = request.args
            ids = self.tok_encode(context)
            pairs.append(((context, continuation), ids, self.tok_encode(context + continuation)[len(ids) :]))
        return self._loglikelihood_tokens(pairs)

    def tok_encode(self, string: str) -> list[int]:
        raise NotImplementedError

    def _loglikelihood_tokens(self, requests: list[Any]) -> list[tuple[float, bool]]:
        raise NotImplementedError
