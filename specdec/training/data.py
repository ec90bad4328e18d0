"""Texts to learn from: files of several forms, as token ids with a mask of what may be learnt.

JSON lines, one text per line, in any of these forms (also mixed):

    {"text": "..."}                                     all of it is learnt
    {"prompt": "...", "completion": "..."}              the completion is learnt
    {"tokens": [...], "prompt_length": 12}              as `specdec distill` writes them; wins over text beside it
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}, ...]}     (ShareGPT)

Conversations go through the tokenizer's chat template, and what the assistant says is learnt. A `.pt` file holds token
ids: a [N, T] tensor or a list of 1-D tensors.
"""

import json
import logging
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec.models.target.target import Target

__all__ = ["MIN_TOKENS", "Sample", "Samples", "Texts", "collate", "read_prompts", "read_samples", "split_held_out"]

logger = logging.getLogger(__name__)

MIN_TOKENS = 8
"""Shorter texts are left out: the deepest head would have nothing to guess."""

_TURNS = {"messages": ("role", "content"), "conversations": ("from", "value")}  # keys of a turn: who, and what
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class _UnusableError(ValueError):
    """A text that cannot be learnt from, for a reason that is counted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One text.

    Attributes:
        tokens: [T] int64.
        loss_mask: [T] bool, tokens that may be learnt.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one that may be learnt; what an evaluation starts from."""
        return int(self.loss_mask.int().argmax())


class Samples(torch.utils.data.Dataset[Sample]):
    """A list of samples as the trainer wants it."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts to learn from and to hold out.

    Attributes:
        source: a file, or samples.
        held_out: a file or samples to evaluate on, or the part of `source` that is kept for it.
        tokenizer: the target's; not needed where files hold token ids.
        max_length: tokens at which texts are cut off; by default 2048 or the target's context.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
    """

    source: str | Path | Sequence[Sample]
    held_out: str | Path | Sequence[Sample] | float = 0.05
    tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int | None = None
    chat_template: str | None = None

    def read(self, target: Target, seed: int) -> tuple[list[Sample], list[Sample]]:
        """What is trained on, and what is held out.

        Raises:
            ValueError: bad limits, malformed files, or too few usable texts.
        """
        longest = min(2048, target.max_positions) if self.max_length is None else self.max_length
        if not 1 <= longest <= target.max_positions:
            raise ValueError(f"max_length: expected 1 to {target.max_positions}, the target's context, got {longest}")

        def samples(source: str | Path | Sequence[Sample]) -> list[Sample]:
            if not isinstance(source, str | Path):
                return list(source)
            return read_samples(
                Path(source),
                self.tokenizer,
                max_length=longest,
                vocab_size=target.vocab_size,
                chat_template=self.chat_template,
            )

        train = samples(self.source)
        if isinstance(self.held_out, int | float):
            return split_held_out(train, self.held_out, seed)
        held_out = samples(self.held_out)
        if not train or not held_out:
            raise ValueError(f"data: expected texts to train on and to hold out, got {len(train)} and {len(held_out)}")
        return train, held_out


def read_samples(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int,
    vocab_size: int,
    chat_template: str | None = None,
) -> list[Sample]:
    """Read all usable texts of a file.

    Args:
        path: `.jsonl` or `.pt`.
        tokenizer: the target's; not needed where the file holds token ids.
        max_length: longer texts are cut off.
        vocab_size: the target's; ids beyond it are refused.
        chat_template: Jinja template for conversations; the tokenizer's own by default.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed line, by number, or no usable text at all, with the reasons.
    """
    samples, reasons, count = [], Counter[str](), 0
    for place, row in _rows(path):
        count += 1
        try:
            sample = _sample(row, tokenizer, chat_template)
            samples.append(_cut(sample, max_length, vocab_size))
        except _UnusableError as error:
            reasons[str(error)] += 1
        except ValueError as error:
            raise ValueError(f"{path}{place}: {error}") from error
    for reason, number in reasons.items():
        logger.warning("%s: left out %d of %d texts: %s", path, number, count, reason)
    if not samples:
        why = "; ".join(f"{number} {reason}" for reason, number in reasons.items()) or "the file is empty"
        raise ValueError(f"data: expected at least one usable text in {path}, got none of {count}: {why}")
    return samples


def read_prompts(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, chat_template: str | None = None
) -> list[torch.Tensor]:
    """Read what the target is to continue: prompts, texts, or conversations up to their last answer.

    Args:
        path: JSON lines, or a `.pt` file of token ids.
        tokenizer: the target's.
        vocab_size: the target's; ids beyond it are refused.
        chat_template: Jinja template for conversations; the tokenizer's own by default.

    Returns:
        1-D int64 tensors of at least one token.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed line, by number.
    """
    prompts = []
    for place, row in _rows(path):
        try:
            ids = _prompt(row, tokenizer, chat_template)
            if not ids or min(ids) < 0 or max(ids) >= vocab_size:
                raise ValueError(f"prompt: expected one or more ids from 0 to {vocab_size - 1}, got {ids[:8]}")
        except ValueError as error:
            raise ValueError(f"{path}{place}: {error}") from error
        prompts.append(torch.tensor(ids, dtype=torch.int64))
    if not prompts:
        raise ValueError(f"data: expected at least one prompt in {path}, got none")
    return prompts


