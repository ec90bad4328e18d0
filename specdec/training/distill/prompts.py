"""What the target is to answer: prompts, and conversations whose answers it writes anew."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from specdec.training.data.chat_templates import ChatTemplate
from specdec.training.data.conversations import Conversation
from specdec.training.data.files import rows_of
from specdec.training.data.left_out import LeftOut
from specdec.training.data.rows import PlainText, Row, TokenIds, parse_row
from specdec.training.data.samples import UnusableError

__all__ = ["Message", "Prompt", "Turns", "read_prompts"]

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
        path: a file of prompts, texts or conversations, or a data set of the hub.
        tokenizer: the target's.
        vocab_size: the target's; ids beyond it are refused.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
        turns: which answers of a conversation are written anew.

    Returns:
        the prompts, and how many rows were left out because none can be made of them.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed file, with the line, a chat template that cannot serve, or no prompt at all.
    """
    prompts, left_out, count = [], LeftOut(path), 0
    template = ChatTemplate(tokenizer, chat_template)
    for index, (place, content) in enumerate(rows_of(path)):
        count += 1
        try:
            row = parse_row(content)
            segments = _segments(row, turns) if isinstance(row, Conversation) else ()
            ids = _first_prompt(row, segments, template)
            if not ids:
                raise UnusableError("with an empty prompt")
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise ValueError(f"prompt: expected ids from 0 to {vocab_size - 1}, got {ids[:8]}")
        except UnusableError as error:
            left_out.add(error, place)
            continue
        except ValueError as error:
            raise ValueError(f"{path}{place}: {error}") from error
        prompts.append(Prompt(index, tuple(ids), segments))
    left_out.report("prompt", count)
    return prompts, count - len(prompts)


def _segments(conversation: Conversation, turns: Turns) -> tuple[tuple[Message, ...], ...]:
    """What stands before each answer that is written anew; a question without an answer gets one."""
    messages = conversation.question
    is_rewritten = not conversation.tools and {message["role"] for message in messages} <= _REWRITTEN_ROLES
    if turns == "last" or not is_rewritten:
        return (messages,)
    segments: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            segments[-1].append(message)
        elif segments[-1]:
            segments.append([])
    return tuple(tuple(segment) for segment in segments)


def _first_prompt(row: Row, segments: tuple[tuple[Message, ...], ...], template: ChatTemplate) -> list[int]:
    """Ids up to the first answer; the other turns are rendered once, too, as a template may refuse them."""
    if isinstance(row, TokenIds):
        first = row.spans[0][0] if row.spans else 0
        return row.tokens[:first] if first else row.tokens
    if isinstance(row, PlainText):
        return list(template.tokenizer(row.prompt or row.text).input_ids)
    conversation: list[Message] = []
    for segment in segments:
        conversation += [{"role": "assistant", "content": "."}] if conversation else []
        conversation += segment
    template.render(conversation, row.tools, prompting=True)
    return template.prompt(segments[0], row.tools)
