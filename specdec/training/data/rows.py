"""Which form a row has: token ids, plain text, or a conversation.

    {"tokens": [...], "prompt_length": 12}              as `specdec distill` writes them; wins over text beside it
    {"tokens": [...], "spans": [[12, 40], [61, 90]]}    the spans are learnt: from the first of each to before its last
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]}    OpenAI, UltraChat
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}, ...]}      ShareGPT
    {"conversation": [...]}, {"data": ["question", "answer", ...]}                         LMSYS, early UltraChat
    {"instruction": "...", "input": "...", "output": "..."}                                Alpaca
    {"question": "...", "answer": "..."}                                                   and its like
    {"prompt": "...", "completion": "..."}              raw text, of which the completion is learnt
    {"text": "..."}                                     raw text, all of it learnt
    {"prompt": "..."}                                   raw text, for the target to continue

A row is of the first form in this order whose keys it has. `system` and `tools` beside a conversation belong to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from specdec.training.data.conversations import Conversation, alternating, conversation
from specdec.training.data.samples import MalformedError

__all__ = ["PlainText", "Row", "TokenIds", "parse_row", "system_of"]

_LISTS_OF_TURNS = ("messages", "conversations", "conversation", "data")
_QUESTIONS = ("instruction", "question", "query", "prompt")
_ANSWERS = ("output", "response", "answer")
_ADDITIONS = ("input", "context")  # what an instruction is about
_KEYS = "'messages', 'conversations', 'instruction', 'question', 'prompt', 'text' or 'tokens'"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids as they are.

    Attributes:
        tokens: the ids.
        spans: first token, and the one behind the last, of each part that is learnt.
    """

    tokens: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text without a template.

    Attributes:
        prompt: what is not learnt.
        text: what is learnt, behind the prompt.
    """

    prompt: str
    text: str


Row: TypeAlias = TokenIds | PlainText | Conversation


def parse_row(row: Mapping[str, Any], *, with_answer: bool = True) -> Row:
    """Read a row of any form; keys whose value is null count as absent.

    Args:
        row: what a file or data set has.
        with_answer: read the answer beside a question and the completion of a prompt; else they may be anything.

    Raises:
        MalformedError: it has none of the forms, or a value that its form does not have.
        UnusableError: a conversation that cannot be read.
        ValueError: token ids that are none.
    """
    row = {key: value for key, value in row.items() if value is not None}
    if "tokens" in row:
        return _token_ids(row)
    system = system_of(row)
    if key := next((key for key in _LISTS_OF_TURNS if key in row), None):
        turns = row[key]
        if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
            return alternating(turns, system)
        return conversation(turns, system, row.get("tools"))
    if (asked := _question(row)) is not None:
        answer = next((key for key in _ANSWERS if key in row), None) if with_answer else None
        return alternating([asked, *([_string(row, answer)] if answer else [])], system)
    if "prompt" in row:
        has_completion = with_answer and "completion" in row
        return PlainText(_string(row, "prompt"), _string(row, "completion") if has_completion else "")
    if "text" in row:
        return PlainText("", _string(row, "text"))
    raise MalformedError(
        "of no known form", f"expected one of the keys {_KEYS}, got {', '.join(map(repr, row)) or 'none'}"
    )


def system_of(row: Mapping[str, Any]) -> Any:
    """What stands as system message beside the turns of a row; None if nothing does."""
    return row.get("system", row.get("system_prompt"))


def _question(row: Mapping[str, Any]) -> str | None:
    """What a row of a question and its answer asks; None if it is no such row, as a prompt alone."""
    key = next((key for key in _QUESTIONS if key in row), None)
    if key is None or (key == "prompt" and not any(answer in row for answer in _ANSWERS)):
        return None
    addition = next((_string(row, key) for key in _ADDITIONS if key in row), "")
    return "\n\n".join(part for part in (_string(row, key), addition) if part.strip())


def _string(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise MalformedError(f"whose {key!r} is no text", f"got {type(row[key]).__name__}")
    return str(row[key])


def _token_ids(row: Mapping[str, Any]) -> TokenIds:
    tokens, start = row["tokens"], row.get("prompt_length", 0)
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise ValueError("tokens: expected a list of ints")
    spans = row.get("spans", [[start, len(tokens)]])
    is_pairs = isinstance(spans, list) and all(isinstance(span, list) and len(span) == 2 for span in spans)
    if not is_pairs or not all(isinstance(p, int) and 0 <= p <= len(tokens) for span in spans for p in span):
        raise ValueError(f"spans: expected a list of [first, last] within {len(tokens)} tokens, got {spans!r:.80}")
    return TokenIds(tokens, [(first, last) for first, last in spans])
