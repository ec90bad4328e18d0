"""Conversations: their turns, their text through a chat template, and where in it the answers lie."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec.training.data.samples import Sample, UnusableError

__all__ = ["conversation", "messages_of", "render", "string_of"]


_TURNS = {"messages": ("role", "content"), "conversations": ("from", "value")}  # keys of a turn: who, and what
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def messages_of(row: Mapping[str, Any], keys: str) -> list[dict[str, str]]:
    """A conversation of either form as transformers wants it; answers to nothing are left out.

    Raises:
        ValueError: there is none, and none of the other `keys` has matched; or it is malformed.
    """
    key = next((key for key in _TURNS if key in row), None)
    if key is None:
        raise ValueError(f"expected one of the keys {keys}, got {', '.join(map(repr, row)) or 'none'}")
    turns, (role_key, text_key) = row[key], _TURNS[key]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("expected a list of turns")
    messages = []
    for turn in turns:
        role = _ROLES.get(str(turn.get(role_key)))
        if role is None:
            raise ValueError(f"{role_key}: expected one of {', '.join(_ROLES)}, got {turn.get(role_key)!r}")
        messages.append({"role": role, "content": string_of(turn, text_key)})
    while messages and messages[0]["role"] == "assistant":
        messages.pop(0)
    return messages


def render(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, chat_template: str | None, *, prompting: bool
) -> str:
    """A conversation as text."""
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat_template: expected one, which the tokenizer does not have, got None")
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=chat_template, tokenize=False, add_generation_prompt=prompting
            )
        )
    except Exception as error:  # templates raise what they like, about turns that do not alternate
        raise UnusableError("with turns that the chat template refuses") from error


def conversation(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, chat_template: str | None
) -> Sample:
    """A conversation through the chat template; what the assistant says may be learnt.

    Where a turn begins and ends in the text is found by rendering the conversation up to it.
    """
    text = render(messages, tokenizer, chat_template, prompting=False) if messages else ""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:index], tokenizer, chat_template, prompting=True)
            after = render(messages[: index + 1], tokenizer, chat_template, prompting=False).rstrip()
            if not text.startswith(after) or not after.startswith(before.rstrip()):
                raise UnusableError("whose earlier turns the chat template changes later")
            spans.append((len(before), len(after)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # templates write them
    starts = [start for start, _ in encoded.offset_mapping]
    mask = torch.zeros(len(starts), dtype=torch.bool)
    for first, last in spans:
        mask |= torch.tensor([first <= start < last for start in starts])
    return Sample(torch.tensor(encoded.input_ids, dtype=torch.int64), mask)


def string_of(row: Mapping[str, Any], key: str) -> str:
    """A value that has to be a string.

    Raises:
        ValueError: it is none.
    """
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key}: expected a string, got {type(value).__name__}")
    return value
