"""From files to samples and prompts: the forms of `rows.py` through tokenizer and chat template.

Conversations go through the chat template, and what the assistant says is learnt. A row that cannot be learnt from is
left out for a reason that is counted, and so is a conversation that the template refuses; a file that is not what its
name says is an error.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from transformers import PreTrainedTokenizerBase

from specdec.models.target.target import Target
from specdec.training.data.answers import encode_conversation
from specdec.training.data.chat_templates import ChatTemplate
from specdec.training.data.files import rows_of
from specdec.training.data.left_out import LeftOut, Reading
from specdec.training.data.rows import PlainText, Row, TokenIds, parse_row
from specdec.training.data.samples import MIN_TOKENS, Sample, UnusableError, masked, split_held_out
from specdec.training.data.token_cache import cached_reading

__all__ = ["MAX_LENGTH", "Texts", "read_samples", "read_texts"]

logger = logging.getLogger(__name__)

MAX_LENGTH = 2048
"""Tokens at which texts are cut off, if nobody says otherwise."""

_SECONDS_BETWEEN_LINES = 30.0


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts to learn from and to hold out.

    Attributes:
        source: a file, a data set of the hub (`owner/name:split`), or samples.
        held_out: as `source`, to evaluate on; or the part of `source` that is kept for it.
        tokenizer: the target's; not needed where files hold token ids.
        max_length: tokens at which texts are cut off; by default `MAX_LENGTH` or the target's context.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
    """

    source: str | Path | Sequence[Sample]
    held_out: str | Path | Sequence[Sample] | float = 0.05
    tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int | None = None
    chat_template: str | None = None

    def read(self, target: Target, seed: int) -> tuple[Sequence[Sample], Sequence[Sample]]:
        """What is trained on, and what is held out.

        Raises:
            ValueError: bad limits, malformed files, or too few usable texts.
        """
        longest = min(MAX_LENGTH, target.max_positions) if self.max_length is None else self.max_length
        if not 1 <= longest <= target.max_positions:
            raise ValueError(f"max_length: expected 1 to {target.max_positions}, the target's context, got {longest}")

        def samples(source: str | Path | Sequence[Sample]) -> Sequence[Sample]:
            if not isinstance(source, str | Path):
                return list(source)
            return read_samples(
                source,
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
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int,
    vocab_size: int,
    chat_template: str | None = None,
) -> Sequence[Sample]:
    """All usable texts of a file or data set; what is left out is logged.

    Args:
        source: a file, or a data set of the hub.
        tokenizer: the target's; not needed where the file holds token ids.
        max_length: longer texts are cut off.
        vocab_size: the target's; ids beyond it are refused.
        chat_template: Jinja template for conversations; the tokenizer's own by default.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed file, with the line, a template that cannot serve, or no usable text at all, with the
            reasons.
    """
    reading = read_texts(source, tokenizer, max_length=max_length, vocab_size=vocab_size, chat_template=chat_template)
    LeftOut(source, reading.left_out).report("usable text", reading.num_rows)
    if reading.num_hidden:
        counts = f"{reading.num_hidden} of {reading.num_answers}"
        logger.warning("%s: not learnt: %s answers, which the chat template rewrites or drops", source, counts)
    return reading.samples


def read_texts(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int,
    vocab_size: int,
    chat_template: str | None = None,
) -> Reading:
    """All usable texts of a file or data set, and what became of the others. Arguments and errors: `read_samples`."""

    def read() -> Reading:
        return _read_texts(source, tokenizer, max_length, vocab_size, chat_template)

    limits = {"min_length": MIN_TOKENS, "max_length": max_length, "vocab_size": vocab_size}
    return cached_reading(source, tokenizer, limits, chat_template, read)


def _read_texts(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    vocab_size: int,
    chat_template: str | None,
) -> Reading:
    encoder = _Encoder(tokenizer, chat_template)
    left_out = LeftOut(source)
    samples, num_rows, num_cut, num_answers, num_hidden = [], 0, 0, 0, 0
    for place, content in _shown(rows_of(source), source):
        num_rows += 1
        try:
            sample, answers, hidden = encoder.sample(parse_row(content))
            samples.append(_cut(sample, max_length, vocab_size))
        except UnusableError as error:
            left_out.add(error, place)
        except ValueError as error:
            raise ValueError(f"{source}{place}: {error}") from error
        else:
            num_cut += sample.tokens.shape[0] > max_length
            num_answers += answers
            num_hidden += hidden
    return Reading(samples, num_rows, num_cut, num_answers, num_hidden, left_out.reasons)


class _Encoder:
    """Rows as token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ValueError("tokenizer: expected one for a file of text, got None")
        return self._tokenizer

    @cached_property
    def template(self) -> ChatTemplate:
        template = ChatTemplate(self.tokenizer, self._chat_template)
        template.check()
        return template

    def sample(self, row: Row) -> tuple[Sample, int, int]:
        """Tokens and what is learnt of them; how many answers there are, and how many of them are hidden."""
        if isinstance(row, TokenIds):
            return masked(row.tokens, row.spans), 0, 0
        if isinstance(row, PlainText):
            prompt = self.ids(row.prompt) if row.prompt else []
            text = self.tokenizer(row.text, add_special_tokens=not row.prompt).input_ids
            return masked([*prompt, *text], [(len(prompt), len(prompt) + len(text))]), 0, 0
        encoded = encode_conversation(row, self.template)
        return encoded.sample, encoded.num_answers, encoded.num_hidden

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)


def _cut(sample: Sample, max_length: int, vocab_size: int) -> Sample:
    """The beginning of a text, if there is something to learn in it."""
    tokens, mask = sample.tokens[:max_length], sample.loss_mask[:max_length]
    if tokens.shape[0] < MIN_TOKENS:
        raise UnusableError(f"shorter than {MIN_TOKENS} tokens")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"tokens: expected ids from 0 to {vocab_size - 1}, got {low if low < 0 else high}")
    if not mask[2:].any():  # the first token that any drafter guesses is the one after the root
        raise UnusableError(f"with nothing to learn in the first {max_length} tokens")
    return Sample(tokens, mask)


def _shown(rows: Iterator[tuple[str, Any]], source: str | Path) -> Iterator[tuple[str, Any]]:
    """The rows, with their number so far on a terminal, or in a line now and then."""
    console, last = Console(stderr=True), time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed} texts"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"reading {source}", total=None)
        for count, row in enumerate(rows, start=1):
            yield row
            progress.advance(task)
            if not console.is_terminal and time.monotonic() - last > _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                console.print(f"reading {source}: {count} texts", soft_wrap=True)
