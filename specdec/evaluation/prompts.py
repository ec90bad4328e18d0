"""The questions that papers measure on, as their files have them, and prompts made of them by the chat template.

| file | row |
|---|---|
| Spec-Bench and MT-Bench, `question.jsonl` | `{"question_id": 81, "category": "writing", "turns": ["...", "..."]}` |
| HumanEval, `HumanEval.jsonl.gz` | `{"task_id": "HumanEval/0", "prompt": "..."}` |
| GSM8K, `test.jsonl` | `{"question": "...", "answer": "..."}` |
| any other | `{"prompt": "..."}`, or a JSON array of texts or of such rows |

Files may be gzipped. "MT-Bench's 80 first turns" of the papers is `first_turns(read_questions("question.jsonl"))`.
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from specdec.common.checks import check_at_least

__all__ = ["Question", "evenly", "first_turns", "read_questions"]

T = TypeVar("T")
_NAMES = ("question_id", "task_id", "id")
_TEXTS = ("prompt", "question")
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, in one or more turns.

    Attributes:
        name: by which its file knows it, or its place in the file, from 1.
        category: of Spec-Bench and MT-Bench; empty elsewhere.
        turns: what the user says, turn by turn; at least one, none of them empty.
    """

    name: str
    category: str
    turns: tuple[str, ...]


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a file.

    Args:
        path: JSON lines or a JSON array, gzipped or not.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, a row of no known form, or no row at all; the message names the file and the row.
    """
    path = Path(path)
    found = [_question(row, str(place), f"{path}:{place}") for place, row in enumerate(_rows(path), start=1)]
    if not found:
        raise ValueError(f"{path}: expected at least one question, got an empty file")
    return found


def evenly(questions: Sequence[T], count: int | None) -> list[T]:
    """As many questions, spread evenly over all, as files are sorted by category; all of them for None.

    Raises:
        ValueError: fewer than 1, or more than there are.
    """
    if count is None:
        return list(questions)
    check_at_least(1, {"count": count})
    if count > len(questions):
        raise ValueError(f"count: expected at most {len(questions)}, which the file has, got {count}")
    return [questions[place * len(questions) // count] for place in range(count)]


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
        chat: put every turn through the tokenizer's chat template, with its opening of an answer; False takes the text
            as it is, to be continued. By default whether there is a template.
        max_length: most tokens of a prompt. A longer one is an error: cut off, it would ask something else.

    Raises:
        ValueError: `chat` without a template, or a prompt that is too long.
    """
    has_template = tokenizer.chat_template is not None
    if chat and not has_template:
        raise ValueError("chat: expected a tokenizer with a chat template, got one without; chat=False continues texts")
    prompts = []
    for question in questions:
        if has_template if chat is None else chat:
            turn = [{"role": "user", "content": question.turns[0]}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            # the template writes the special tokens itself
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
        else:
            ids = tokenizer(question.turns[0], return_tensors="pt").input_ids[0]
        if max_length is not None and len(ids) > max_length:
            raise ValueError(f"question {question.name}: expected at most {max_length} tokens, got {len(ids)}")
        prompts.append(ids)
    return prompts


def _rows(path: Path) -> Iterator[Any]:
    """What a file holds, row by row; empty lines are none."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode("utf-8")
    if text.lstrip().startswith("["):
        yield from _loaded(text, str(path))
        return
    for place, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _loaded(line, f"{path}:{place}")


def _loaded(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place}: expected JSON, got {text[:40]!r}: {error}") from None


def _question(row: Any, name: str, place: str) -> Question:
    """The question of a row."""
    row = {"prompt": row} if isinstance(row, str) else row
    known = ", ".join(("turns", *_TEXTS))
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: expected a text or an object with one of {known}, got {type(row).__name__}")
    turns = row.get("turns", next(([row[key]] for key in _TEXTS if key in row), None))
    if turns is None:
        raise ValueError(f"{place}: expected one of {known}, got {', '.join(map(str, row)) or 'no keys'}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{place}: expected texts that are not empty, got {turns!r:.80}")
    name = next((str(row[key]) for key in _NAMES if key in row), name)
    return Question(name, str(row.get("category", "")), tuple(turns))
