"""How the two endpoints write answers: `/v1/completions` and `/v1/chat/completions`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from specdec.common.text_pieces import token_bytes
from specdec.engine.requests import TokenLogprobs

__all__ = ["ChatForm", "CompletionForm", "Form", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer, or all of it.

    Attributes:
        index: of the answer.
        text: what there is to show.
        told: log-probabilities of its tokens; None where nobody asked.
        offset: characters of the answer before it.
        is_first: whether it is the first one.
        finish_reason: of the last one.
    """

    index: int
    text: str
    told: Sequence[TokenLogprobs] | None
    offset: int = 0
    is_first: bool = True
    finish_reason: str | None = None


class Form(Protocol):
    """How an endpoint writes answers.

    Attributes:
        name: what OpenAI's API calls them.
        chunk_name: the same of the parts of a stream.
        prefix: of their ids.
    """

    name: str
    chunk_name: str
    prefix: str

    def choice(self, piece: Piece, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """A whole answer."""
        ...

    def delta(self, piece: Piece, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """A part of one."""
        ...


class CompletionForm:
    """Plain texts."""

    name = chunk_name = "text_completion"
    prefix = "cmpl"

    def choice(self, piece: Piece, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """As `Form`."""
        logprobs = None if piece.told is None else self._logprobs(piece.told, piece.offset, tokenizer)
        told = {"text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return {"index": piece.index, **told}

    delta = choice

    def _logprobs(
        self, told: Sequence[TokenLogprobs], offset: int, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, Any]:
        tokens = [_text(tokenizer, one.token) for one in told]
        offsets = [offset + sum(map(len, tokens[:place])) for place in range(len(tokens))]
        tops = [{_text(tokenizer, token): logprob for token, logprob in one.top} for one in told]
        own = [one.logprob for one in told]
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}


class ChatForm:
    """Messages of an assistant."""

    name, chunk_name = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, piece: Piece, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """As `Form`."""
        return self._written(piece, tokenizer, {"message": self._message(piece.text) | {"refusal": None}})

    def delta(self, piece: Piece, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """As `Form`."""
        delta = self._message(piece.text) if piece.is_first else {"content": piece.text} if piece.text else {}
        return self._written(piece, tokenizer, {"delta": delta})

    def _message(self, text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    def _written(self, piece: Piece, tokenizer: PreTrainedTokenizerBase, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None if piece.told is None else self._logprobs(piece.told, tokenizer)
        return {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, told: Sequence[TokenLogprobs], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        def one(token: int, logprob: float) -> dict[str, Any]:
            written = list(token_bytes(tokenizer, token))
            return {"token": _text(tokenizer, token), "logprob": logprob, "bytes": written}

        content = [
            one(token.token, token.logprob) | {"top_logprobs": [one(*alternative) for alternative in token.top]}
            for token in told
        ]
        return {"content": content, "refusal": None}


def _text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.decode([token]))
