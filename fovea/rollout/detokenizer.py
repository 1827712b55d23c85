"""Detokenization of completions, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class CompletionText:
    """Decodes completions of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)

    def decode(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Text without special tokens, cut before the first stop string."""
        text = self._plain(token_ids)
        ends = [index for string in stop if (index := text.find(string)) >= 0]
        return text[: min(ends)] if ends else text

    def holds_stop(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether a stop string occurs within the newest tokens, as many as can hold one."""
        text = self._plain(token_ids[-self.tail_tokens(stop) :])
        return any(string in text for string in stop)

    def tail_tokens(self, stop: Sequence[str]) -> int:
        """Number of newest tokens that is certain to contain any of the stop strings whole."""
        # a token holds at least one byte, and a character at most four
        return 4 * max(len(string) for string in stop) + 4

    def _plain(self, token_ids: Sequence[int]) -> str:
        if token_ids and token_ids[-1] in self._stop_ids:
            token_ids = token_ids[:-1]
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text
