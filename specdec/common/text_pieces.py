"""Text as it grows, token by token."""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

__all__ = ["TextPieces", "pieces_of", "token_bytes"]

# The characters that byte-level tokenizers write bytes as: those that can be seen stand for themselves.
_SEEN = (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1))
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTE_OF = {chr(byte): byte for byte in _SEEN} | {chr(256 + place): byte for place, byte in enumerate(_UNSEEN)}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in vocabularies of SentencePiece
_SPACE = "\u2581"  # a space there


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


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """What a token writes, in UTF-8; maybe a part of a character: all tokens of a text make its bytes."""
    piece, text = str(tokenizer.convert_ids_to_tokens(token)), str(tokenizer.decode([token]))
    if match := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(match[1], 16)])
    if "\N{REPLACEMENT CHARACTER}" in text and all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    if piece.startswith(_SPACE) and not text.startswith(" "):  # taken away at the beginning of a text
        return b" " + text.encode()
    return text.encode()
