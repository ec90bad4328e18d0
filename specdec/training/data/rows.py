"""Which form a row has, and what of it is learnt."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.training.data.conversations import conversation, messages_of, render, string_of
from specdec.training.data.samples import Sample, masked

__all__ = ["prompt_of", "sample_of"]


def sample_of(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, chat_template: str | None) -> Sample:
    """One row's tokens and mask."""
    if "tokens" in row:
        tokens, start = row["tokens"], row.get("prompt_length", 0)
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ValueError("tokens: expected a list of ints")
        return masked(tokens, _spans(row, start, len(tokens)))
    if tokenizer is None:
        raise ValueError("tokenizer: expected one for a file of text, got None")
    if "text" in row:
        ids = tokenizer(string_of(row, "text")).input_ids
        return masked(ids, [(0, len(ids))])
    if "prompt" in row and "completion" in row:
        ids = tokenizer(string_of(row, "prompt")).input_ids
        end = tokenizer(string_of(row, "completion"), add_special_tokens=False).input_ids
        return masked(ids + end, [(len(ids), len(ids) + len(end))])
    messages = messages_of(row, "'text', 'prompt' with 'completion', 'messages', 'conversations' or 'tokens'")
    return conversation(messages, tokenizer, chat_template)


def prompt_of(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> list[int]:
    """Token ids of what stands before the text that the target is to write."""
    if "tokens" in row:
        return list(row["tokens"][: row["spans"][0][0] if row.get("spans") else row.get("prompt_length") or None])
    for key in ("prompt", "text"):
        if key in row:
            return list(tokenizer(string_of(row, key)).input_ids)
    messages = messages_of(row, "'prompt', 'text', 'messages', 'conversations' or 'tokens'")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    text = render(messages, tokenizer, chat_template, prompting=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _spans(row: Mapping[str, Any], start: int, end: int) -> list[tuple[int, int]]:
    """What may be learnt of a row of token ids: its `spans`, or all from `start` on."""
    spans = row.get("spans", [[start, end]])
    is_pairs = isinstance(spans, list) and all(isinstance(span, list) and len(span) == 2 for span in spans)
    if not is_pairs or not all(isinstance(place, int) and 0 <= place <= end for span in spans for place in span):
        raise ValueError(f"spans: expected a list of [first, last] within {end} tokens, got {spans!r:.80}")
    return [(first, last) for first, last in spans]
