"""What the target is to answer: prompts, and conversations whose answers it writes anew."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from specdec.training.data.conversations import messages_of, render
from specdec.training.data.files import rows_of
from specdec.training.data.rows import prompt_of
from specdec.training.data.samples import UnusableError

__all__ = ["Message", "Prompt", "Turns", "read_prompts"]

logger = logging.getLogger(__name__)

Message = dict[str, Any]

Turns = Literal["all", "last"]
"""Which answers of a conversation are written anew."""

_REWRITTEN_ROLES = {"system", "user", "assistant"}
"""With other roles, such as tools', later turns are about the given answers: only the last one is written anew."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one text begins with.

    Attributes:
        index: its place among all prompts; what its seed is counted from.
        tokens: ids up to the first answer; of a prompt that the target makes up, those that it continues.
        turns: of a conversation, what stands before each answer: the messages up to the first one, then those between
            two answers. Empty for a prompt of plain text.
        is_self_made: whether the target makes it up.
    """

    index: int
    tokens: tuple[int, ...]
    turns: tuple[tuple[Message, ...], ...] = ()
    is_self_made: bool = False

    @property
    def digest(self) -> str:
        """What a written line knows its prompt by."""
        return hashlib.sha256(json.dumps([self.tokens, self.turns]).encode()).hexdigest()[:16]


def read_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    chat_template: str | None = None,
    turns: Turns = "all",
) -> tuple[list[Prompt], int]:
    """Read what the target is to answer.

    Args:
        path: JSON lines of prompts, texts or conversations, or a `.pt` file of token ids.
        tokenizer: the target's.
        vocab_size: the target's; ids beyond it are refused.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
        turns: which answers of a conversation are written anew.

    Returns:
        the prompts, and how many conversations were left out because the chat template refuses them.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed line, by number, or no usable prompt at all.
    """
    prompts, reasons, count = [], Counter[str](), 0
    for index, (place, row) in enumerate(rows_of(path)):
        count += 1
        try:
            segments = () if _is_plain(row) else _segments(row, turns)
            ids = _first_prompt(segments, tokenizer, chat_template) if segments else prompt_of(row, tokenizer, None)
            if not ids or min(ids) < 0 or max(ids) >= vocab_size:
                raise ValueError(f"prompt: expected one or more ids from 0 to {vocab_size - 1}, got {ids[:8]}")
        except UnusableError as error:
            reasons[str(error)] += 1
            continue
        except ValueError as error:
            raise ValueError(f"{path}{place}: {error}") from error
        prompts.append(Prompt(index, tuple(ids), segments))
    for reason, number in reasons.items():
        logger.warning("%s: left out %d of %d prompts: %s", path, number, count, reason)
    if not prompts:
        why = "; ".join(f"{number} {reason}" for reason, number in reasons.items()) or "the file is empty"
        raise ValueError(f"data: expected at least one prompt in {path}, got none of {count}: {why}")
    return prompts, count - len(prompts)


def _is_plain(row: Mapping[str, Any]) -> bool:
    """Whether it is no conversation; some data sets repeat a conversation's first question as `prompt`."""
    is_conversation = "messages" in row or "conversations" in row
    return "tokens" in row or (not is_conversation and ("prompt" in row or "text" in row))


def _segments(row: Mapping[str, Any], turns: Turns) -> tuple[tuple[Message, ...], ...]:
    """What stands before each answer that is written anew; a question without an answer gets one."""
    messages = messages_of(row, "'prompt', 'text', 'messages', 'conversations' or 'tokens'")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UnusableError("with no question before an answer")
    if turns == "last" or not {message["role"] for message in messages} <= _REWRITTEN_ROLES:
        return (tuple(messages),)
    segments: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            segments[-1].append(message)
        elif segments[-1]:
            segments.append([])
    return tuple(tuple(segment) for segment in segments)


def _first_prompt(
    segments: tuple[tuple[Message, ...], ...], tokenizer: PreTrainedTokenizerBase, chat_template: str | None
) -> list[int]:
    """Ids up to the first answer; the other turns are rendered once, too, as a template may refuse them."""
    conversation: list[Message] = []
    for segment in segments:
        conversation += [{"role": "assistant", "content": "."}] if conversation else []
        conversation += segment
    render(conversation, tokenizer, chat_template, prompting=True)
    text = render(list(segments[0]), tokenizer, chat_template, prompting=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)