def split_held_out(samples: Sequence[Sample], fraction: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Shuffle and split into what is trained on and what is held out, at least one text each.

    Raises:
        ValueError: fewer than two texts, or a fraction outside (0, 1).
    """
    if not 0 < fraction < 1:
        raise ValueError(f"held_out: expected a part of the texts between 0 and 1, or a file, got {fraction}")
    if len(samples) < 2:
        raise ValueError(f"data: expected at least 2 usable texts, one of them to hold out, got {len(samples)}")
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(max(1, round(fraction * len(samples))), len(samples) - 1)
    return [samples[index] for index in order[count:]], [samples[index] for index in order[:count]]


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """A batch, right-padded: `input_ids` [B, T] int64 and `loss_mask` [B, T] bool."""
    width = max(sample.tokens.shape[0] for sample in samples)
    tokens = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : sample.tokens.shape[0]] = sample.tokens
        mask[row, : sample.tokens.shape[0]] = sample.loss_mask
    return {"input_ids": tokens, "loss_mask": mask}


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a file of either form with their place for messages."""
    if not path.exists():
        raise FileNotFoundError(f"data: expected a file, got {path}")
    return _token_rows(path) if path.suffix == ".pt" else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Lines of a file with their place for messages; empty lines are skipped."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: expected a JSON object, got {error}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
                yield f":{number}", row


def _token_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of token ids in a `.pt` file."""
    try:
        rows = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: expected a readable file of token ids, got {error}") from error
    if isinstance(rows, torch.Tensor) and rows.ndim == 2:
        rows = list(rows)
    is_rows = isinstance(rows, list) and all(isinstance(row, torch.Tensor) and row.ndim == 1 for row in rows)
    if not is_rows or any(row.is_floating_point() for row in rows):
        raise ValueError(f"{path}: expected a [N, T] tensor of token ids or a list of 1-D ones")
    for index, row in enumerate(rows):
        yield f"[{index}]", {"tokens": row.tolist(), "prompt_length": 0}


def _sample(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, chat_template: str | None) -> Sample:
    """One row's tokens and mask."""
    if "tokens" in row:
        tokens, start = row["tokens"], row.get("prompt_length", 0)
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ValueError("tokens: expected a list of ints")
        return _spans(tokens, [(start, len(tokens))])
    if tokenizer is None:
        raise ValueError("tokenizer: expected one for a file of text, got None")
    if "text" in row:
        ids = tokenizer(_text(row, "text")).input_ids
        return _spans(ids, [(0, len(ids))])
    if "prompt" in row and "completion" in row:
        ids = tokenizer(_text(row, "prompt")).input_ids
        end = tokenizer(_text(row, "completion"), add_special_tokens=False).input_ids
        return _spans(ids + end, [(len(ids), len(ids) + len(end))])
    messages = _messages(row, "'text', 'prompt' with 'completion', 'messages', 'conversations' or 'tokens'")
    return _conversation(messages, tokenizer, chat_template)


def _prompt(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> list[int]:
    """Token ids of what stands before the text that the target is to write."""
    if "tokens" in row:
        return list(row["tokens"][: row.get("prompt_length") or None])
    for key in ("prompt", "text"):
        if key in row:
            return list(tokenizer(_text(row, key)).input_ids)
    messages = _messages(row, "'prompt', 'text', 'messages', 'conversations' or 'tokens'")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    text = _render(messages, tokenizer, chat_template, prompting=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _messages(row: Mapping[str, Any], keys: str) -> list[dict[str, str]]:
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
        messages.append({"role": role, "content": _text(turn, text_key)})
    while messages and messages[0]["role"] == "assistant":
        messages.pop(0)
    return messages


def _render(
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
        raise _UnusableError("with turns that the chat template refuses") from error


def _conversation(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, chat_template: str | None
) -> Sample:
    """A conversation through the chat template; what the assistant says may be learnt.

    Where a turn begins and ends in the text is found by rendering the conversation up to it.
    """
    text = _render(messages, tokenizer, chat_template, prompting=False) if messages else ""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render(messages[:index], tokenizer, chat_template, prompting=True)
            after = _render(messages[: index + 1], tokenizer, chat_template, prompting=False).rstrip()
            if not text.startswith(after) or not after.startswith(before.rstrip()):
                raise _UnusableError("whose earlier turns the chat template changes later")
            spans.append((len(before), len(after)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # templates write them
    starts = [start for start, _ in encoded.offset_mapping]
    mask = torch.zeros(len(starts), dtype=torch.bool)
    for first, last in spans:
        mask |= torch.tensor([first <= start < last for start in starts])
    return Sample(torch.tensor(encoded.input_ids, dtype=torch.int64), mask)


def _spans(tokens: Sequence[int], spans: Iterable[tuple[int, int]]) -> Sample:
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    for first, last in spans:
        mask[first:last] = True
    return Sample(torch.tensor(tokens, dtype=torch.int64), mask)


def _cut(sample: Sample, max_length: int, vocab_size: int) -> Sample:
    """The beginning of a text, if there is something to learn in it."""
    tokens, mask = sample.tokens[:max_length], sample.loss_mask[:max_length]
    if tokens.shape[0] < MIN_TOKENS:
        raise _UnusableError(f"shorter than {MIN_TOKENS} tokens")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"tokens: expected ids from 0 to {vocab_size - 1}, got {low if low < 0 else high}")
    if not mask[2:].any():  # the first token that any drafter guesses is the one after the root
        raise _UnusableError(f"with nothing to learn in the first {max_length} tokens")
    return Sample(tokens, mask)


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key}: expected a string, got {type(value).__name__}")
    return value
