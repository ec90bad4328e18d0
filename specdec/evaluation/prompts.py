"""Questions to measure on, from files of every form, and the prompts that they make.

| file | row |
|---|---|
| Spec-Bench and MT-Bench, `question.jsonl` | `{"question_id": 81, "category": "writing", "turns": ["...", "..."]}` |
| SPEED-Bench, as on the hub | the same |
| SPEED-Bench, as NVIDIA's script prepares it | `{"category": "qa", "messages": [{"role": "user", "content": "..."}]}` |
| HumanEval, `HumanEval.jsonl.gz` | `{"task_id": "HumanEval/0", "prompt": "..."}` |
| GSM8K, `test.jsonl` | `{"question": "...", "answer": "..."}` |
| a text alone | `"..."` |
| any that drafters are trained on | conversations, pairs, texts: `specdec.training.data.rows` |

Files may be JSON lines or one JSON array, gzipped or not, or parquet; data sets of the hub go by `owner/name:split`. Of
a conversation all that the user says is asked, turn by turn; what the assistant says is not read: the target answers.
"MT-Bench's 80 first turns" of the papers is `first_turns(read_questions("question.jsonl"))`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec.common.checks import check_at_least
from specdec.training.data.chat_templates import ChatTemplate
from specdec.training.data.conversations import Conversation
from specdec.training.data.files import data_hash, rows_of
from specdec.training.data.left_out import LeftOut, Reason
from specdec.training.data.rows import PlainText, parse_row, system_of
from specdec.training.data.samples import MalformedError, UnusableError

__all__ = ["NotAsked", "Question", "QuestionSet", "conversation_prompt", "first_turns", "name_of_row", "parse_question"]
__all__ += ["read_question_set", "read_questions", "split_by_length"]

_NAMES = ("question_id", "task_id", "id")
_STAND_IN = "."  # for an answer that is not there yet
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How SPEED-Bench's rows on the hub begin whose texts are other data sets'."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, in one or more turns.

    Attributes:
        name: by which its file knows it, or its place in the file, from 1; no two of a file have the same.
        category: of Spec-Bench, MT-Bench and SPEED-Bench; empty elsewhere.
        turns: what the user says, turn by turn; at least one, none of them empty.
        system: the system message that the conversation begins with; empty for none.
    """

    name: str
    category: str
    turns: tuple[str, ...]
    system: str = ""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions of a file or data set.

    Attributes:
        name: what the user calls it.
        source: the file, or the data set of the hub.
        sha256: of the file, or of the data set's rows, in hexadecimal digits.
        questions: at least one.
        left_out: rows that cannot be asked, counted by reason, each with the place of the first.
    """

    name: str
    source: str
    sha256: str
    questions: tuple[Question, ...]
    left_out: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class NotAsked:
    """A question that is not asked, as it cannot be, or not without cutting it off.

    Attributes:
        question: the question.
        num_tokens: of its prompt, stand-ins for the answers between its turns included; 0 where none can be made.
        reason: what keeps it from being asked.
    """

    question: Question
    num_tokens: int
    reason: str


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a file or data set. Arguments and errors: `read_question_set`."""
    return list(read_question_set(path).questions)


def read_question_set(source: str | Path, name: str | None = None) -> QuestionSet:
    """The questions of a file or data set; what cannot be asked is counted, and logged.

    Left out are conversations with tools, of unknown roles or without a user, token ids, placeholders of SPEED-Bench.

    Args:
        source: a file, or a data set of the hub as `owner/name:split`.
        name: what the user calls it; by default as `source`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file of another kind, a row of no known form, or no question at all; the message names the file
            and the row.
        OSError: no such data set.
        RuntimeError: a library is missing.
    """
    left_out, found, num_rows = LeftOut(source), [], 0
    for num_rows, (place, row) in enumerate(rows_of(source, texts=True), start=1):
        try:
            found.append(parse_question(row, str(num_rows)))
        except UnusableError as error:
            if isinstance(error, MalformedError):
                raise ValueError(f"{source}{place}: expected turns or another form, got a row {error}") from error
            left_out.add(error, place)
        except ValueError as error:
            raise ValueError(f"{source}{place}: {error}") from error
    left_out.report("question", num_rows)
    questions = tuple(_with_names_of_their_own(found))
    return QuestionSet(name or str(source), str(source), data_hash(source), questions, left_out.reasons)


def conversation_prompt(
    question: Question,
    answers: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool | None = None,
    chat_template: str | None = None,
) -> torch.Tensor:
    """The prompt of one turn of a question: [T] int64 token ids up to where its answer begins.

    Args:
        question: what is asked.
        answers: what the target said to the turns before, one text each; none for the first turn.
        tokenizer: the target's.
        chat: put the turns through the chat template; False takes the text of the first turn as it is, to be continued.
            By default whether there is a template.
        chat_template: Jinja template; the tokenizer's own by default.

    Raises:
        UnusableError: the template refuses the conversation, or there is a system message and no template.
        ValueError: no template for `chat` or for a later turn, or no turn is left.
    """
    turn = len(answers)
    if turn >= len(question.turns):
        raise ValueError(f"answers: expected fewer than the question's {len(question.turns)} turns, got {turn}")
    template = ChatTemplate(tokenizer, chat_template)
    if not (template.is_there if chat is None else chat):
        if turn:
            raise ValueError(f"answers: expected none without a chat template, which joins turns, got {turn}")
        if question.system:
            raise UnusableError("with a system message, for which a chat template is needed")
        ids = list(tokenizer(question.turns[0]).input_ids)
    else:
        messages = [{"role": "system", "content": question.system}] if question.system else []
        for said, answer in zip(question.turns, [*answers, None], strict=False):
            messages.append({"role": "user", "content": said})
            messages += [] if answer is None else [{"role": "assistant", "content": answer}]
        ids = template.prompt(messages)
    return torch.tensor(ids, dtype=torch.int64)


