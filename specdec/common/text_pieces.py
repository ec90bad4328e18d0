"""Text as it grows, token by token."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

__all__ = ["TextPieces", "pieces_of"]


class TextPieces:
    """Turns a stream of tokens into pieces of text that, joined, are the text of all tokens.

    A token may be part of a character or be written differently after its neighbours, so a piece is the difference of
    two decodings; an unfinished character waits for the tokens that complete it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._start = max(0, len(prompt) - 4)  # a little context decides about spaces
        self._shown = len(prompt)

    def add(self, token: int) -> str:
        """The text that this token adds; empty while a character is unfinished."""
        self._ids.append(token)
        before, after = self._decode(self._shown), self._decode(len(self._ids))
        if after.endswith("\N{REPLACEMENT CHARACTER}") or len(after) < len(before):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def rest(self) -> str:
        """What an unfinished character at the end of the stream looks like."""
        piece = self._decode(len(self._ids))[len(self._decode(self._shown)) :]
        self._shown = len(self._ids)
        return piece

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True)


def pieces_of(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text behind the prompt; joined they are all of it."""
    pieces = TextPieces(tokenizer, prompt)
    found = [pieces.add(token) for token in tokens]
    return [*found[:-1], found[-1] + pieces.rest()] if found else []
