"""What a target is to answer, from files of every form: prompts, questions of several turns, conversations.

Rows are those that drafters are trained on (`specdec.training.data.rows`), those of question files (`turns`, as
Spec-Bench's and MT-Bench's), and texts alone.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from specdec.evaluation.prompts import name_of_row, parse_question
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

_STAND_IN = {"role": "assistant", "content": "."}  # for an answer that is not there yet
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
        name: by which its file knows it; empty where it does not.
        length: tokens of all that is asked, later turns included, with a stand-in of a token for every answer between.
    """

    index: int
    tokens: tuple[int, ...]
    turns: tuple[tuple[Message, ...], ...] = ()
    is_self_made: bool = False
    name: str = ""
    length: int = 0

    @property
    def num_answers(self) -> int:
        """Answers that are written."""
        return max(1, len(self.turns))

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
    chat: bool | None = None,
) -> tuple[list[Prompt], dict[int, str]]:
    """Read what the target is to answer.

    Args:
        path: a file of prompts, texts or conversations, or a data set of the hub.
        tokenizer: the target's.
        vocab_size: the target's; ids beyond it are refused.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
        turns: which answers of a conversation are written anew.
        chat: put texts through the chat template, as what a user says; False takes of conversations the one text that
            is asked, without a template. By default as the form of the row is.

    Returns:
        the prompts, and of each row of which none can be made, by its place from 0, the reason.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed file, with the line, a chat template that cannot serve, or no prompt at all.
    """
    prompts, left_out = [], LeftOut(path)
    refused: dict[int, str] = {}
    template = ChatTemplate(tokenizer, chat_template)
    for index, (place, content) in enumerate(rows_of(path, texts=True)):
        try:
            row = _parsed(content, turns, chat)
            segments = _segments(row, turns) if isinstance(row, Conversation) else ()
            ids, length = _first_prompt(row, segments, template)
            if not ids:
                raise UnusableError("with an empty prompt")
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise ValueError(f"prompt: expected ids from 0 to {vocab_size - 1}, got {ids[:8]}")
        except UnusableError as error:
            left_out.add(error, place)
            refused[index] = f"a text {error}"
            continue
        except ValueError as error:
            raise ValueError(f"{path}{place}: {error}") from error
        prompts.append(Prompt(index, tuple(ids), segments, name=name_of_row(content) or "", length=length))
    left_out.report("prompt", len(prompts) + len(refused))
    return prompts, refused


def _parsed(content: Mapping[str, Any], turns: Turns, chat: bool | None) -> Row:
    """A row, as a conversation or not as `chat` says."""
    row: Row
    if content.get("turns") is not None:
        question = parse_question(content, "")
        if turns == "last" and len(question.turns) > 1:
            raise UnusableError("of several turns, whose earlier answers are not given")
        said = [message for text in question.turns for message in ({"role": "user", "content": text}, _STAND_IN)]
        system = [{"role": "system", "content": question.system}] if question.system else []
        row = Conversation((*system, *said))
    else:
        row = parse_row(content)
    if chat and isinstance(row, PlainText):
        text = row.prompt or row.text
        if not text.strip():
            raise UnusableError("with an empty prompt")
        return Conversation(({"role": "user", "content": text},))
    if chat is False and isinstance(row, Conversation):
        if [message["role"] for message in row.question] != ["user"]:
            raise UnusableError("of several messages, for which a chat template is needed")
        return PlainText(prompt="", text=row.question[0]["content"])
    return row


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


def _first_prompt(row: Row, segments: tuple[tuple[Message, ...], ...], template: ChatTemplate) -> tuple[list[int], int]:
    """Ids up to the first answer, and how many with all other questions, which a template may refuse."""
    if isinstance(row, TokenIds):
        first = row.spans[0][0] if row.spans else 0
        ids = row.tokens[:first] if first else row.tokens
        return ids, len(ids)
    if isinstance(row, PlainText):
        ids = list(template.tokenizer(row.prompt or row.text).input_ids)
        return ids, len(ids)
    conversation: list[Message] = []
    for segment in segments:
        conversation += [_STAND_IN] if conversation else []
        conversation += segment
    length = len(template.prompt(conversation, row.tools))
    return template.prompt(segments[0], row.tools), length