def first_turns(
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool | None = None,
    max_length: int | None = None,
) -> list[torch.Tensor]:
    """Prompts of the first turns: 1-D int64 token ids each.

    Args:
        questions: what is asked.
        tokenizer: the target's.
        chat: as for `conversation_prompt`.
        max_length: most tokens of a prompt. A longer one is an error: cut off, it would ask something else.

    Raises:
        ValueError: `chat` without a template, or a prompt that is too long or cannot be made.
    """
    prompts = []
    for question in questions:
        try:
            ids = conversation_prompt(question, (), tokenizer, chat=chat)
        except UnusableError as error:
            raise ValueError(f"question {question.name}: {error}") from error
        if max_length is not None and len(ids) > max_length:
            raise ValueError(f"question {question.name}: expected at most {max_length} tokens, got {len(ids)}")
        prompts.append(ids)
    return prompts


def split_by_length(
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    context: int,
    num_turns: int | None = 1,
    chat: bool | None = None,
    chat_template: str | None = None,
) -> tuple[list[Question], list[NotAsked]]:
    """The questions that a target has room for, and those that are too long or that the template refuses.

    Nothing is cut off. So that all arms ask the same, whatever they answer, answers count as `max_new_tokens` each.

    Args:
        questions: what is asked.
        tokenizer: the target's.
        max_new_tokens: most tokens of an answer.
        context: tokens that the target has positions for.
        num_turns: how many turns of each are asked, at most; None for all.
        chat: as for `conversation_prompt`.
        chat_template: Jinja template; the tokenizer's own by default.

    Raises:
        ValueError: a number below 1, or several turns without a chat template.
    """
    check_at_least(1, {"max_new_tokens": max_new_tokens, "context": context, "num_turns": num_turns})
    fitting, not_asked = [], []
    for question in questions:
        turns = question.turns[:num_turns]
        answers = [_STAND_IN] * (len(turns) - 1)
        try:
            prompt = conversation_prompt(question, answers, tokenizer, chat=chat, chat_template=chat_template)
        except UnusableError as error:
            not_asked.append(NotAsked(question, 0, f"a question {error}"))
            continue
        num_new = len(turns) * max_new_tokens
        if len(prompt) + num_new <= context:
            fitting.append(question)
            continue
        reason = f"{len(prompt)} tokens of prompt and {num_new} of answers are more than the context of {context}"
        not_asked.append(NotAsked(question, len(prompt), reason))
    return fitting, not_asked


def parse_question(row: Mapping[str, Any], name: str) -> Question:
    """The question of a row.

    Args:
        row: what a file or data set has.
        name: where the row has none.

    Raises:
        MalformedError: it is of no known form.
        UnusableError: it cannot be asked.
        ValueError: turns that are no texts, or empty.
    """
    turns, system = row.get("turns"), system_of(row)
    if turns is None:
        turns, system = _asked(row, system)
    elif not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"turns: expected texts that are not empty, got {turns!r:.80}")
    if any(turn.startswith(_PLACEHOLDER) for turn in turns):
        raise UnusableError(
            "that is a placeholder for a text of another data set",
            "NVIDIA's prepare.py of SPEED-Bench puts the texts in",
        )
    category = row.get("category")
    system = system if isinstance(system, str) and system.strip() else ""
    return Question(name_of_row(row) or name, "" if category is None else str(category), tuple(turns), system)


def name_of_row(row: Mapping[str, Any]) -> str | None:
    """By what its file knows a row; None where it does not."""
    return next((str(row[key]) for key in _NAMES if row.get(key) is not None), None)


def _asked(row: Mapping[str, Any], system: Any) -> tuple[list[str], Any]:
    """What a row of a form that drafters are trained on asks, and its system message."""
    parsed = parse_row(row, with_answer=False)
    if isinstance(parsed, PlainText):
        text = parsed.prompt or parsed.text
        if not text.strip():
            raise UnusableError("with an empty prompt")
        return [text], system
    if not isinstance(parsed, Conversation):
        raise UnusableError("of token ids", "questions are texts")
    messages = list(parsed.messages)
    roles = [message["role"] for message in messages]
    if parsed.tools or "tool" in roles or any("tool_calls" in message for message in messages):
        raise UnusableError("with calls of functions")
    if "system" in roles[1:]:
        raise UnusableError("with a system message behind the first turn")
    system = messages[0]["content"] if roles[0] == "system" else ""
    return [message["content"] for message in messages if message["role"] == "user"], system


def _with_names_of_their_own(questions: Iterable[Question]) -> Iterable[Question]:
    """The second question of a name gets `#2` behind it, and so on: records know questions by their names."""
    seen: Counter[str] = Counter()
    for question in questions:
        seen[question.name] += 1
        count = seen[question.name]
        yield question if count == 1 else replace(question, name=f"{question.name}#{count}")
