"""Where a request ends beside its length and the tokens that end every row: tokens and texts of its own."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from specdec.common.text_pieces import TextPieces

__all__ = ["StopSearch"]


class StopSearch:
    """Looks for the end in the tokens of one request as they come.

    Args:
        tokens: that end it.
        strings: texts that end it, with the token that completes the first of them.
        tokenizer: needed with strings.
        prompt: which stop strings do not reach back into.
    """

    def __init__(
        self,
        tokens: Collection[int],
        strings: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokens = frozenset(tokens)
        self._strings = strings
        self._pieces = TextPieces(tokenizer, prompt) if strings and tokenizer is not None else None
        self._kept = max(map(len, strings), default=0) - 1  # characters that a string may have begun with
        self._tail = ""
        self.string: str | None = None

    def first_stop(self, new: Sequence[int]) -> int | None:
        """How many of the new tokens stay if one of them ends the text; None if none does."""
        for count, token in enumerate(new, start=1):
            if token in self._tokens or self._completes(token):
                return count
        return None

    def _completes(self, token: int) -> bool:
        if self._pieces is None:
            return False
        text = self._tail + self._pieces.add(token)
        found = [(text.index(one), one) for one in self._strings if one in text]
        self._tail = text[max(len(text) - self._kept, 0) :]
        if found:
            self.string = min(found)[1]
        return bool(found)
