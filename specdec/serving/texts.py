"""Tokens to text as a client sees it: without the string that ends it, and never half of that string."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from specdec.common.text_pieces import TextPieces

__all__ = ["VisibleText"]


class VisibleText:
    """The text of one answer.

    Args:
        tokenizer: the target's.
        prompt: what it comes behind.
        stops: texts that end it and are no part of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._pieces = TextPieces(tokenizer, prompt)
        self._stops = stops
        self._held = ""
        self._has_ended = False

    def add(self, tokens: Sequence[int]) -> str:
        """What more may be shown: all but what a stop string may have begun with."""
        return self._show("".join(self._pieces.add(token) for token in tokens))

    def rest(self) -> str:
        """What is left at the end."""
        shown = self._show(self._pieces.rest())
        held, self._held = self._held, ""
        return shown if self._has_ended else shown + held

    def _show(self, piece: str) -> str:
        if self._has_ended:
            return ""
        text = self._held + piece
        places = [text.index(stop) for stop in self._stops if stop in text]
        if places:
            self._has_ended, self._held = True, ""
            return text[: min(places)]
        size = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that the stop string begins with."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
